"""A candidate relies on an order without witnesses only where its original does."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import combinations, pairwise

import numpy as np
import pytest
from tests.corpus.catalogue import NVCC

from nostall.sass import Program
from nostall.sass.program import Function
from nostall.sass.program.cover_rules import RULES, CoverTable
from nostall.sass.safety.hazards.validator import HazardValidator
from nostall.sass.safety.symbolic.validator import SymbolicValidator
from nostall.sass.safety.verdict import Finding
from nostall.sass.schedule import ScheduleSpace, dependence_scan
from nostall.sass.schedule.moves import Slide

BARE = CoverTable(RULES, frozenset())
"""All rules, none of whose pairs has witnesses."""
FULL = CoverTable(RULES, frozenset(rule.pair for rule in RULES))
"""All rules, each pair of which has witnesses."""
CUBINS = ("shared_order.sm_80.cubin", "warps.sm_90.cubin", "warps.sm_75.cubin")
LARGEST = 400
"""Instructions of the largest function that is tried."""


@cache
def functions(name: str) -> tuple[Program, tuple[Function, ...]]:
    """A program and its small functions."""
    program = Program.from_cubin((NVCC / name).read_bytes())
    return program, tuple(f for f in program.functions if len(f.instructions) <= LARGEST)


def findings(
    sm: int, original: Function, candidate: Function, cover: CoverTable
) -> dict[str, list[Finding]]:
    """The findings of both halves of the verifier."""
    return {
        "hazards": HazardValidator(sm, cover).compare(original, candidate),
        "symbolic": SymbolicValidator(sm, cover).compare(original, candidate),
    }


def moved_waits(function: Function) -> Iterator[Function]:
    """Candidates in which the reader of a shared load waits for a later shared load only."""
    order = list(function.instructions)
    for block in function.blocks:
        loads = [at for at in range(block.start, block.end) if order[at].base == "LDS"]
        for first, second in pairwise(loads):
            own, other = order[first].control.write_sb, order[second].control.write_sb
            waiters = [
                at
                for at in range(first + 1, block.end)
                if own in order[at].control.waits and at > second + 1
            ]
            if own == other or max(own, other) > 5 or not waiters:
                continue
            control = order[waiters[0]].control
            changed = list(order)
            changed[waiters[0]] = order[waiters[0]].with_control(
                control.with_(wait=control.wait & ~(1 << own) | 1 << other)
            )
            yield function.reordered(changed)


def test_code_may_rely_on_what_it_relies_on_itself() -> None:
    relied_on = 0
    for name in CUBINS:
        program, small = functions(name)
        for function in small:
            assert not any(findings(program.sm, function, function, BARE).values())
            relied_on += len(HazardValidator(program.sm, BARE).analyse(function).reliances)
    assert relied_on


def test_a_candidate_must_not_rely_on_an_order_that_its_original_does_not_need() -> None:
    refused = {"hazards": 0, "symbolic": 0}
    for name in (*CUBINS, "algorithms.sm_75.cubin"):
        program, small = functions(name)
        for function, candidate in ((f, c) for f in small for c in moved_waits(f)):
            for part, found in findings(program.sm, function, candidate, BARE).items():
                refused[part] += any(finding.kind == "unwitnessed-order" for finding in found)
            known = findings(program.sm, function, candidate, FULL)
            kinds = {finding.kind for part in known.values() for finding in part}
            assert not kinds & {"unwitnessed-order", "uncovered-raw"}
    assert min(refused.values()) >= 3


@pytest.mark.parametrize("name", CUBINS)
def test_moves_keep_what_the_original_relies_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dependence_scan, "COVER", BARE)
    program, small = functions(name)
    for function in small:
        space = ScheduleSpace(program, function)
        rng = np.random.default_rng(0)
        state = space.start()
        for _ in range(60):
            move = space.propose(state, rng)
            if move is None:
                break
            state = space.apply(state, move)
        candidate = space.impose(state).function(function.name)
        found = findings(program.sm, function, candidate, BARE)
        assert not any(found.values()), found


def with_wait(function: Function, at: int, added: int = 0, removed: int = 0) -> Function:
    """A function with other waits of one instruction; the waits are masks of scoreboards."""
    order = list(function.instructions)
    control = order[at].control
    wait = control.wait & ~removed | added
    order[at] = order[at].with_control(control.with_(wait=wait))
    return function.reordered(order)


@cache
def loads_of_atomics() -> tuple[Program, Function, list[tuple[int, int]]]:
    """A function whose atomic accesses each wait for their own shared load: (load, access)."""
    program, (function,) = functions("shared_atomics.sm_120.cubin")
    order = function.instructions
    pairs = []
    for block in function.blocks:
        loads = [at for at in range(block.start, block.end) if order[at].base == "LDS"]
        for load in loads if len(loads) == 4 else ():
            own = order[load].control.write_sb
            access = next(at for at in range(load + 1, block.end) if own in order[at].control.waits)
            assert order[access].base == "REDG"
            pairs.append((load, access))
    assert len(pairs) == 4
    return program, function, pairs


def test_an_access_may_wait_for_its_load_by_the_scoreboard_of_a_later_load() -> None:
    """The wait completes both loads, whatever order completed the first before the wait."""
    program, function, pairs = loads_of_atomics()
    for (first, _), (second, later) in combinations(pairs, 2):
        order = list(function.instructions)
        own = order[first].control.write_sb
        order[second] = order[second].with_control(order[second].control.with_(write_sb=own))
        candidate = with_wait(function.reordered(order), later, added=1 << own)
        assert not any(findings(program.sm, function, candidate, BARE).values())


def test_an_access_may_not_lose_its_wait_to_an_order_without_witnesses() -> None:
    """Before its own wait the original has the load complete by such an order, too."""
    program, function, pairs = loads_of_atomics()
    (_, before), (load, access) = pairs[1], pairs[2]
    scoreboard = 1 << function.instructions[load].control.write_sb
    last = 1 << function.instructions[pairs[3][0]].control.write_sb
    # The access before waits for the last load, which completes behind the one of ``access``.
    original = with_wait(function, before, added=last)
    assert not any(findings(program.sm, original, original, BARE).values())
    candidate = with_wait(original, access, removed=scoreboard)
    found = findings(program.sm, original, candidate, BARE)
    text = original.instructions[access].text
    assert ("lost-order", text) in {(f.kind, f.instruction) for f in found["hazards"]}
    assert ("order-weaker", text) in {(f.kind, f.instruction) for f in found["symbolic"]}


def test_an_access_relies_on_what_its_wait_completes_by_an_order_without_witnesses() -> None:
    """The wait for the last load completes the one before, and a fence may rely on both."""
    program, function, pairs = loads_of_atomics()
    access, load, last = pairs[1][1], pairs[2][0], pairs[3][0]
    order = function.instructions
    original = with_wait(function, access, added=1 << order[last].control.write_sb)
    found = findings(program.sm, original, function, BARE)
    expected = {"hazards": f"LDS (originally at 0x{16 * load:04x})", "symbolic": order[load].text}
    for part, text in expected.items():
        kinds = {f.kind for f in found[part] if text in f.reason and f.offset == 16 * access}
        assert kinds == {"lost-order" if part == "hazards" else "order-weaker"}


def test_waits_of_a_later_block_may_protect_by_one_more_order_without_witnesses() -> None:
    """Stores of each block complete those of earlier blocks, which a wait completed before."""
    program, (function,) = functions("heap.sm_75.cubin")
    space = ScheduleSpace(program, function)
    validator = HazardValidator(program.sm)
    start, order = space.start(), function.instructions
    waiters = [i.index for i in order if i.control.wait and not space.graph.fixed[i.index]]
    legal = 0
    for index in waiters:
        for offset in range(1, 6):
            after = space.apply_if_legal(start, Slide(index, offset, frozenset()))
            if after is not None:
                legal += 1
                assert not validator.compare(function, space.impose(after).function(function.name))
    assert legal >= 20
