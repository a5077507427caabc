"""A mesh that one process simulates, for comparisons of sharded programs with whole ones."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import torch

from nostall.parallel.sharding.placements import StepKind
from nostall.parallel.sharding.program.devices import Values


class LocalDevices:
    """All devices of a mesh, simulated in this process."""

    def __init__(self, mesh: Sequence[int]) -> None:
        self.mesh = tuple(mesh)
        self.coordinates = list(itertools.product(*map(range, mesh)))
        self.collectives: Counter[StepKind] = Counter()

    def gather(self, values: Values, mesh_dim: int) -> Values:
        return [torch.stack([values[i] for i in group]) for group in self._groups(mesh_dim)]

    def add(self, values: Values, mesh_dim: int) -> Values:
        return [torch.stack([values[i] for i in g]).sum(0) for g in self._groups(mesh_dim)]

    def send_parts(self, parts: Values, mesh_dim: int) -> Values:
        return [
            torch.stack([parts[i][own[mesh_dim]] for i in group])
            for own, group in zip(self.coordinates, self._groups(mesh_dim), strict=True)
        ]

    def add_parts(self, parts: Values, mesh_dim: int) -> Values:
        return [received.sum(0) for received in self.send_parts(parts, mesh_dim)]

    def _groups(self, mesh_dim: int) -> list[list[int]]:
        """For each device, the numbers of the devices along a mesh dimension, itself included."""
        return [
            [
                self.coordinates.index((*own[:mesh_dim], i, *own[mesh_dim + 1 :]))
                for i in range(self.mesh[mesh_dim])
            ]
            for own in self.coordinates
        ]
