"""Process groups, each made once: making one takes every rank of the run, and on NCCL a while."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

_made: dict[tuple[Any, ...], Any] = {}


def group_of(ranks: Iterable[int], use: str, device: torch.device) -> Any:
    """The group of these ranks for one use.  Every rank of the run calls this in the same order.

    Groups of different uses have their own messages, even with the same ranks.
    """
    members = tuple(sorted(ranks))
    key = (id(dist.group.WORLD), members, use)
    if key not in _made:
        _made[key] = dist.new_group(list(members))
        if dist.get_rank() in members:  # the first call of a group must be one of all its ranks
            dist.all_reduce(torch.zeros(1, device=device), group=_made[key])
    return _made[key]
