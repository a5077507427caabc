"""The process groups of one run: making one takes every rank of the run, and on NCCL a while."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class Groups:
    """Makes each group once.  Every rank makes the same ones, in the same order, and closes them.

    Groups are not kept from run to run: on a GPU each works on a stream of its own, of which
    PyTorch deals out 32 in turn, and two groups on one stream could wait for each other.
    ``deadline`` in seconds: the longest wait for another rank; None is torch's own, which is not
    that of the default group.
    """

    def __init__(self, device: torch.device, deadline: float | None = None) -> None:
        self.device = device
        self.timeout = None if deadline is None else timedelta(seconds=deadline)
        self._made: dict[tuple[tuple[int, ...], str], Any] = {}

    def of(self, ranks: Iterable[int], use: str, *, messages: bool = False) -> Any:
        """The group of these ranks for one use; numbered inside by their order as numbers.

        Groups of different uses have their own messages, even with the same ranks.  ``messages``:
        it is for point-to-point messages, so each pair exchanges one now.  NCCL connects a pair at
        its first message and may block both hosts until the other side is there; in the midst of a
        schedule, each could wait for the other in another group.
        """
        members = tuple(sorted(ranks))
        if (members, use) not in self._made:
            group = dist.new_group(list(members), timeout=self.timeout)
            self._made[members, use] = group
            if dist.get_rank() in members:  # a group's first call must be one of all its ranks
                dist.all_reduce(torch.zeros(1, device=self.device), group=group)
                if messages and len(members) > 1:
                    self._exchange(group, [r for r in members if r != dist.get_rank()])
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
        return self._made[members, use]

    def close(self) -> None:
        """Let the groups go, once nothing is under way on any rank."""
        for group in self._made.values():
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)
        self._made.clear()

    def _exchange(self, group: Any, others: list[int]) -> None:
        """One number to and from each of the others, all at once."""
        operations = [
            dist.P2POp(way, torch.zeros(1, device=self.device), other, group)
            for other in others
            for way in (dist.isend, dist.irecv)
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
