"""Plans that the attention benchmark tries: kernels, and settings of their tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from benchmarks.serving.attention.inputs import DEVICE, HAS_GPU
from benchmarks.serving.attention.kernels import KERNELS, make_kernel
from nostall.serving.attention.config import AttentionPlan, TileConfig
from nostall.serving.attention.gluon_launch import has_gluon_kernel
from nostall.serving.attention.launch import AttentionBuffers, MetaAttention, PagedCache
from nostall.serving.attention.rules import GLUON, GLUON_PLANS, MIXED, PLANS, Kind
from nostall.serving.attention.winners.on_gpu import GpuBatch
from nostall.serving.tables.columns import REDUCTIONS, UNITS
from nostall.serving.tables.host import HostBuilder, needed_capacity

Call = Callable[[PagedCache], Tensor]


PAPER = AttentionPlan(
    make_kernel([(16, 64, 4, "all"), (128, 32, 4, "branch")], 8, 128, 2),
    order="snake",
    units_per_program=0,
    split=4096,
)
"""The paper's scheme: two tile heights, descending cost, symmetric round robin."""


WIDE_KEYS = make_kernel(
    [(16, 128, 3, "branch"), (64, 128, 2, "branch"), (128, 128, 3, "tail")], 8, 0, 1
)
TWO_BLOCKS = make_kernel(
    [(16, 64, 4, "branch"), (64, 64, 3, "branch"), (128, 32, 4, "tail")], 4, 0, 2
)
WIDE = make_kernel([(128, 64, 3, "tail")], 8, 168, 1)
NARROW = make_kernel([(16, 64, 3, "branch"), (64, 32, 3, "branch")], 4, 168, 1)
"""Two kernels that fit on one SM at the same time."""


def candidates(kind: Kind) -> dict[str, AttentionPlan]:
    """Plans that are compared for a kind of batch; ``rule`` is the plan in force."""
    rule = PLANS[kind]
    dependent = replace(rule, kernel=replace(rule.kernel, dependent=True))
    unit = replace(rule, kernel=replace(rule.kernel, schedule="unit"), order="sorted")
    paired = replace(rule, kernel=replace(rule.kernel, front_share=0.5), order="paired")
    plans = {"rule": rule, "paired": paired}
    if kind == "decode":
        three = replace(make_kernel([(16, 64, 3, "branch")], 4, 168, 3), front_share=1.0)
        wide = replace(make_kernel([(16, 128, 3, "branch")], 8, 0, 1), front_share=1.0)
        few = replace(rule, units_per_program=1)
        plans |= {"unit": unit, "three": replace(rule, kernel=three), "few": few}
        plans |= {"n128": replace(rule, kernel=wide), "whole": replace(rule, units_per_program=0)}
    elif kind in ("verify", "decode and verify"):
        masked = make_kernel([(16, 64, 4, "all"), (64, 64, 3, "all")], 4, 0, 2)
        plans |= {"dependent": dependent, "unit": unit, "all": replace(rule, kernel=masked)}
        plans |= {
            "2048": replace(rule, least_split=2048),
            "units=2": replace(rule, units_per_program=2),
        }
    else:
        for name, kernel in (("tail", MIXED), ("n128", WIDE_KEYS), ("two blocks", TWO_BLOCKS)):
            queued = replace(kernel, schedule="queue", front_share=1.0)
            plans[name] = replace(rule, kernel=queued)
        plans["unit"] = unit
        del plans["paired"]
    if kind in GLUON_PLANS and has_gluon_kernel(DEVICE):
        gluon = GLUON_PLANS[kind]
        plans["tall"] = gluon
        tiles = {"tall s3": TileConfig(128, 128, 3), "tall n64": TileConfig(128, 64, 4)}
        for name, tile in tiles.items():
            plans[name] = replace(gluon, kernel=replace(GLUON, tiles=(tile,)))
        plans["tall unit"] = replace(gluon, kernel=replace(GLUON, schedule="unit"))
    return plans


def settings(plan: AttentionPlan, is_mixed: bool) -> Iterator[AttentionPlan]:
    """Variations of a plan's tables and schedule."""
    for units in (0, 1, 2, 8, 16):
        yield replace(plan, units_per_program=units)
    for keys in (256, 1024):
        yield replace(plan, least_split=keys)
    for order, schedule in (("snake", "ranges"), ("lpt", "ranges"), ("sorted", "unit")):
        for units in (2, 4):
            kernel = replace(plan.kernel, schedule=schedule)  # type: ignore[arg-type]
            yield replace(plan, kernel=kernel, order=order, units_per_program=units)
    if is_mixed:
        for front_share in (0.25, 0.4, 0.6, 0.75):
            yield replace(plan, kernel=replace(plan.kernel, front_share=front_share))


def applicable(inputs: GpuBatch) -> list[str]:
    """Names of the kernels that a batch can use sensibly."""
    rows = inputs.ragged.query_lengths * inputs.shape.group
    chosen = []
    for name, kernel in KERNELS.items():
        heights = [tile.rows for tile in kernel.tiles]
        if name.startswith("s ") or (name.startswith("d ") and rows.max() > 16):
            continue
        if name.startswith("p ") and rows.min() <= 64:
            continue
        if len(heights) == 2 and rows.max() > 2048 and heights[-1] == 64 and "m64" not in name:
            continue
        chosen.append(name)
    return chosen


def ours(
    plan: AttentionPlan,
    inputs: GpuBatch,
    out: Tensor,
    members: np.ndarray | None = None,
    share: float = 1.0,
) -> Call:
    """The batch, or only the sequences ``members`` (bool), by one launch of a plan.

    ``share``: part of the SMs for which tables and programs are made.
    """
    device = inputs.query.device
    sms = torch.cuda.get_device_properties(device).multi_processor_count if HAS_GPU else 2
    sms = max(1, round(sms * share))
    table_settings = plan.table_settings(inputs.shape, sms)
    query = inputs.ragged.query_lengths
    if members is not None:
        query = np.where(members, query, 0).astype(np.int32)
    keys = inputs.ragged.kv_lengths
    builder = HostBuilder.of(table_settings, needed_capacity(query, keys, table_settings))
    tables = builder.build(query, keys)
    on_device = AttentionBuffers.of(tables, inputs.shape.head_dim, device)
    programs = plan.launched_programs(sms, int(tables.counts[UNITS]))
    kernel = MetaAttention(inputs.shape, plan.kernel, programs, bool(tables.counts[REDUCTIONS]))

    def call(cache: PagedCache) -> Tensor:
        kernel(inputs.query, cache, out, inputs.tensors, on_device)
        return out

    return call


def one_after_the_other(plan: AttentionPlan, inputs: GpuBatch, out: Tensor) -> Call:
    """The same plan in one launch for each stage of the batch."""
    stages = inputs.ragged.stages
    calls = [ours(plan, inputs, out, stages == stage) for stage in np.unique(stages)]

    def call(cache: PagedCache) -> Tensor:
        for run in calls:
            run(cache)
        return out

    return call


def on_two_streams(
    wide: AttentionPlan,
    narrow: AttentionPlan,
    inputs: GpuBatch,
    out: Tensor,
    share: float = 1.0,
) -> Call:
    """Prefills by one plan and all others by another, on two streams that run at the same time.

    ``share``: part of the SMs that the prefills get.
    """
    is_prefill = inputs.ragged.stages == 0
    first = ours(wide, inputs, out, is_prefill, share)
    second = ours(narrow, inputs, out, ~is_prefill)
    side = torch.cuda.Stream() if HAS_GPU else None

    def call(cache: PagedCache) -> Tensor:
        if side is None:
            second(cache)
            return first(cache)
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            second(cache)
        first(cache)
        main.wait_stream(side)
        return out

    return call
