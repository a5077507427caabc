"""Slices of micro-batches: the samples of each replica, and the messages between two stages.

The micro-batches split the samples of the iteration as evenly as whole numbers allow, and the
replicas of a stage split each micro-batch in the same way (DAPPLE, figure 8).  A replica's slice
may be empty.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from nostall.parallel.plan import Plan, Workload

SampleRange = tuple[int, int]
"""First sample, and last sample plus 1."""


@dataclass(frozen=True, slots=True)
class OwnSamples:
    """The samples of an iteration that one rank reads, in the order of its micro-batches.

    They are its part of the batch; the rank needs no other sample.
    """

    ranges: tuple[SampleRange, ...]
    """For each micro-batch, its samples; a range may be empty."""

    def __len__(self) -> int:
        return sum(end - first for first, end in self.ranges)

    @property
    def indices(self) -> list[int]:
        """Numbers of the samples within the iteration."""
        return list(itertools.chain.from_iterable(itertools.starmap(range, self.ranges)))

    def place(self, micro_batch: int) -> SampleRange:
        """Where the samples of a micro-batch are in the rank's part of the batch."""
        start = sum(end - first for first, end in self.ranges[:micro_batch])
        first, end = self.ranges[micro_batch]
        return start, start + end - first


def split_evenly(first: int, end: int, parts: int) -> list[SampleRange]:
    """Split a range into ``parts`` ranges whose sizes differ by at most one."""
    size = end - first
    cuts = [first + i * size // parts for i in range(parts + 1)]
    return list(itertools.pairwise(cuts))


@dataclass(frozen=True, slots=True)
class Message:
    """Samples that one replica of a stage sends to one replica of the next stage.

    A message back, with gradients, has the same samples and runs from ``target`` to ``source``.
    """

    source: int
    """Replica number in the stage."""
    target: int
    """Replica number in the next stage."""
    first: int
    end: int
    carries_unbatched: bool
    """Whether the message also has the tensors without a sample dimension, which each target
    receives once."""


@dataclass(frozen=True)
class Slices:
    """Samples of each micro-batch, stage and replica of a plan.

    A plan of one stage is data parallelism: each replica splits its share of the iteration into
    micro-batches of its own, of about the requested size.
    """

    workload: Workload
    plan: Plan

    @property
    def is_data_parallel(self) -> bool:
        """Whether the plan has one stage."""
        return len(self.plan.stages) == 1

    @property
    def micro_batches(self) -> int:
        """Micro-batches that each replica of a stage runs; for data parallelism, of its share."""
        if not self.is_data_parallel:
            return self.workload.micro_batches
        largest_share = -(-self.workload.global_batch // len(self.plan.stages[0].gpus))
        return max(1, -(-largest_share // self.workload.micro_batch_samples))

    def samples(self, stage: int, replica: int, micro_batch: int) -> SampleRange:
        """Samples of the iteration that a replica of a stage computes in a micro-batch."""
        global_batch, replicas = self.workload.global_batch, len(self.plan.stages[stage].gpus)
        if self.is_data_parallel:
            share = split_evenly(0, global_batch, replicas)[replica]
            return split_evenly(*share, self.micro_batches)[micro_batch]
        samples = split_evenly(0, global_batch, self.micro_batches)[micro_batch]
        return split_evenly(*samples, replicas)[replica]

    def own(self, stage: int, replica: int) -> OwnSamples:
        """The samples of all micro-batches of a replica."""
        numbers = range(self.micro_batches)
        return OwnSamples(tuple(self.samples(stage, replica, m) for m in numbers))

    def messages(self, boundary: int, micro_batch: int) -> list[Message]:
        """Messages from stage ``boundary`` to the next stage, sorted by source, then by target."""
        messages: list[Message] = []
        has_unbatched: set[int] = set()
        sources = len(self.plan.stages[boundary].gpus)
        targets = len(self.plan.stages[boundary + 1].gpus)
        for i, j in itertools.product(range(sources), range(targets)):
            a, b = self.samples(boundary, i, micro_batch)
            c, d = self.samples(boundary + 1, j, micro_batch)
            first, end = max(a, c), min(b, d)
            if first < end:
                messages.append(Message(i, j, first, end, j not in has_unbatched))
                has_unbatched.add(j)
        return messages
