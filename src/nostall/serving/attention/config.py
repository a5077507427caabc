"""Configurations of the meta-attention kernel, and plans: a configuration and its table rules."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from nostall.core.errors import BadInput
from nostall.serving.tables.costs import LEAST_SAVED_NS, TileSet
from nostall.serving.tables.settings import TableSettings

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


WIDE_HEAD_KERNEL = KernelConfig(
    (TileConfig(16, 32, 3), TileConfig(32, 32, 3), TileConfig(64, 32, 3, "branch")),
    registers=0,
    programs_per_sm=1,
)
"""For heads of 256: a tile of 128 rows would need more registers than a program has."""


def default_kernel(shape: AttentionShape) -> KernelConfig:
    """A kernel for a shape that has not been tuned."""
    return KernelConfig() if shape.padded_head_dim <= 128 else WIDE_HEAD_KERNEL


@dataclass(frozen=True)
class AttentionPlan:
    """Everything that decides the time of a batch, besides the batch and the GPU."""

    kernel: KernelConfig = field(default_factory=KernelConfig)
    order: str = "paired"
    """A key of :data:`nostall.serving.tables.orders.ORDERS`; not ``sorted`` for ``ranges``."""
    split: int = 1 << 30
    """Most keys of a unit."""
    least_split: int = 512
    """Fewest keys of a unit that is split by cost."""
    units_per_program: int = 4
    """Units that a program gets at least if the costs are split evenly; 0: no split by cost."""
    least_prefix: int = 256
    """Fewest keys of a shared prefix that is read once for its group; 0: never. Only for shapes
    that have prefixes."""
    least_saved_ns: int = LEAST_SAVED_NS
    """Least modelled time of each program that a group must save; 0: any saving."""

    def __post_init__(self) -> None:
        if self.kernel.schedule == "ranges" and self.order == "sorted":
            raise BadInput(
                "a plan of schedule ranges and order sorted, which has a range for each unit; "
                "allowed are other orders, or the schedules queue and unit"
            )

    @property
    def tile_set(self) -> TileSet:
        """The tile set of the kernel's heights."""
        return TileSet(
            tuple(tile.rows for tile in self.kernel.tiles),
            split=self.split,
            least_split=self.least_split,
            units_per_program=self.units_per_program,
            least_prefix=self.least_prefix,
            least_saved_ns=self.least_saved_ns,
            kv_align=max(64, *(tile.keys for tile in self.kernel.tiles)),
        )

    def programs(self, sms: int) -> int:
        """Programs of a persistent launch."""
        return sms * self.kernel.programs_per_sm

    def launched_programs(self, sms: int, units: int) -> int:
        """Programs of the launch for tables with so many units."""
        return units if self.kernel.schedule == "unit" else self.programs(sms)

    def table_settings(self, shape: AttentionShape, sms: int) -> TableSettings:
        """Settings of the tables for a GPU of so many SMs."""
        return TableSettings(
            shape.heads,
            shape.kv_heads,
            self.programs(sms),
            self.tile_set if shape.has_prefixes else replace(self.tile_set, least_prefix=0),
            order=self.order,
            window=shape.window,
        )
