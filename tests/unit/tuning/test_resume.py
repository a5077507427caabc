"""Resuming a run after the verifier's rules have changed: unsafe schedules are not restored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from nostall.core import Run
from nostall.core.errors import BadRun
from nostall.gpu import Outcome, Timing
from nostall.sass import Program, Verdict
from nostall.sass.safety import verify
from nostall.sass.safety.verdict import rules_digest
from nostall.sass.schedule import Schedule, ScheduleSpace
from nostall.search import Anneal
from nostall.tuning import job
from nostall.tuning.job import tune
from nostall.tuning.settings import Settings
from nostall.tuning.sources.source import Source
from tests.unit.tuning.fake_device import load_example

SETTINGS = Settings(evaluations=8, objective="gpu", rounds=8, checks=2)


class FasterDevice:
    """A device on which every candidate takes slightly less time than the original."""

    info: Mapping[str, str] = {"gpu": "none"}

    def evaluate(self, cubin: bytes) -> Outcome:
        return Outcome("timed", Timing((1e-5,) * 3, (1e-5 - sum(cubin) * 1e-13,) * 3))

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        original = (1e-5,) * rounds
        return Outcome("timed", Timing(original, (0.9e-5,) * rounds, original))


@pytest.fixture(scope="module")
def source() -> Source:
    return load_example()


@pytest.fixture
def run(tmp_path: Path, source: Source) -> Run:
    """A finished run of eight evaluations, without the digest of the rules."""
    run = Run.create(tmp_path / "run", "tune", {}, {"original.cubin": source.cubin})
    with run:
        tune(source, Anneal(), SETTINGS, run=run, device=FasterDevice())
    return Run.open(tmp_path / "run")


@pytest.fixture(scope="module")
def space(source: Source) -> ScheduleSpace:
    program = Program.from_cubin(source.cubin)
    return ScheduleSpace(program, program.kernel(source.kernel))


def unsafe_schedule(space: ScheduleSpace) -> Schedule:
    """A schedule in which no instruction waits for a scoreboard."""
    start = space.start()
    return replace(start, wait=0 * start.wait)


def resume(run: Run, source: Source) -> Run:
    settings = replace(SETTINGS, evaluations=12)
    with run:
        tune(source, Anneal(), settings, run=run, resume=True, device=FasterDevice())
    return run


def test_with_the_same_rules_only_the_result_is_verified(
    run: Run, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = json.loads((run.path / "run.json").read_text())
    record["settings"]["rules"] = rules_digest()
    (run.path / "run.json").write_text(json.dumps(record))
    verified: list[bytes] = []

    def counting_verify(original: bytes, candidate: bytes, **options: bool) -> Verdict:
        verified.append(candidate)
        return verify(original, candidate, **options)

    monkeypatch.setattr(job, "verify", counting_verify)
    resume(Run.open(run.path), source)
    assert len(verified) == 1


@pytest.mark.slow
def test_an_unsafe_finalist_is_dropped(run: Run, source: Source, space: ScheduleSpace) -> None:
    path = run.path / "finalists.json"
    snapshot = json.loads(path.read_text())
    unsafe = space.dump(unsafe_schedule(space))
    snapshot["finalists"].append([1e-9, unsafe])
    path.write_text(json.dumps(snapshot))
    resumed = resume(run, source)
    finalists = json.loads((resumed.path / "finalists.json").read_text())["finalists"]
    assert unsafe not in [state for _, state in finalists]
    assert len(finalists) >= len(snapshot["finalists"]) - 1
    assert not (resumed.path / "refused.cubin").exists()


@pytest.mark.parametrize("name", ["current", "best"])
def test_a_checkpoint_with_an_unsafe_schedule_is_an_error(
    name: str, run: Run, source: Source, space: ScheduleSpace
) -> None:
    path = run.path / "checkpoint.json"
    unsafe = space.dump(unsafe_schedule(space))
    path.write_text(json.dumps({**json.loads(path.read_text()), name: unsafe}))
    with pytest.raises(BadRun, match=f"rejects the {name} schedule .* start a new run"):
        resume(run, source)
