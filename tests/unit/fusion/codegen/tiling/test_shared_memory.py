"""Shared-memory buffers: lifetimes, offsets, dominance and rematerialization."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest
from benchmarks.fusion.chains.mechanisms.reuse_rules import (
    Reuse,
    arena_by,
    dominated_pairs,
    immediate_postdominators,
    peak_live_bytes,
)
from hypothesis import given
from hypothesis import strategies as st

from nostall.fusion import BadFusion
from nostall.fusion.codegen.autotune.candidates import candidates
from nostall.fusion.codegen.cost.default_plan import default_plan, modelled_seconds
from nostall.fusion.codegen.cost.gpu import blocks_per_sm
from nostall.fusion.codegen.emit.emit import emit
from nostall.fusion.codegen.generate import schedule_operators
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.on_chip import (
    MAX_SHARED_BYTES,
    OnChipValues,
    can_copy_async,
    rematerialization_options,
    storage_dtype,
)
from nostall.fusion.codegen.tiling.plan_space import plans
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel, plan_kernel
from nostall.fusion.codegen.tiling.shared_memory import Arena, Buffer, allocate, any_dead_buffer
from nostall.fusion.graph.graph import Graph
from tests.unit.fusion.codegen.graphs.wide_rows import late_input, softmax_norm, wide_rows
from tests.unit.fusion.codegen.interpreted.online_rows import cross_entropy
from tests.unit.fusion.patterns import layer_norm

REUSES: tuple[Reuse, ...] = ("none", "dominance", "order")


def schedule_graph(graph: Graph) -> Schedule:
    return schedule_operators(graph, graph.operators)


# -- allocation ------------------------------------------------------------------------------------


@st.composite
def buffer_lists(draw: st.DrawFn) -> list[Buffer]:
    buffers = []
    for name in range(draw(st.integers(1, 8))):
        first = draw(st.integers(0, 4))
        last = draw(st.integers(first + 1, 6))
        element_bytes, is_prefetched = draw(st.sampled_from((1, 2, 4, 8))), draw(st.booleans())
        buffers.append(Buffer(name, first, last, element_bytes, is_prefetched))
    return buffers


def overlapping_pairs(arena: Arena) -> list[tuple[Buffer, Buffer]]:
    """Pairs of buffers that share memory, ordered by their first pass."""
    pairs = []
    for (a, x), (b, y) in combinations(zip(arena.buffers, arena.offsets, strict=True), 2):
        if x < y + arena.buffer_bytes(b) and y < x + arena.buffer_bytes(a):
            pairs.append((a, b) if a.first_pass <= b.first_pass else (b, a))
    return pairs


def conflicts(arena: Arena) -> list[tuple[Buffer, Buffer]]:
    """Pairs that share memory although one is written while the other is still needed."""
    offsets = dict(zip(arena.buffers, arena.offsets, strict=True))

    def in_place(a: Buffer, b: Buffer) -> bool:
        has_same_chunks = offsets[a] == offsets[b] and a.element_bytes == b.element_bytes
        return a.last_pass == b.first_pass and has_same_chunks and not b.is_prefetched

    return [
        (a, b)
        for a, b in overlapping_pairs(arena)
        if not (a.last_pass < b.first_pass or in_place(a, b))
    ]


@given(buffer_lists(), st.integers(1, 9), st.randoms(use_true_random=False), st.data())
def test_live_buffers_are_disjoint_and_reuse_takes_no_more_memory(
    buffers: list[Buffer], chunks: int, draw: random.Random, data: st.DataObject
) -> None:
    pairs = [(a.name, b.name) for a in buffers for b in buffers if a.last_pass <= b.first_pass]
    dominated = [pair for pair in pairs if draw.random() < 0.5]
    rules = {
        "none": lambda earlier, later: False,
        "dominance": lambda earlier, later: (earlier.name, later.name) in dominated,
        "order": any_dead_buffer,
    }
    without_reuse = allocate(buffers, chunks, 256, rules["none"])
    assert overlapping_pairs(without_reuse) == []
    assert without_reuse.total_bytes == sum(without_reuse.buffer_bytes(b) for b in buffers)
    for reuse in REUSES:
        arena = allocate(buffers, chunks, 256, rules[reuse])
        assert conflicts(arena) == []
        assert peak_live_bytes(arena) <= arena.total_bytes <= without_reuse.total_bytes
        offsets = zip(arena.offsets, arena.buffers, strict=True)
        assert all(offset % (256 * b.element_bytes) == 0 for offset, b in offsets)
        if reuse == "dominance":
            assert {(a.name, b.name) for a, b in overlapping_pairs(arena)} <= set(dominated)


def test_a_chain_of_buffers_shares_one_offset() -> None:
    chain = [Buffer(name, name, name + 1, 4) for name in range(4)]
    assert allocate(chain, 3, 1024).total_bytes == 3 * 4096
    assert allocate(chain, 3, 1024, lambda earlier, later: False).total_bytes == 4 * 3 * 4096, (
        "no pair of producers dominates"
    )
    prefetched = [Buffer(name, name, name + 1, 4, is_prefetched=True) for name in range(4)]
    assert allocate(prefetched, 3, 1024).total_bytes == 2 * 3 * 4096, (
        "written before the last read of the earlier buffer"
    )
    mixed = [Buffer(0, 0, 1, 2), Buffer(1, 1, 2, 4)]
    assert allocate(mixed, 2, 1024).total_bytes == 3 * 4096, "chunks of different sizes"


# -- dominance -------------------------------------------------------------------------------------


@given(st.integers(1, 8), st.randoms(use_true_random=False))
def test_postdominators_are_on_all_paths_to_the_end(count: int, draw: random.Random) -> None:
    successors = [[b for b in range(a + 1, count) if draw.random() < 0.35] for a in range(count)]

    def paths(step: int) -> list[list[int]]:
        if step == count:
            return [[count]]
        return [[step, *path] for later in successors[step] or [count] for path in paths(later)]

    postdominators = immediate_postdominators(successors)
    for step in range(count):
        on_all_paths = set.intersection(*(set(path[1:]) for path in paths(step)))
        assert postdominators[step] == min(on_all_paths)


@given(st.integers(0, 2**32))
def test_the_dominator_of_a_value_runs_after_its_last_read(seed: int) -> None:
    """Reuse by dominance is valid in the order in which the kernel runs, too."""
    schedule = schedule_graph(wide_rows(seed, columns=300))
    for kept in rematerialization_options(schedule, async_copies=bool(seed % 2)):
        buffers = kept.buffers
        for a, b in dominated_pairs(kept):
            assert buffers[a].last_pass <= buffers[b].first_pass
        for reuse in REUSES:
            arena = arena_by(kept, 64, reuse)
            assert conflicts(arena) == []
            assert (
                peak_live_bytes(arena)
                <= arena.total_bytes
                <= arena_by(kept, 64, "none").total_bytes
            )


def test_reuse_by_order_saves_more_than_by_dominance() -> None:
    """The load of a late input dominates nothing, so dominance gives it memory of its own."""
    kept = next(
        k
        for k in rematerialization_options(schedule_graph(late_input((64, 8192), "float16")))
        if len(k.values) == 2
    )
    assert [(b.first_pass, b.last_pass) for b in kept.buffers] == [(0, 1), (2, 3)]
    row = 8192 * 2
    assert [arena_by(kept, 1024, reuse).total_bytes for reuse in REUSES] == [2 * row, 2 * row, row]


# -- values on chip --------------------------------------------------------------------------------


def test_all_values_of_a_softmax_and_a_norm_share_memory_of_one_row() -> None:
    kept = rematerialization_options(schedule_graph(softmax_norm((64, 8192), "float32")))[0]
    assert [(b.first_pass, b.last_pass, b.element_bytes) for b in kept.buffers] == [
        (0, 1, 4),
        (1, 2, 4),
        (2, 3, 4),
        (3, 4, 4),
    ]
    row = 8192 * 4
    assert [arena_by(kept, 1024, reuse).total_bytes for reuse in REUSES] == [4 * row, row, row]


def test_the_second_option_of_a_norm_keeps_its_fp16_input() -> None:
    """The first one keeps fp32 differences; the second one recomputes the subtraction."""
    first, second = rematerialization_options(schedule_graph(layer_norm((64, 8192), "float16")))
    row = 8192
    assert first.arena(1024).total_bytes == 4 * row
    assert second.arena(1024).total_bytes == 2 * row
    (value,) = second.values
    assert storage_dtype(second.schedule, value) == "float16"
    assert second.passes_using[value] == (0, 1, 2)


@given(st.integers(0, 2**32))
def test_options_take_less_and_less_memory_and_keep_only_reused_values(seed: int) -> None:
    schedule = schedule_graph(wide_rows(seed, columns=300))
    options = rematerialization_options(schedule)
    assert all(a.arena(300).total_bytes > b.arena(300).total_bytes for a, b in pairwise(options))
    for option in options:
        numbers_by_value = option.passes_using
        assert all(len(numbers) > 1 for numbers in numbers_by_value.values())
        for number, current in enumerate(option.passes):
            stored = {v for v, numbers in numbers_by_value.items() if numbers[0] < number}
            assert current.on_chip == stored


@pytest.mark.parametrize(
    ("columns", "dtype", "is_copyable"),
    [(8192, "float16", True), (8191, "float16", False), (8191, "float32", True)],
)
def test_operands_are_copied_asynchronously_if_rows_are_multiples_of_4_bytes(
    columns: int, dtype: str, is_copyable: bool
) -> None:
    schedule = schedule_graph(layer_norm((64, columns), dtype))
    assert can_copy_async(schedule, schedule.mapping.memory_operands[0]) is is_copyable
    assert bool(rematerialization_options(schedule, async_copies=True)) is is_copyable
    copying = [plan for plan in plans(schedule).legal_plans if plan.async_copies]
    assert any(not plan.peeled for plan in copying) is is_copyable
    # Full iterations of peeled kernels begin at multiples of 16 bytes.
    assert any(plan.peeled for plan in copying) is (columns % 2 == 1)


def test_an_empty_set_of_values_has_no_buffers() -> None:
    schedule = schedule_graph(wide_rows(0, columns=300))
    assert OnChipValues(schedule, frozenset()).buffers == ()


# -- plans -----------------------------------------------------------------------------------------


def test_shared_plans_have_all_rematerialization_options() -> None:
    schedule = schedule_graph(layer_norm((64, 50000), "float16"))
    shared_plans = [p for p in plans(schedule).legal_plans if p.scheme == "shared"]
    assert {plan.rematerialized for plan in shared_plans} == {0, 1}


def test_buffers_of_unaligned_rows_are_indexed_by_lane() -> None:
    """A row of 50,257 fp16 takes 25 chunks of 2,048 lanes, wherever it begins."""
    schedule = schedule_graph(cross_entropy((4096, 50257), "float16"))
    peeled_plans = [p for p in plans(schedule).legal_plans if p.scheme == "shared" and p.peeled]
    assert {plan.async_copies for plan in peeled_plans} == {False, True}
    (kept, *_) = rematerialization_options(schedule, True, is_peeled=True)
    assert kept.arena(2048).total_bytes == 25 * 2048 * 2
    assert [buffer.is_prefetched for buffer in kept.buffers] == [True]
    assert default_plan(schedule).plan in peeled_plans
    assert {kernel.plan.scheme for kernel in candidates(schedule, 8)} >= {
        "looped",
        "shared",
        "split",
    }
    # Nine chunks have four lanes more than the row; up to seven lanes can precede the row.
    narrower = schedule_graph(layer_norm((64, 9 * 1024 - 4), "float16"))
    assert [
        rematerialization_options(narrower, False, is_peeled)[0].arena(1024).chunks
        for is_peeled in (False, True)
    ] == [9, 10]


def test_shared_plans_are_peeled_if_that_makes_accesses_wider() -> None:
    """Rows of 2,500 fp16 begin at multiples of 8 bytes.

    Threads with four contiguous elements load them at once without peeling.  Threads with eight
    would load each element alone; they have eight if no fp32 value is kept.
    """
    schedule = schedule_graph(layer_norm((64, 2500), "float16"))
    vector_elements = [
        kept.vector_elements for kept in rematerialization_options(schedule, is_peeled=True)
    ]
    peeled_plans = [p for p in plans(schedule).legal_plans if p.scheme == "shared" and p.peeled]
    assert {4, 8} == set(vector_elements)
    assert {
        vector_elements[plan.rematerialized] for plan in peeled_plans if not plan.async_copies
    } == {8}


def test_too_wide_rows_are_illegal_with_a_reason() -> None:
    schedule = schedule_graph(layer_norm((64, 200000), "float32"))
    space = plans(schedule)
    assert not any(plan.scheme == "shared" for plan in space.legal_plans)
    reasons = {r.reason for r in space.illegal if r.plan.scheme == "shared"}
    assert any(f"at most {MAX_SHARED_BYTES}" in reason for reason in reasons)
    with pytest.raises(BadFusion, match="bytes of shared memory"):
        emit(plan_kernel(schedule, KernelPlan("shared", 1, (4096,), 16)))
    with pytest.raises(BadFusion, match="rematerialization option 7; there are 1 with"):
        emit(plan_kernel(schedule, KernelPlan("shared", 1, (4096,), 16, rematerialized=7)))


def test_values_are_rematerialized_until_enough_blocks_share_an_sm() -> None:
    """An SM has room for three blocks with a row of 64 KB each, but for one with 128 KB."""
    schedule = schedule_graph(layer_norm((4096, 32768), "float16"))
    keep_all, keep_less = (KernelPlan("shared", 1, (4096,), 16, rematerialized=n) for n in (0, 1))
    shared_bytes = [kept.arena(4096).total_bytes for kept in rematerialization_options(schedule)]
    assert [blocks_per_sm(16, 32, size) for size in shared_bytes] == [1, 3]
    assert modelled_seconds(PlannedKernel(schedule, keep_less)) < modelled_seconds(
        PlannedKernel(schedule, keep_all)
    )
    best = min(
        (p for p in plans(schedule).legal_plans if p.scheme == "shared"),
        key=lambda plan: modelled_seconds(PlannedKernel(schedule, plan)),
    )
    assert (
        rematerialization_options(schedule, best.async_copies)[best.rematerialized].values
        == rematerialization_options(schedule)[1].values
    )
    assert default_plan(schedule) in plans(schedule).legal
