"""Running requests of the simulated engine as arrays, in the order of their admission."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nostall.serving.scheduling.prefix_tree import Lease

Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]

REQUEST = 0
"""Index of the request in the trace."""
PROMPT_LEFT = 1
"""Prompt tokens that are not computed."""
KEYS = 2
"""Tokens whose keys are computed or cached."""
OUTPUT_LEFT = 3
"""Tokens to generate."""
SKIPPED = 4
"""Steps since the last one with tokens of this request."""
ROOM = 5
"""Tokens that its blocks can take."""
COLUMNS = 6


@dataclass(eq=False)
class Running:
    """The requests that are admitted; row i is the i-th admitted one that still runs."""

    table: Int64s = field(default_factory=lambda: np.zeros((0, COLUMNS), np.int64))
    leases: list[Lease] = field(default_factory=list[Lease])

    def __len__(self) -> int:
        return len(self.leases)

    @property
    def is_prefill(self) -> Bools:
        return np.asarray(self.table[:, PROMPT_LEFT] > 0)

    def append(self, rows: list[tuple[int, ...]], leases: list[Lease]) -> None:
        """Admit requests."""
        self.table = np.concatenate([self.table, np.array(rows, np.int64)])
        self.leases.extend(leases)

    def keep(self, kept: Bools) -> None:
        """Remove the requests that are not kept; their leases must have ended."""
        self.table = self.table[kept]
        self.leases = [lease for lease, is_kept in zip(self.leases, kept, strict=True) if is_kept]
