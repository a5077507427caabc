"""Process groups, each made once: making one takes every rank of the run, and on NCCL a while."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

_made: dict[tuple[Any, ...], Any] = {}


def group_of(
    ranks: Iterable[int], use: str, device: torch.device, *, messages: bool = False
) -> Any:
    """The group of these ranks for one use.  Every rank of the run calls this in the same order.

    Groups of different uses have their own messages, even with the same ranks.  ``messages``: it
    is for point-to-point messages, so each pair exchanges one now.  NCCL connects a pair at its
    first message and may block both hosts until the other side is there; in the midst of a
    schedule, each could wait for the other in another group.
    """
    members = tuple(sorted(ranks))
    key = (id(dist.group.WORLD), members, use)
    if key not in _made:
        _made[key] = dist.new_group(list(members))
        if dist.get_rank() in members:  # the first call of a group must be one of all its ranks
            dist.all_reduce(torch.zeros(1, device=device), group=_made[key])
            if messages:
                _exchange([r for r in members if r != dist.get_rank()], _made[key], device)
    return _made[key]


def _exchange(others: list[int], group: Any, device: torch.device) -> None:
    """One number to and from each of the others, all at once."""
    operations = [
        dist.P2POp(way, torch.zeros(1, device=device), other, group)
        for other in others
        for way in (dist.isend, dist.irecv)
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
