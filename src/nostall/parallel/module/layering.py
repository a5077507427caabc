"""Which operation belongs to which layer: runs of operations of the same block of the module tree.

``block``: the elements of a Sequential or ModuleList are layers, and so is every module beside one
that has no such list inside; a transformer is cut at its blocks.  ``leaf``: every module without
children is a layer, so that cuts fall inside residual blocks too.  What is computed between two
layers belongs to the one before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, get_args

import torch

from nostall.parallel.errors import BadModel

Granularity = Literal["block", "leaf"]
GRANULARITIES: tuple[Granularity, ...] = get_args(Granularity)
_LISTS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)


def units(module: torch.nn.Module, granularity: Granularity) -> frozenset[str]:
    """Names of the modules that become layers."""
    if granularity not in GRANULARITIES:
        raise BadModel(
            f"granularity {granularity!r} is unknown; allowed are {', '.join(GRANULARITIES)}"
        )
    found: set[str] = set()
    _walk(module, "", False, granularity, found)
    return frozenset(found)


def _walk(
    module: torch.nn.Module, name: str, listed: bool, granularity: str, found: set[str]
) -> None:
    children = list(module.named_children())
    lists = isinstance(module, _LISTS)
    inside = any(isinstance(m, _LISTS) for m in module.modules())
    opened = bool(children) and (
        granularity == "leaf" or not name or lists or (inside and not listed)
    )
    if not opened:
        found.add(name)
        return
    for own, child in children:
        _walk(child, f"{name}.{own}" if name else own, lists, granularity, found)


def runs(paths: Sequence[str], found: Iterable[str]) -> list[str]:
    """The name of the layer of each operation, in order; one that comes again is numbered."""
    known = frozenset(found)
    names: list[str] = []
    times: dict[str, int] = {}
    current = ""
    open_unit = ""
    for path in paths:
        unit = _unit(path, known)
        if unit and unit != open_unit:
            times[unit] = times.get(unit, 0) + 1
            current = unit if times[unit] == 1 else f"{unit}#{times[unit]}"
            open_unit = unit
        names.append(current)
    first = next((name for name in names if name), "model")
    return [name or first for name in names]


def _unit(path: str, known: frozenset[str]) -> str:
    """The module among ``known`` that contains the path, '' for none."""
    parts = path.split(".") if path else []
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        if name in known:
            return name
    return ""
