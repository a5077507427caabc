"""Who holds which samples, and what passes between two stages.

Micro-batches share the iteration's samples as evenly as whole numbers allow, and so do the replicas
of a stage a micro-batch (DAPPLE, figure 8); a replica may get none.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from nostall.parallel.plan import Plan, Workload

Range = tuple[int, int]


def shares(first: int, end: int, parts: int) -> list[Range]:
    """The range cut into that many parts, whose sizes differ by one at most."""
    size = end - first
    ends = [first + i * size // parts for i in range(parts + 1)]
    return list(itertools.pairwise(ends))


@dataclass(frozen=True, slots=True)
class Message:
    """Samples ``first`` to ``end`` go from replica ``source`` of a stage to ``target`` of the next.

    ``whole`` says that this message also carries the tensors that do not grow with samples; each
    target gets those once.
    """

    source: int
    target: int
    first: int
    end: int
    whole: bool


@dataclass(frozen=True)
class Slices:
    """Samples of each micro-batch, stage and replica.

    A plan of one stage is data parallelism: each replica cuts its share of the iteration into
    micro-batches of its own, of about the size that was asked for.
    """

    work: Workload
    plan: Plan

    @property
    def alone(self) -> bool:
        return len(self.plan.stages) == 1

    @property
    def micro_batches(self) -> int:
        """Micro-batches that a stage runs; for data parallelism those of the largest share."""
        if not self.alone:
            return self.work.micro_batches
        largest = -(-self.work.global_batch // len(self.plan.stages[0].gpus))
        return max(1, -(-largest // self.work.samples))

    def part(self, stage: int, replica: int, micro_batch: int) -> Range:
        """Samples of the iteration that a replica computes in a micro-batch."""
        replicas = len(self.plan.stages[stage].gpus)
        if self.alone:
            first, end = shares(0, self.work.global_batch, replicas)[replica]
            return shares(first, end, self.micro_batches)[micro_batch]
        whole = shares(0, self.work.global_batch, self.micro_batches)[micro_batch]
        return shares(*whole, replicas)[replica]

    def messages(self, boundary: int, micro_batch: int) -> list[Message]:
        """What stage ``boundary`` sends to the next one, by source and then by target."""
        found: list[Message] = []
        served: set[int] = set()
        sources = len(self.plan.stages[boundary].gpus)
        targets = len(self.plan.stages[boundary + 1].gpus)
        for i, j in itertools.product(range(sources), range(targets)):
            a, b = self.part(boundary, i, micro_batch)
            c, d = self.part(boundary + 1, j, micro_batch)
            if max(a, c) < min(b, d):
                found.append(Message(i, j, max(a, c), min(b, d), j not in served))
                served.add(j)
        return found
