"""The soak: broken kernels run on a GPU, cost only their own result, and are never accepted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.kernels.suite import build, entries
from benchmarks.sass.robustness.illegal_moves import (
    BrokenCandidate,
    SpaceWithIllegalMoves,
    UnverifiedMove,
    VerifyingDevice,
)
from benchmarks.sass.robustness.soak import SoakSlice, next_slices, run_slice, summary

from benchmarks.sass.robustness import illegal_moves
from nostall.gpu import Device, Kernel, LocalGpu, MeasurementPlan, Outcome
from nostall.sass import Program
from nostall.sass.binary.cubin import Cubin
from tests.benchmarks.sass.test_suite import make_options
from tests.unit.gpu.fragile_worker import make_fragile

ENTRY = next(e for e in entries() if e.name == "dot_product")
ORIGINAL = build(ENTRY).cubin


@contextmanager
def opened(kernel: Kernel, plan: MeasurementPlan) -> Iterator[Device]:
    (text,) = Cubin.parse(kernel.cubin).texts
    make = partial(make_fragile, (text.file_offset, text.file_offset + text.size))
    with LocalGpu(kernel, plan, make=make) as gpu:
        yield gpu


def space() -> SpaceWithIllegalMoves:
    program = Program.from_cubin(ORIGINAL)
    return SpaceWithIllegalMoves(program, program.kernel())


@pytest.mark.slow
def test_a_fault_loses_only_the_broken_candidate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(illegal_moves, "KINDS", ("unannounce",))
    monkeypatch.setattr(illegal_moves, "verify", lambda *_: pytest.fail("asked the real verifier"))
    monkeypatch.setattr(illegal_moves, "_is_safe", lambda *_: False)
    rows: list[dict[str, Any]] = []
    for seconds in (0.6, 2.6, 6.0, 12.0):  # the longer slices are for a busy machine
        rows.append(run_slice(SoakSlice(ENTRY, None, tmp_path, seconds, opened, 0.01)))
        assert rows[-1]["ended"] == "done" and not rows[-1]["lost"]
        if rows[-1]["trials"] > rows[-1]["trials_before"] > 0 and sum(r["legal"] for r in rows) > 9:
            break
    else:
        pytest.fail(f"no slice went on with the one before: {rows}")
    totals = summary(tmp_path)
    assert totals["slices"] == len(rows) > 1 and totals["kernels"] == 1
    assert totals["faults_survived"] == totals["broken_kernels"] == totals["fates"]["fault"] > 0
    assert (
        totals["lost_results"]
        == totals["wrong_kernels_accepted"]
        == totals["spoilt_processes"]
        == 0
    )
    assert all(row["move"].startswith("unannounce #") for row in totals["broken"])


class ScriptedDevice:
    """A fake device with a given list of outcomes."""

    info: Mapping[str, str] = {}

    def __init__(self, *fates: str) -> None:
        self.fates, self.compared = list(fates), 0

    def evaluate(self, cubin: bytes) -> Outcome:
        return Outcome(self.fates.pop(0))  # type: ignore[arg-type]

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        self.compared += 1
        return Outcome("timed")


def verifying_device(
    safe: bool, monkeypatch: pytest.MonkeyPatch, *fates: str
) -> tuple[VerifyingDevice, list[BrokenCandidate]]:
    monkeypatch.setattr(illegal_moves, "_is_safe", lambda *_: safe)
    seen: list[BrokenCandidate] = []
    made = VerifyingDevice(ScriptedDevice(*fates), b"original", seen.append)
    made.space = space_with_broken(b"broken")
    return made, seen


def space_with_broken(*broken: bytes) -> SpaceWithIllegalMoves:
    made = object.__new__(SpaceWithIllegalMoves)
    made.broken = {illegal_moves._sha256(cubin): "jump #3 to 0" for cubin in broken}
    return made


def test_a_broken_kernel_that_looks_right_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    made, seen = verifying_device(False, monkeypatch, "timed", "timed", "timed")
    assert made.evaluate(b"broken").status == "rejected"
    assert seen == [BrokenCandidate("jump #3 to 0", "timed", "", safe=False, spoilt=False)]
    assert made.evaluate(b"legal").status == "timed"
    assert made.legal == 1 and not made.lost and not seen[0].is_wrongly_accepted


def test_a_harmless_illegal_move_may_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = verifying_device(True, monkeypatch, "timed", "timed")
    assert made.evaluate(b"broken").status == "timed"


def test_a_failure_of_an_accepted_candidate_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, seen = verifying_device(True, monkeypatch, "wrong", "timed")
    made.evaluate(b"broken")
    assert seen[0].is_wrongly_accepted


def test_a_spoilt_process_is_replaced_and_a_lost_result_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, seen = verifying_device(False, monkeypatch, "wrong", "wrong", "wrong")
    made.evaluate(b"broken")
    assert seen[0].spoilt and made.device.compared == 1
    made.evaluate(b"legal")
    assert made.lost == ["wrong: "]


def test_the_verifier_refuses_what_a_move_breaks() -> None:
    made = space()
    found = draw_illegal_moves(made, np.random.default_rng(3))
    move = next(m for m in found if m.kind == "unwait" and m.index in made._movable_memory)
    after = made.apply(made.start(), move)
    assert list(made.broken.values()) == [str(move)]
    assert not illegal_moves._is_safe(ORIGINAL, made._patcher.patch(after)), move


def draw_illegal_moves(
    made: SpaceWithIllegalMoves, rng: np.random.Generator
) -> Iterator[UnverifiedMove]:
    while True:
        move = made.draw(made.start(), rng)
        if isinstance(move, UnverifiedMove):
            yield move


def test_candidates_after_a_broken_one_count_as_broken() -> None:
    made, rng = space(), np.random.default_rng(0)
    move = next(m for m in draw_illegal_moves(made, rng) if m.kind == "unannounce")
    state = made.apply(made.start(), move)
    legal = made.propose(state, rng)
    while isinstance(legal, UnverifiedMove) or legal is None:
        legal = made.propose(state, rng)
    made.apply(state, legal)
    assert list(made.broken.values()) == [str(move), f"{move}; {legal}"]


def test_slices_continue_after_earlier_slices(tmp_path: Path) -> None:
    folder = tmp_path / ENTRY.name
    folder.mkdir()
    (folder / "slices.jsonl").write_text(f"{json.dumps({})}\n" * 2)
    found = next_slices([ENTRY], {}, make_options(folder=tmp_path, rounds=2, share=0.01))
    assert [job.seconds for job in found] == [60.0, 80.0]
