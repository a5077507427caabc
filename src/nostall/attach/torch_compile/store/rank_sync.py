"""Several processes of one job run the same version: that of rank 0.

Rank 0 races and compares, and writes its choice and the kernels into the job's key-value store; the
others look there, on whatever machine they are.  Nobody waits for anybody, so ranks that run other
graphs cannot hang each other; until they see the choice they stay with Inductor's version, which
computes the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from nostall.attach.torch_compile.store.kernel_store import Kept
from nostall.attach.torch_compile.store.records import Record, RegionRecord, Version

FOLLOWS = "rank 0 has chosen"


@dataclass(frozen=True)
class Chosen:
    """A version; of a stitched one the parts (by key) that it leaves to Inductor, and how its
    regions (by name) are stitched."""

    version: Version
    left: frozenset[str] = frozenset()
    regions: Mapping[str, RegionRecord] = field(default_factory=dict)


class Published(Record, frozen=True):
    """A choice on its way to machines with stores of their own.  ``kernels``: for each name the
    record and the source, as :meth:`~nostall.attach.torch_compile.store.records.Kept.written` gives them."""

    version: Version
    left: tuple[str, ...]
    regions: dict[str, RegionRecord]
    kernels: dict[str, tuple[str, str]]


class Ranks:
    """The other processes.  Without ``torch.distributed`` there are none."""

    def __init__(self, store: Any = None, rank: int = 0) -> None:
        self._store, self._rank = store, rank

    @classmethod
    def here(cls) -> Ranks:
        """As this process is set up now."""
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()):
            return cls()
        if distributed.get_world_size() == 1:
            return cls()
        from torch.distributed.distributed_c10d import _get_default_store

        store = distributed.PrefixStore("nostall", _get_default_store())
        return cls(store, distributed.get_rank())

    @property
    def leads(self) -> bool:
        """Whether this process chooses for itself and the others."""
        return self._store is None or self._rank == 0

    def publish(self, graph: str, chosen: Chosen, kept: Kept) -> None:
        """Rank 0 has chosen; ``kept`` has its kernels."""
        if self._store is None:
            return
        steps = [step for region in chosen.regions.values() for step in region.steps]
        said = Published(
            version=chosen.version,
            left=tuple(sorted(chosen.left)),
            regions=dict(chosen.regions),
            kernels={step.kernel: kept.written(step.kernel) for step in steps},
        )
        self._store.set(graph, zlib.compress(said.json))

    def chosen(self, graph: str, kept: Kept) -> Chosen | None:
        """What rank 0 has chosen, if it has; ``kept`` has its kernels then."""
        if self._store is None or not self._store.check([graph]):
            return None
        said = Published.read(zlib.decompress(self._store.get(graph)))
        for record, source in said.kernels.values():
            kept.take(record, source)
        return Chosen(said.version, frozenset(said.left), said.regions)
