"""Process groups of one run, created once per set of ranks and use, and closed at its end."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class ProcessGroups:
    """Creates each process group of a run once.

    Creating a group is a collective call: every rank of the run must request the same groups in the
    same order, and close them.  Each run creates its own groups.  On a GPU each group works on a
    CUDA stream; PyTorch assigns 32 streams in rotation, so groups kept from earlier runs could
    share a stream with new ones, and two groups on one stream can wait for each other.
    """

    def __init__(self, device: torch.device, deadline: float | None = None) -> None:
        """``deadline`` is the longest wait for another rank in seconds.

        None is torch's default for new groups, which is not the timeout of the default group.
        """
        self.device = device
        self.timeout = None if deadline is None else timedelta(seconds=deadline)
        self._groups: dict[tuple[tuple[int, ...], str], Any] = {}

    def get(self, ranks: Iterable[int], use: str, *, messages: bool = False) -> Any:
        """The group of these ranks for one use; ranks inside it are numbered in ascending order.

        Groups for different uses have separate messages, even with the same ranks.  With
        ``messages``, the group is for point-to-point messages, and each pair exchanges one when the
        group is created.  NCCL connects a pair at its first message and may block both processes
        until the other one is there; within a schedule, two ranks could then wait for each other
        in different groups.
        """
        members = tuple(sorted(ranks))
        if (members, use) not in self._groups:
            group = dist.new_group(list(members), timeout=self.timeout)
            self._groups[members, use] = group
            if dist.get_rank() in members:
                # The first call in a group must be one that all of its ranks make.
                dist.all_reduce(torch.zeros(1, device=self.device), group=group)
                if messages and len(members) > 1:
                    self._exchange(group, [r for r in members if r != dist.get_rank()])
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
        return self._groups[members, use]

    def close(self) -> None:
        """Destroy the groups; no rank may have messages under way."""
        for group in self._groups.values():
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)
        self._groups.clear()

    def _exchange(self, group: Any, peers: list[int]) -> None:
        """Send one number to each peer and receive one from it, all at once."""
        operations = [
            dist.P2POp(call, torch.zeros(1, device=self.device), peer, group)
            for peer in peers
            for call in (dist.isend, dist.irecv)
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
