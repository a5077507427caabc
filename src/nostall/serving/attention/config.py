"""Configurations of the meta-attention kernel: what it computes, and how it is compiled and run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from nostall.core.errors import BadInput

HEAD_DIMS = (64, 96, 128, 256)
"""Head dimensions that the kernel supports."""
Masks = Literal["all", "branch", "tail"]
Schedule = Literal["unit", "ranges", "queue"]
Language = Literal["triton", "gluon"]
GLUON_ROWS = 128
"""Rows of a tile of the Gluon kernel."""
GLUON_KEYS = (64, 128)
"""Keys of one iteration that the Gluon kernel supports."""
MASKS: dict[Masks, int] = {"all": 0, "branch": 1, "tail": 2}
"""Numbers of the mask forms in :mod:`nostall.serving.attention.tile`."""
SCHEDULES: dict[Schedule, int] = {"unit": 0, "ranges": 1, "queue": 2}
"""Numbers of the schedules in :mod:`nostall.serving.attention.kernel`."""


@dataclass(frozen=True)
class AttentionShape:
    """What the kernel computes: everything that a model and its cache fix."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    scale: float | None = None
    """Factor of the scores; None: head_dim ** -0.5."""
    window: int = 0
    """Keys that a token sees, its own included (sliding window); 0: all."""
    soft_cap: float = 0.0
    """Scores become cap * tanh(score / cap); 0: no cap."""
    has_trees: bool = False
    """Whether batches may have tree masks."""
    has_prefixes: bool = False
    """Whether batches may have groups that share a prefix."""

    def __post_init__(self) -> None:
        if min(self.heads, self.kv_heads) < 1 or self.heads % self.kv_heads:
            raise BadInput(
                f"{self.heads} query heads and {self.kv_heads} KV heads; allowed is a multiple of "
                "the KV heads"
            )
        if self.head_dim not in HEAD_DIMS:
            raise BadInput(f"head dimension {self.head_dim}; allowed are {HEAD_DIMS}")
        if self.page_size < 16 or self.page_size % 16:
            raise BadInput(f"page size {self.page_size}; allowed are multiples of 16")
        if self.window < 0 or self.soft_cap < 0:
            raise BadInput(
                f"window {self.window} and soft cap {self.soft_cap}; allowed are 0 (none) and more"
            )

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    @property
    def score_scale(self) -> float:
        """The factor of the scores."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def padded_head_dim(self) -> int:
        """The power of two that holds a head."""
        return 1 << (self.head_dim - 1).bit_length()


def check_prefixes(shape: AttentionShape, has_prefixes: bool) -> None:
    """Raise :class:`BadInput` if tables may have shared prefixes and the shape has none.

    ``has_prefixes``: whether the tables may have units of shared prefixes. The kernel of a shape
    without them takes such a unit for one that writes a result, at rows of other tokens.
    """
    if has_prefixes and not (shape.has_prefixes and shape.window == 0):
        raise BadInput(
            "the tables have room for units of shared prefixes, and the shape has has_prefixes "
            f"{shape.has_prefixes} and window {shape.window}; allowed is has_prefixes True without "
            "a window; or build tables with least_prefix 0 and a capacity of 0 prefix rows"
        )


class TileConfig(NamedTuple):
    """How one tile height runs."""

    rows: int
    """Tile height."""
    keys: int = 64
    """Keys of one iteration; a power of two."""
    stages: int = 3
    """Stages of the software pipeline of the loop over keys."""
    masks: Masks = "all"


@dataclass(frozen=True)
class KernelConfig:
    """How the kernel is compiled and launched; changes the time of a batch, not its result."""

    tiles: tuple[TileConfig, ...] = (
        TileConfig(16, 64, 4, "all"),
        TileConfig(64, 64, 3, "all"),
        TileConfig(128, 32, 4, "branch"),
    )
    """One entry for each height of the tile set, in its order."""
    warps: int = 8
    registers: int = 128
    """Most registers of a thread; 0: the compiler decides."""
    programs_per_sm: int = 2
    schedule: Schedule = "queue"
    dependent: bool = False
    """Whether the reduction is launched as a programmatic dependent launch (Hopper and later)."""
    front_share: float = 0.5
    """Share of the programs that take units from the front of the queue."""
    language: Language = "triton"
    """``gluon``: the kernel of :mod:`nostall.serving.attention.gluon_kernel`, for sm_90 only."""

    def __post_init__(self) -> None:
        if self.language == "triton":
            return
        fits = [tile.rows == GLUON_ROWS and tile.keys in GLUON_KEYS for tile in self.tiles]
        if fits != [True] or self.schedule == "ranges" or self.front_share != 1.0:
            raise BadInput(
                f"a Gluon kernel of {self.tiles}, schedule {self.schedule}, front share "
                f"{self.front_share}; allowed are one tile of {GLUON_ROWS} rows with keys of "
                f"{GLUON_KEYS}, the schedules unit and queue, and the front share 1.0"
            )

    @property
    def compiled_tiles(self) -> tuple[tuple[int, int, int, int], ...]:
        """The tiles in the kernel's numbers."""
        return tuple((t.rows, t.keys, t.stages, MASKS[t.masks]) for t in self.tiles)
