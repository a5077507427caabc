"""Share the selection of rank 0 with all ranks, through the job's key-value store.

Rank 0 tunes and compares, and writes its selection and the kernels into the key-value store of
``torch.distributed``.  The other ranks poll that store without blocking, so ranks that run
different graphs cannot deadlock.  Until a rank sees a selection it runs Inductor's version, which
computes the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, Self

import torch

from nostall.attach.torch_compile.store.kernel_store import KernelStore
from nostall.attach.torch_compile.store.records import (
    ComparisonRecord,
    Record,
    RegionRecord,
    SelectionRecord,
    Version,
)

FOLLOWS_RANK_0 = "rank 0 has chosen"
"""Reason in the reports of the other ranks."""


@dataclass(frozen=True)
class Selection:
    """The selected version of a graph and, for a candidate, how it has to be compiled."""

    version: Version
    # Keys of the kernel matches that stay with Inductor.
    kept_in_inductor: frozenset[str] = frozenset()
    # Kernels of each region, by region key.
    regions: Mapping[str, RegionRecord] = field(default_factory=dict)
    # Whether all kernels but those of matrix products stay with Inductor.
    products_only: bool = False
    # Whether losses keep their logits.
    whole_logits: bool = False
    # Whether losses without logits have fewer chunks, which take more memory and less time.
    fewer_chunks: bool = False
    # Whether Inductor's own kernels have measured block sizes.
    tuned: bool = False

    @property
    def title(self) -> str:
        """Which kernels its candidate has, as text."""
        if self.version == "tuned":
            return "Inductor's kernels, tuned blocks"
        kernels = "products alone" if self.products_only else "all kernels"
        if self.whole_logits:
            return f"{kernels}, logits kept"
        return f"{kernels}, fewer chunks" if self.fewer_chunks else kernels

    @classmethod
    def stored(cls, record: SelectionRecord) -> Self:
        """The selection of a record."""
        given = {each.name: getattr(record, each.name) for each in fields(cls)}
        return cls(**{**given, "kept_in_inductor": frozenset(record.kept_in_inductor)})

    def record(
        self,
        reason: str,
        kernels: tuple[str, ...],
        comparison: ComparisonRecord | None,
        about: dict[str, str],
    ) -> SelectionRecord:
        """The record of the selection.  ``kernels``: those that its version calls."""
        kept = tuple(sorted(self.kept_in_inductor))
        given = {**vars(self), "kept_in_inductor": kept, "regions": dict(self.regions)}
        created = datetime.now(UTC).isoformat(timespec="seconds")
        return SelectionRecord(
            **given,
            reason=reason,
            kernels=kernels,
            comparison=comparison,
            about=about,
            created=created,
        )


class PublishedSelection(Record, frozen=True):
    """A selection as rank 0 sends it, with the kernels that other machines do not have."""

    selection: SelectionRecord
    # (record, source) of each kernel, as :meth:`KernelStore.export_kernel` returns them.
    kernels: dict[str, tuple[str, str]]


class RankSync:
    """The link to the other ranks of the job; without ``torch.distributed`` there are none."""

    def __init__(self, store: Any = None, rank: int = 0) -> None:
        self._store, self._rank = store, rank

    @classmethod
    def current(cls) -> RankSync:
        """The link for the process group of this process, as it is initialized now."""
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()):
            return cls()
        if distributed.get_world_size() == 1:
            return cls()
        from torch.distributed.distributed_c10d import _get_default_store

        store = distributed.PrefixStore("nostall", _get_default_store())
        return cls(store, distributed.get_rank())

    @property
    def is_leader(self) -> bool:
        """Whether this process selects versions, for itself and for the other ranks."""
        return self._store is None or self._rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether there are no other ranks."""
        return self._store is None

    def publish(self, graph: str, selection: Selection, kernels: KernelStore) -> None:
        """Send the selection for a graph (by key) to the other ranks, with its kernels."""
        if self._store is None:
            return
        steps = [step for region in selection.regions.values() for step in region.steps]
        exported = {step.kernel: kernels.export_kernel(step.kernel) for step in steps}
        message = PublishedSelection(selection.record("", (), None, {}), exported)
        self._store.set(graph, zlib.compress(message.json))

    def fetch(self, graph: str, kernels: KernelStore) -> Selection | None:
        """The selection of rank 0, or None if there is none yet; its kernels go to the store."""
        if self._store is None or not self._store.check([graph]):
            return None
        message = PublishedSelection.read(zlib.decompress(self._store.get(graph)))
        for record, source in message.kernels.values():
            kernels.import_kernel(record, source)
        return Selection.stored(message.selection)
