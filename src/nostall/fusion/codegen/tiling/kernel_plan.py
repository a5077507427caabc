"""Kernel plans: composition scheme, tile and number of warps of a kernel.

Nine schemes say where a row is while a kernel works on it:

==========  ========================================================================================
thread      No reductions. Values stay in the registers of a thread.
warp        Rows in registers. Each warp has one or more rows; reductions are warp shuffles.
block       Rows in registers. All warps of a program share each row.
looped      One loop over the columns for each level of reductions; the row is read again each time.
shared      As ``looped``, but values that several loops need are kept in shared memory.
split       Several programs share a row. One kernel for each level of reductions.
column      As ``warp`` or ``block``, with reductions over rows in two stages: a program loops over
            a group of rows and stores partial results, and a second kernel reduces those.
matrix      Small batched dots. A program has one element of the batch.
turned      As ``matrix``, but a program loops over tiles of a few positions of a sequence.
==========  ========================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nostall.fusion.codegen.tiling.tile_sizes import WARP_SIZE

Scheme = Literal[
    "thread", "warp", "block", "looped", "shared", "split", "column", "matrix", "turned"
]
"""Names of the composition schemes. Stored records contain them."""

REGISTER_SCHEMES: tuple[Scheme, ...] = ("thread", "warp", "block")
"""Schemes that have a whole row (or tile, if there are no rows) in registers at once."""


@dataclass(frozen=True)
class KernelPlan:
    """One way to run a schedule: how large the tile of a program is, and how it is worked on.

    Some fields mean different things for different schemes:

    ==============  ==========  ====================================================================
    field           scheme      meaning
    ==============  ==========  ====================================================================
    rows            thread      1
    ..              others      rows of a program at once (``matrix``, ``turned``: batch elements)
    chunks          thread      one chunk: elements of a program
    ..              warp        the columns of a row, in one or more powers of two
    ..              block       as for ``warp``
    ..              column      as for ``warp``
    ..              looped      one chunk: columns of one loop iteration (``shared``, ``split`` too)
    ..              matrix      one chunk: lanes of the largest tensor
    ..              turned      one chunk: lanes of the largest tensor of one tile
    splits          split       programs that share a row
    ..              column      groups of rows, each reduced by one program
    ..              others      1
    rematerialized  shared      index into :func:`~.on_chip.rematerialization_options`
    ..              others      0
    async_copies    shared      rows are copied to shared memory before the first loop over them
    ..              looped      loop iterations are copied to shared memory in advance (also
                                ``split``, ``column``)
    eager_loads     thread      all inputs are loaded before anything is computed
    ..              warp        operands that rows share are loaded with the row (also ``block``)
    ==============  ==========  ====================================================================
    """

    scheme: Scheme
    rows: int
    chunks: tuple[int, ...]
    num_warps: int
    splits: int = 1
    rematerialized: int = 0
    async_copies: bool = False
    peeled: bool = False
    """Loops over unaligned rows start at a multiple of 16 bytes (:mod:`~.loop_peeling`)."""
    eager_loads: bool = False
    evict_first: bool = False
    """Outputs larger than L2 are stored with the eviction policy ``evict_first``."""

    @property
    def elements_per_thread(self) -> float:
        """Elements of the tile for each thread; less than 1 if some threads have none."""
        return self.rows * sum(self.chunks) / (WARP_SIZE * self.num_warps)

    @property
    def has_equal_chunks(self) -> bool:
        """Whether all chunks have the same size; true for a single chunk."""
        return len(set(self.chunks)) == 1

    def __str__(self) -> str:
        """The plan in one line. Generated sources and stored records contain it."""
        columns = "+".join(map(str, self.chunks))
        if self.has_equal_chunks and len(self.chunks) > 1:
            columns = f"{self.chunks[0]}x{len(self.chunks)}"
        details = [
            f"{self.num_warps} warps",
            f"{self.splits} parts" if self.splits > 1 else "",
            f"{self.rematerialized} demoted" if self.rematerialized else "",
            "copied ahead" if self.async_copies else "",
            "peeled" if self.peeled else "",
            "early" if self.eager_loads else "",
            "streamed" if self.evict_first else "",
        ]
        return f"{self.scheme} {self.rows}x{columns}, {', '.join(filter(None, details))}"


@dataclass(frozen=True)
class PackedPlan:
    """The plans of independent kernels that are packed into one launch, in their order."""

    plans: tuple[KernelPlan, ...]

    def __str__(self) -> str:
        """The plans in one line. Generated sources and stored records contain it."""
        return f"packed ({'; '.join(map(str, self.plans))})"
