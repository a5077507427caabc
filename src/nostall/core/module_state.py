"""Tensors that take the place of those of a ``torch.nn.Module`` in one call."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any


def placed_state(module: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of ``state``, by first names, for each place of the module, under one name each.

    Give it to ``torch.func.functional_call`` with ``tie_weights=False``.  By default torch swaps
    all names: a submodule with two names would keep the tensor of the call.
    """
    given = {
        id(tensor): state[name]
        for name, tensor in chain(module.named_parameters(), module.named_buffers())
        if name in state
    }
    return {
        f"{path}.{key}".removeprefix("."): given[id(tensor)]
        for path, part in module.named_modules()
        for key, tensor in chain(part._parameters.items(), part._buffers.items())
        if id(tensor) in given
    }
