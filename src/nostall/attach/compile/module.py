"""Copies of a Dynamo graph and of its inputs, to be compiled a second time later."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx import GraphModule


def apart(module: GraphModule) -> GraphModule:
    """A copy that a compiler may change; it shares the tensors that the module holds."""
    memo: dict[int, Any] = {id(x): x for x in (*module.parameters(), *module.buffers())}
    found: GraphModule = copy.deepcopy(module, memo)
    old = module.graph.find_nodes(op="placeholder")
    for one, other in zip(old, found.graph.find_nodes(op="placeholder"), strict=True):
        # Where an input comes from: Dynamo writes it beside what copies of nodes take along.
        if hasattr(one, "_dynamo_source"):
            other._dynamo_source = one._dynamo_source
    return found


def without_memory(inputs: Sequence[Any]) -> list[Any]:
    """Fake tensors in place of real ones: nothing is kept alive until it is needed."""
    mode = FakeTensorMode()
    return [
        mode.from_tensor(x, static_shapes=True)
        if isinstance(x, Tensor) and not isinstance(x, FakeTensor)
        else x
        for x in inputs
    ]
