"""Submodules that FSDP2 wraps: the repeated blocks of a module."""

from __future__ import annotations

from collections import Counter

import torch

_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)


def wrapped_blocks(module: torch.nn.Module) -> tuple[str, ...]:
    """Names of the outermost elements of containers that have parameters of their own.

    A block that shares a parameter with another part is left to the rest of the module, which is
    one group, because a group owns its parameters.
    """
    holders = Counter(id(p) for part in module.modules() for p in part.parameters(recurse=False))
    found: list[str] = []
    for name, part in module.named_modules():
        if not isinstance(part, _CONTAINERS) or any(name.startswith(f"{b}.") for b in found):
            continue
        if name in found:
            continue
        for child_name, child in part.named_children():
            own = list(child.parameters())
            if own and all(holders[id(p)] == 1 for p in own):
                found.append(f"{name}.{child_name}" if name else child_name)
    return tuple(found)
