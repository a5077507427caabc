"""Steps whose sequences share prefixes: workloads to time, and small random forests to check."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.serving.attention.inputs import DEVICE, DTYPE, HAS_GPU, MOST_COPIES
from benchmarks.serving.attention.peers import flash_attention_3
from benchmarks.serving.host_tables import prefixes_in_pages, to_host
from nostall.serving.attention.config import AttentionPlan, AttentionShape
from nostall.serving.attention.launch import (
    AttentionBuffers,
    BatchTensors,
    MetaAttention,
    PagedCache,
)
from nostall.serving.attention.rules import PLANS, BatchKind, plan_for
from nostall.serving.attention.winners.on_gpu import (
    ROTATED_BYTES,
    GpuBatch,
    batch_tensors,
    exact_token,
    sample_tokens,
)
from nostall.serving.batch.ragged import RaggedBatch, pack_trees
from nostall.serving.tables.columns import PREFIX_ROWS, REDUCTIONS, SAVED_NS, SCRATCH_ROWS, UNITS
from nostall.serving.tables.device import DeviceBuilder, Prefixes
from nostall.serving.tables.host import HostBuilder, bounded_capacity, needed_capacity
from nostall.serving.tables.prefix.leaders import NO_PREFIXES
from nostall.serving.tables.settings import TableSettings, TaskTables

if TYPE_CHECKING:
    from benchmarks.serving.attention.prefix_forests import Workload

Run = Callable[[PagedCache], Tensor]
PAGE = 16
LAYER = (
    AttentionShape(has_prefixes=True) if HAS_GPU else AttentionShape(4, 2, 64, has_prefixes=True)
)
SEQUENCES = 256 if HAS_GPU else 16
"""Most sequences of the engine for which the tables are allocated."""
LEVELS = 2
WORKERS = None if HAS_GPU else 1
SHAPES = {
    "32/8": AttentionShape(has_prefixes=True),
    "8/1 d64": AttentionShape(8, 1, 64, has_prefixes=True),
    "16/1": AttentionShape(16, 1, 128, has_prefixes=True),
    "4/4 d64": AttentionShape(4, 4, 64, has_prefixes=True),
    "8/2 d256": AttentionShape(8, 2, 256, has_prefixes=True),
}
"""Shapes of the random forests."""


def sms() -> int:
    """Multiprocessors of the device."""
    return torch.cuda.get_device_properties(0).multi_processor_count if HAS_GPU else 2


def settings_of(plan: AttentionPlan, shape: AttentionShape) -> TableSettings:
    """The settings of a plan's tables; the interpreter runs few programs of the builder."""
    settings = plan.table_settings(shape, sms())
    return settings if HAS_GPU else replace(settings, cost_classes=2)


def batch_of(workload: Workload) -> RaggedBatch:
    """A decode step of a workload, its sequences and pages in random order."""
    rng = np.random.default_rng(0)
    count, keys = workload.sequences, workload.shared + workload.own
    width = -(-keys // PAGE)
    system, shared = workload.system // PAGE, workload.shared // PAGE
    fresh = iter(rng.permutation(count * width + 1) + 1)

    def pages(number: int) -> list[int]:
        return [int(next(fresh)) for _ in range(number)]

    first = pages(system)
    prompts = [pages(shared - system) for _ in range(workload.prompts)]
    rows = [
        [*first, *prompts[place % workload.prompts], *pages(width - shared)]
        for place in rng.permutation(count)
    ]
    _, numbers = np.unique(np.array(rows), return_inverse=True)
    table = rng.permutation(int(numbers.max()) + 1)[numbers].reshape(count, width) + 1
    ones = np.ones(count, np.int32)
    return RaggedBatch(ones, ones * keys, table.astype(np.int32), PAGE, np.zeros(count, np.bool_))


@dataclass(frozen=True, eq=False)
class Step:
    """A decode step, with the device builder of its tables."""

    inputs: GpuBatch
    plan: AttentionPlan
    builder: DeviceBuilder
    buffers: AttentionBuffers

    @staticmethod
    def of(workload: Workload) -> Step:
        """The step of a workload, whose tables are built."""
        ragged, shape = batch_of(workload), LAYER
        plan = plan_for(shape, BatchKind(True, 1))
        if not HAS_GPU:
            plan = replace(plan, least_prefix=64, least_saved_ns=0)
        settings = settings_of(plan, shape)
        capacity = bounded_capacity(
            settings, max(SEQUENCES, len(ragged)), max(SEQUENCES, len(ragged)), 16_384, LEVELS
        )
        builder = DeviceBuilder.of(settings, capacity, str(DEVICE), WORKERS)
        buffers = AttentionBuffers.around(
            builder.tables, capacity.scratch_rows, shape.head_dim, builder.queue
        )
        step = Step(_inputs(ragged, shape), plan, builder, buffers)
        step.build()
        to_host(builder.tables, capacity)
        return step

    @property
    def shape(self) -> AttentionShape:
        return self.inputs.shape

    @property
    def caches(self) -> tuple[PagedCache, ...]:
        return self.inputs.caches

    @property
    def gpu(self) -> str:
        """The name of the GPU."""
        return torch.cuda.get_device_name(0) if HAS_GPU else "none"

    def build(self) -> None:
        """Build the tables on the device, from the block table."""
        batch = self.inputs.tensors
        prefixes = Prefixes(block_table=batch.block_table, page_size=PAGE)
        self.builder.build(batch.query_starts, batch.kv_lengths, prefixes)

    def host_us(self, builds: int = 30) -> float:
        """Time of the host for a build."""
        begin = time.perf_counter()
        for _ in range(builds):
            self.build()
        took = time.perf_counter() - begin
        if HAS_GPU:
            torch.cuda.synchronize()
        return took / builds * 1e6

    @property
    def counts(self) -> dict[str, int]:
        """Counts of the tables."""
        counts = self.builder.tables.counts.tolist()
        names = {
            "units": UNITS,
            "reductions": REDUCTIONS,
            "rows": SCRATCH_ROWS,
            "grouped": PREFIX_ROWS,
        }
        return {name: counts[column] for name, column in names.items()}

    @property
    def saved_us(self) -> float:
        """Modelled time that shared prefixes save."""
        return int(self.builder.tables.counts[SAVED_NS]) / 1e3

    @property
    def scratch_mib(self) -> float:
        """Memory of the scratch."""
        return self.builder.capacity.scratch_rows * (self.shape.head_dim + 1) * 4 / 2**20

    def rms_error(self, run: Run) -> float:
        """Root mean square error of the sampled tokens with the first cache."""
        got = run(self.caches[0])[self.inputs.sampled].double()
        return float((got - self.inputs.exact).square().mean().sqrt())

    def ours(self, plan: AttentionPlan, tables: TaskTables | None = None, **how: bool) -> Run:
        """Our kernel with tables of the host; None: those that the device built."""
        shape = self.shape if plan.least_prefix else replace(self.shape, has_prefixes=False)
        buffers, out = self.buffers, torch.empty_like(self.inputs.query)
        if tables is not None:
            buffers = AttentionBuffers.of(tables, shape.head_dim, DEVICE)
        kernel = MetaAttention(shape, plan.kernel, plan.programs(sms()), **how)

        def run(cache: PagedCache) -> Tensor:
            kernel(self.inputs.query, cache, out, self.inputs.tensors, buffers)
            return out

        return run

    def host_tables(self, plan: AttentionPlan, is_apart: bool = False) -> TaskTables:
        """The tables of a plan, built on the host."""
        ragged = self.inputs.ragged
        lengths = ragged.query_lengths, ragged.kv_lengths
        prefixes = NO_PREFIXES
        if not is_apart:
            prefixes = prefixes_in_pages(ragged.block_table, *lengths, PAGE)
        settings = plan.table_settings(self.shape, sms())
        capacity = needed_capacity(*lengths, settings, prefixes)
        return HostBuilder.of(settings, capacity).build(*lengths, prefixes)


def _inputs(ragged: RaggedBatch, shape: AttentionShape) -> GpuBatch:
    """Random tensors of a batch; page 0 exists and belongs to nobody."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    size = (int(ragged.block_table.max()) + 1, PAGE, shape.kv_heads, shape.head_dim)

    def draw(*lengths: int) -> Tensor:
        return torch.randn(lengths, generator=generator, device=DEVICE, dtype=DTYPE)

    copies = min(max(2, -(-ROTATED_BYTES // (4 * int(np.prod(size))))), MOST_COPIES)
    caches = tuple(PagedCache(draw(*size), draw(*size)) for _ in range(copies))
    query = draw(len(ragged), shape.heads, shape.head_dim)
    tensors = batch_tensors(ragged, DEVICE)
    tokens = sample_tokens(ragged, 24)
    exact = torch.stack([exact_token(ragged, shape, query, caches[0], int(t)) for t in tokens])
    return GpuBatch(
        ragged, shape, query, caches, tensors, torch.from_numpy(tokens).to(DEVICE), exact
    )


def kernels_of(step: Step, peers: Path | None) -> dict[str, Callable[[], Run]]:
    """Makers of the kernels that are compared, by name."""
    plan, inputs = step.plan, step.inputs
    two = replace(plan, units_per_program=2)
    alone = replace(PLANS["decode"], least_prefix=0)
    apart = step.host_tables(plan, is_apart=True)
    makers: dict[str, Callable[[], Run]] = {
        "ours": lambda: step.ours(plan),
        "2 units": lambda: step.ours(two, step.host_tables(two)),
        "dependent": lambda: step.ours(replace(plan, kernel=replace(plan.kernel, dependent=True))),
        "apart": lambda: step.ours(plan, apart),
        "decode plan": lambda: step.ours(alone, step.host_tables(alone, is_apart=True)),
    }
    if not HAS_GPU:
        del makers["dependent"]  # Triton's interpreter does not know it.
    if peers is None or not HAS_GPU:
        return makers
    return {
        "FA3": lambda: flash_attention_3(inputs, peers),
        "null": lambda: flash_attention_3(inputs, peers),
        **makers,
    }


class Forest(NamedTuple):
    """A small batch of sequences that take their pages from a random tree."""

    ragged: RaggedBatch
    owned: Any
    """Slots with a key that a sequence may read, bool (pages, PAGE)."""


def draw_forest(rng: np.random.Generator) -> Forest:
    """A random batch; half are decodes only. Table entries behind the last page are wrong."""
    rows: list[list[int]] = []
    queries, keys = [], []
    fresh, is_decode = 1, rng.random() < 0.5
    for _ in range(int(rng.integers(2, 25))):
        row: list[int] = []
        if rows and rng.random() < 0.85:
            other = rows[int(rng.integers(len(rows)))]
            row = other[: int(rng.integers(0, len(other) + 1))]
        new = int(rng.integers(1, 30))
        row = [*row, *range(fresh, fresh + new)]
        fresh += new
        query = 1 if is_decode else int(rng.choice([0, 1, 1, 2, 5, 9]))
        last = len(row) * PAGE - int(rng.integers(0, min(new * PAGE, 40)))
        rows.append(row)
        queries.append(query)
        keys.append(max(last, query))
    width = max(map(len, rows))
    table = np.full((len(rows), width), fresh, np.int32)
    owned = np.zeros((fresh + 1, PAGE), np.bool_)
    for place, row in enumerate(rows):
        table[place, : len(row)] = row
        at = np.arange(keys[place])
        owned[np.array(row)[at // PAGE], at % PAGE] = True
    lengths = np.array(queries, np.int32), np.array(keys, np.int32)
    return Forest(RaggedBatch(*lengths, table, PAGE, np.zeros(len(rows), np.bool_)), owned)


class Checker:
    """Runs random forests of one shape with and without groups."""

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape
        plan = plan_for(shape, BatchKind(True, 1))
        self.plan = replace(plan, least_prefix=64, least_saved_ns=0, least_split=128)
        self.settings = settings_of(self.plan, shape)
        self.capacity = bounded_capacity(self.settings, 32, 288, 16_384, 8)
        self.builder = DeviceBuilder.of(self.settings, self.capacity, str(DEVICE), WORKERS)
        self.buffers = AttentionBuffers.around(
            self.builder.tables, self.capacity.scratch_rows, shape.head_dim
        )

    def check(self, forest: Forest, seed: int) -> tuple[bool, float, float, float]:
        """Whether there were groups; RMS errors with and without, and the largest error."""
        ragged, shape = forest.ragged, self.shape
        generator = torch.Generator(DEVICE).manual_seed(seed)
        size = (2, *forest.owned.shape, shape.kv_heads, shape.head_dim)
        both = torch.randn(size, generator=generator, device=DEVICE).to(DTYPE)
        both[:, torch.from_numpy(~forest.owned).to(DEVICE)] = float("nan")
        cache = PagedCache(both[0], both[1])
        tokens = int(ragged.query_lengths.sum())
        size = (tokens, shape.heads, shape.head_dim)
        query = torch.randn(size, generator=generator, device=DEVICE).to(DTYPE)
        tensors = BatchTensors.of(
            ragged.query_starts, ragged.kv_lengths, ragged.block_table, pack_trees(ragged), DEVICE
        )
        prefixes = Prefixes(block_table=tensors.block_table, page_size=PAGE)
        self.builder.build(tensors.query_starts, tensors.kv_lengths, prefixes)
        tables = to_host(self.builder.tables, self.capacity)
        lengths = ragged.query_lengths, ragged.kv_lengths
        exact_size = needed_capacity(*lengths, self.settings)
        alone = HostBuilder.of(self.settings, exact_size).build(*lengths)
        programs = self.plan.programs(sms())
        kernel = MetaAttention(shape, self.plan.kernel, programs)
        outs = []
        for buffers in (self.buffers, AttentionBuffers.of(alone, shape.head_dim, DEVICE)):
            out = torch.full_like(query, float("nan"))
            kernel(query, cache, out, tensors, buffers)
            outs.append(out.double())
        exact = _exact(ragged, shape, query, cache)
        rms = [float((out - exact).square().mean().sqrt()) for out in outs]
        worst = float((outs[0] - exact).abs().max() / exact.abs().max())
        return bool(tables.counts[PREFIX_ROWS]), rms[0], rms[1], worst


def _exact(ragged: RaggedBatch, shape: AttentionShape, query: Tensor, cache: PagedCache) -> Tensor:
    """Attention in fp64, (tokens, heads, head dimension)."""
    result = torch.zeros(query.shape, dtype=torch.float64, device=DEVICE)
    starts = ragged.query_starts.tolist()
    for sequence, (length, keys) in enumerate(
        zip(ragged.query_lengths.tolist(), ragged.kv_lengths.tolist(), strict=True)
    ):
        if not length:
            continue
        at = np.arange(keys)
        pages = torch.from_numpy(ragged.block_table[sequence, at // PAGE]).long().to(DEVICE)
        slots = torch.from_numpy(at % PAGE).to(DEVICE)
        key, value = (part[pages, slots].double() for part in (cache.keys, cache.values))
        rows = slice(starts[sequence], starts[sequence + 1])
        grouped = query[rows].double().unflatten(1, (shape.kv_heads, shape.group))
        scores = torch.einsum("qhgd,khd->hgqk", grouped, key) * shape.score_scale
        position = torch.arange(keys - length, keys, device=DEVICE)
        hidden = torch.arange(keys, device=DEVICE)[None, :] > position[:, None]
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
        result[rows] = torch.einsum("hgqk,khd->qhgd", weights, value).flatten(1, 2)
    return result


def check_forests(seeds: Iterable[int], until: float) -> dict[str, Any]:
    """Compare random forests of all shapes with fp64, with and without groups."""
    checkers = {name: Checker(shape) for name, shape in SHAPES.items()}
    checked = grouped = 0
    wrong: list[str] = []
    sums: dict[str, list[float]] = {name: [0.0, 0.0] for name in SHAPES}
    for seed in seeds:
        if time.monotonic() > until:
            break
        name = list(SHAPES)[seed % len(SHAPES)]
        forest = draw_forest(np.random.default_rng(seed))
        if not forest.ragged.query_lengths.any():
            continue
        has_groups, rms, alone, worst = checkers[name].check(forest, seed)
        checked += 1
        grouped += has_groups
        sums[name][0] += rms
        sums[name][1] += alone
        if not (worst < 2e-2 and rms <= 1.5 * alone):
            wrong.append(f"{name} seed {seed}: error {worst:.3g}, rms {rms:.3g} and {alone:.3g}")
    ratios = {name: with_ / without for name, (with_, without) in sums.items() if without}
    return {"checked": checked, "grouped": grouped, "wrong": wrong, "rms_ratio": ratios}


def warm(job: str) -> None:
    """Compile what one shape of the forests, or the workloads (``layer``), need."""
    if job in SHAPES:
        checker = Checker(SHAPES[job])
        # Both forms of the reduction.
        for seed in range(8):
            checker.check(draw_forest(np.random.default_rng(seed)), seed)
        return
    from benchmarks.serving.attention.prefix_forests import Workload

    step = Step.of(Workload(4, 4, 1024, 48))
    for name, make in kernels_of(step, None).items():
        if job == "layer" or name == job:
            make()(step.caches[0])
