"""Assignment of operations to layers, by the module in whose forward pass each is called.

- ``block``: each element of a Sequential, ModuleList or ModuleDict is a layer, and so is each
  module outside of these that contains none of them.  A transformer is cut between its blocks.
- ``leaf``: each module without children is a layer, so cuts can be inside residual blocks.

Operations between two layers belong to the earlier one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, get_args

import torch

from nostall.parallel.errors import BadModel

Granularity = Literal["block", "leaf"]
GRANULARITIES: tuple[Granularity, ...] = get_args(Granularity)
_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)


def layer_modules(module: torch.nn.Module, granularity: Granularity) -> frozenset[str]:
    """Names of the submodules that become layers."""
    if granularity not in GRANULARITIES:
        raise BadModel(
            f"granularity {granularity!r} is unknown; allowed are {', '.join(GRANULARITIES)}"
        )
    names: set[str] = set()
    _collect(module, "", False, granularity, names)
    return frozenset(names)


def _collect(
    module: torch.nn.Module, name: str, in_container: bool, granularity: str, names: set[str]
) -> None:
    """Add the layers at or below ``module`` to ``names``."""
    children = list(module.named_children())
    is_container = isinstance(module, _CONTAINERS)
    has_container = any(isinstance(m, _CONTAINERS) for m in module.modules())
    is_divided = bool(children) and (
        granularity == "leaf" or not name or is_container or (has_container and not in_container)
    )
    if not is_divided:
        names.add(name)
        return
    for child_name, child in children:
        path = f"{name}.{child_name}" if name else child_name
        _collect(child, path, is_container, granularity, names)


def layer_names(paths: Sequence[str], modules: Collection[str]) -> list[str]:
    """Layer of each operation, in order; ``paths`` are the modules that call the operations.

    ``modules`` are the names of :func:`layer_modules`.  If a module is called again after another
    one, its second layer is named ``module#2``.  Operations before the first layer belong to it.
    """
    names: list[str] = []
    calls: dict[str, int] = {}
    layer = ""
    current_module = ""
    for path in paths:
        module = _enclosing_module(path, modules)
        if module and module != current_module:
            calls[module] = calls.get(module, 0) + 1
            layer = module if calls[module] == 1 else f"{module}#{calls[module]}"
            current_module = module
        names.append(layer)
    first = next((name for name in names if name), "model")
    return [name or first for name in names]


def _enclosing_module(path: str, modules: Collection[str]) -> str:
    """The innermost of ``modules`` that contains a path; empty if none does."""
    parts = path.split(".") if path else []
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        if name in modules:
            return name
    return ""
