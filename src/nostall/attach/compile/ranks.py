"""Several processes of one job run the same version: that of rank 0.

Rank 0 compares and writes its choice into the job's key-value store; the others look there.
Nobody waits for anybody, so ranks that run other graphs cannot hang each other; until they see the
choice they stay with Inductor's version, which computes the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import torch

from nostall.attach.compile.records import Version


@dataclass(frozen=True)
class Chosen:
    """A version, and the parts (by key) that a stitched one leaves to Inductor."""

    version: Version
    left: frozenset[str] = frozenset()


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

    def publish(self, graph: str, chosen: Chosen) -> None:
        """Rank 0 has chosen."""
        if self._store is not None:
            self._store.set(graph, " ".join([chosen.version, *sorted(chosen.left)]))

    def chosen(self, graph: str) -> Chosen | None:
        """What rank 0 has chosen, if it has."""
        if self._store is None or not self._store.check([graph]):
            return None
        said, *left = self._store.get(graph).decode().split()
        version = next((version for version in get_args(Version) if version == said), None)
        return None if version is None else Chosen(version, frozenset(left))
