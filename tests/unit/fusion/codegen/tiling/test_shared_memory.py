"""Shared-memory buffers: lifetimes, places, dominance, and what is demoted."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nostall.fusion import BadFusion
from nostall.fusion.codegen.autotune.candidates import candidates
from nostall.fusion.codegen.cost.default_plan import default_plan, modelled_seconds
from nostall.fusion.codegen.cost.occupancy import blocks_per_sm
from nostall.fusion.codegen.emit.emit import emit
from nostall.fusion.codegen.generate import schedule_operators
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan, plans
from nostall.fusion.codegen.tiling.on_chip import (
    MAX_SHARED_BYTES,
    OnChipValues,
    can_copy_async,
    rematerialization_options,
    storage_dtype,
)
from nostall.fusion.codegen.tiling.shared_memory import (
    Arena,
    Buffer,
    Reuse,
    allocate,
    immediate_postdominators,
)
from nostall.fusion.graph.graph import Graph
from tests.unit.fusion.codegen.online_rows import cross_entropy
from tests.unit.fusion.codegen.wide_rows import late_input, softmax_norm, wide_rows
from tests.unit.fusion.patterns import layer_norm

REUSES: tuple[Reuse, ...] = ("none", "dominance", "order")


def of(graph: Graph) -> Schedule:
    return schedule_operators(graph, graph.operators)


# -- places ----------------------------------------------------------------------------------------


@st.composite
def some_buffers(draw: st.DrawFn) -> list[Buffer]:
    found = []
    for name in range(draw(st.integers(1, 8))):
        first = draw(st.integers(0, 4))
        last = draw(st.integers(first + 1, 6))
        element, early = draw(st.sampled_from((1, 2, 4, 8))), draw(st.booleans())
        found.append(Buffer(name, first, last, element, early))
    return found


def live_together(found: Arena) -> list[tuple[Buffer, Buffer]]:
    """Pairs that share memory although one is written while the other one is still needed."""
    offsets = dict(zip(found.buffers, found.offsets, strict=True))

    def in_place(a: Buffer, b: Buffer) -> bool:
        same = offsets[a] == offsets[b] and a.element_bytes == b.element_bytes
        return a.last_pass == b.first_pass and same and not b.is_prefetched

    return [
        (a, b)
        for a, b in found.overlapping_pairs()
        if not (a.last_pass < b.first_pass or in_place(a, b))
    ]


@given(some_buffers(), st.integers(1, 9), st.randoms(use_true_random=False), st.data())
def test_live_buffers_are_apart_and_reuse_takes_no_more(
    buffers: list[Buffer], chunks: int, draw: random.Random, data: st.DataObject
) -> None:
    pairs = [(a.name, b.name) for a in buffers for b in buffers if a.last_pass <= b.first_pass]
    dominated = [pair for pair in pairs if draw.random() < 0.5]
    apart = allocate(buffers, chunks, 256, "none")
    assert apart.overlapping_pairs() == []
    assert apart.total_bytes == sum(apart.buffer_bytes(buffer) for buffer in buffers)
    for reuse in REUSES:
        found = allocate(buffers, chunks, 256, reuse, dominated)
        assert live_together(found) == []
        assert found.peak_live_bytes <= found.total_bytes <= apart.total_bytes
        assert all(offset % (256 * b.element_bytes) == 0 for offset, b in _placed(found))
        if reuse == "dominance":
            assert {(a.name, b.name) for a, b in found.overlapping_pairs()} <= set(dominated)


def _placed(found: Arena) -> list[tuple[int, Buffer]]:
    return list(zip(found.offsets, found.buffers, strict=True))


def test_one_buffer_after_the_other_is_in_the_same_place() -> None:
    row = [Buffer(name, name, name + 1, 4) for name in range(4)]
    assert allocate(row, 3, 1024, "order").total_bytes == 3 * 4096
    assert allocate(row, 3, 1024, "dominance").total_bytes == 4 * 3 * 4096, (
        "nothing is said to dominate"
    )
    early = [Buffer(name, name, name + 1, 4, is_prefetched=True) for name in range(4)]
    assert allocate(early, 3, 1024, "order").total_bytes == 2 * 3 * 4096, (
        "copied before the last reader"
    )
    narrow = [Buffer(0, 0, 1, 2), Buffer(1, 1, 2, 4)]
    assert allocate(narrow, 2, 1024, "order").total_bytes == 3 * 4096, "chunks of different sizes"


# -- dominance -------------------------------------------------------------------------------------


@given(st.integers(1, 8), st.randoms(use_true_random=False))
def test_dominators_are_on_every_way_to_the_end(count: int, draw: random.Random) -> None:
    after = [[b for b in range(a + 1, count) if draw.random() < 0.35] for a in range(count)]

    def ways(step: int) -> list[list[int]]:
        if step == count:
            return [[count]]
        return [[step, *way] for later in after[step] or [count] for way in ways(later)]

    above = immediate_postdominators(after)
    for step in range(count):
        on_all = set.intersection(*(set(way[1:]) for way in ways(step)))
        assert above[step] == min(on_all)


@given(st.integers(0, 2**32))
def test_what_dominates_a_value_is_made_when_nobody_reads_it_any_more(seed: int) -> None:
    """Dominance on the steps of a kernel never says more than the order in which they run."""
    for kept in rematerialization_options(of(wide_rows(seed, columns=300)), async_copies=bool(seed % 2)):
        buffers = kept.buffers
        for a, b in kept.dominated_pairs:
            assert buffers[a].last_pass <= buffers[b].first_pass
        for reuse in REUSES:
            found = kept.arena(64, reuse)
            assert live_together(found) == []
            assert found.peak_live_bytes <= found.total_bytes <= kept.arena(64, "none").total_bytes


def test_dominance_knows_less_than_the_order() -> None:
    """What is read late is dominated by nothing, and lies beside what is dead by then."""
    kept = next(
        k
        for k in rematerialization_options(of(late_input((64, 8192), "float16")))
        if len(k.values) == 2
    )
    assert [(b.first_pass, b.last_pass) for b in kept.buffers] == [(0, 1), (2, 3)]
    row = 8192 * 2
    assert [kept.arena(1024, reuse).total_bytes for reuse in REUSES] == [2 * row, 2 * row, row]


# -- what is kept ----------------------------------------------------------------------------------


def test_values_of_a_softmax_and_a_norm_share_one_row() -> None:
    kept = rematerialization_options(of(softmax_norm((64, 8192), "float32")))[0]
    assert [(b.first_pass, b.last_pass, b.element_bytes) for b in kept.buffers] == [
        (0, 1, 4),
        (1, 2, 4),
        (2, 3, 4),
        (3, 4, 4),
    ]
    row = 8192 * 4
    assert [kept.arena(1024, reuse).total_bytes for reuse in REUSES] == [4 * row, row, row]


def test_a_norm_keeps_its_input_where_that_takes_less() -> None:
    """Narrow in memory, wide once computed; a subtraction is done again."""
    first, second = rematerialization_options(of(layer_norm((64, 8192), "float16")))
    row = 8192
    assert first.arena(1024).total_bytes == 4 * row
    assert second.arena(1024).total_bytes == 2 * row
    (value,) = second.values
    assert storage_dtype(second.schedule, value) == "float16"
    assert second.passes_using[value] == (0, 1, 2)


@given(st.integers(0, 2**32))
def test_demotions_take_less_and_less_and_keep_what_is_used(seed: int) -> None:
    schedule = of(wide_rows(seed, columns=300))
    found = rematerialization_options(schedule)
    assert all(a.arena(300).total_bytes > b.arena(300).total_bytes for a, b in pairwise(found))
    for kept in found:
        assert all(len(numbers) > 1 for numbers in kept.passes_using.values())
        for number, part in enumerate(kept.passes):
            made = {value for value, numbers in kept.passes_using.items() if numbers[0] < number}
            assert part.on_chip == made


@pytest.mark.parametrize(
    ("columns", "dtype", "ahead"),
    [(8192, "float16", True), (8191, "float16", False), (8191, "float32", True)],
)
def test_what_is_read_is_copied_ahead_where_the_hardware_can(
    columns: int, dtype: str, ahead: bool
) -> None:
    """Four bytes at a time, in every row."""
    schedule = of(layer_norm((64, columns), dtype))
    assert can_copy_async(schedule, schedule.mapping.memory_operands[0]) is ahead
    assert bool(rematerialization_options(schedule, async_copies=True)) is ahead
    found = [plan for plan in plans(schedule).legal if plan.async_copies]
    assert any(not plan.peeled for plan in found) is ahead
    # Where rows are peeled, whole turns begin at multiples of 16 bytes.
    assert any(plan.peeled for plan in found) is (columns % 2 == 1)


def test_nothing_is_kept_where_one_pass_does() -> None:
    schedule = of(wide_rows(0, columns=300))
    assert OnChipValues(schedule, frozenset()).buffers == ()


# -- plans -----------------------------------------------------------------------------------------


def test_plans_keep_all_or_less() -> None:
    schedule = of(layer_norm((64, 50000), "float16"))
    found = [p for p in plans(schedule).legal if p.scheme == "shared"]
    assert {plan.rematerialized for plan in found} == {0, 1}


def test_rows_at_odd_places_are_kept_by_lanes_and_race() -> None:
    """A row of 50,257 fp16 takes 25 chunks of 2,048 lanes, whichever place it begins at."""
    schedule = of(cross_entropy((4096, 50257), "float16"))
    found = [p for p in plans(schedule).legal if p.scheme == "shared" and p.peeled]
    assert {plan.async_copies for plan in found} == {False, True}
    (kept, *_) = rematerialization_options(schedule, True, is_peeled=True)
    assert kept.arena(2048).total_bytes == 25 * 2048 * 2
    assert [buffer.is_prefetched for buffer in kept.buffers] == [True]
    assert default_plan(schedule) in found
    assert {plan.scheme for plan in candidates(schedule, 8)} >= {"looped", "shared", "split"}
    # Four lanes are left in nine chunks; a row may begin behind seven.
    other = of(layer_norm((64, 9 * 1024 - 4), "float16"))
    assert [
        rematerialization_options(other, False, odd)[0].arena(1024).chunks for odd in (False, True)
    ] == [9, 10]


def test_rows_are_kept_by_lanes_where_that_makes_accesses_wider() -> None:
    """Of 2,500 fp16 a row begins at a multiple of 8 bytes: four neighbours lie as they should, of
    eight, where nothing wider is kept, each is loaded alone."""
    schedule = of(layer_norm((64, 2500), "float16"))
    neighbours = [
        kept.vector_elements for kept in rematerialization_options(schedule, is_peeled=True)
    ]
    legal = [plan for plan in plans(schedule).legal if plan.scheme == "shared" and plan.peeled]
    assert {4, 8} == set(neighbours)
    assert {neighbours[plan.rematerialized] for plan in legal if not plan.async_copies} == {8}


def test_rows_that_are_too_wide_say_so() -> None:
    schedule = of(layer_norm((64, 200000), "float32"))
    found = plans(schedule)
    assert not any(plan.scheme == "shared" for plan in found.legal)
    reasons = {r.reason for r in found.illegal if r.plan.scheme == "shared"}
    assert any(f"at most {MAX_SHARED_BYTES}" in reason for reason in reasons)
    with pytest.raises(BadFusion, match="bytes of shared memory"):
        emit(schedule, KernelPlan("shared", 1, (4096,), 16))
    with pytest.raises(BadFusion, match="rematerialization option 7; there are 2"):
        emit(schedule, KernelPlan("shared", 1, (4096,), 16, rematerialized=7))


def test_values_are_demoted_until_enough_blocks_share_an_sm() -> None:
    """Three rows of 64 KB fit where one of 128 KB leaves an SM to one block."""
    schedule = of(layer_norm((4096, 32768), "float16"))
    everything, less = (KernelPlan("shared", 1, (4096,), 16, rematerialized=n) for n in (0, 1))
    held = [kept.arena(4096).total_bytes for kept in rematerialization_options(schedule)]
    assert [blocks_per_sm(16, 32, size) for size in held] == [1, 3]
    assert modelled_seconds(schedule, less) < modelled_seconds(schedule, everything)
    best = min(
        (p for p in plans(schedule).legal if p.scheme == "shared"),
        key=lambda plan: modelled_seconds(schedule, plan),
    )
    assert (
        rematerialization_options(schedule, best.async_copies)[best.rematerialized].values
        == rematerialization_options(schedule)[1].values
    )
    assert default_plan(schedule) in plans(schedule).legal
