"""A run that was made when the rules were others: nothing that they refuse today comes back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from nostall.core import LaunchSpec, Run
from nostall.core.errors import BadRun
from nostall.gpu import Outcome, Timing
from nostall.sass import Program, Verdict
from nostall.sass.safety import verify as true_verify
from nostall.sass.safety.identity import rules_digest
from nostall.sass.schedule import Schedule, ScheduleSpace
from nostall.search import Anneal
from nostall.tuning import job
from nostall.tuning.job import Settings, tune
from nostall.tuning.source import Source, load_cubin

NVCC = Path(__file__).resolve().parents[3] / "examples" / "nvcc"
SETTINGS = Settings(evaluations=8, objective="gpu", rounds=8, checks=2)


class Level:
    """Every candidate takes a little less than the original."""

    info: Mapping[str, str] = {"gpu": "none"}

    def evaluate(self, cubin: bytes) -> Outcome:
        return Outcome("timed", Timing((1e-5,) * 3, (1e-5 - sum(cubin) * 1e-13,) * 3))

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        one = (1e-5,) * rounds
        return Outcome("timed", Timing(one, (0.9e-5,) * rounds, one))


@pytest.fixture(scope="module")
def source() -> Source:
    launch = LaunchSpec.from_toml(NVCC / "dot_product.toml")
    return load_cubin(NVCC / "dot_product.sm_90.cubin", None, launch)


@pytest.fixture
def run(tmp_path: Path, source: Source) -> Run:
    """A finished run of eight evaluations."""
    begun = Run.create(tmp_path / "run", "tune", {}, {"original.cubin": source.cubin})
    with begun:
        tune(source, Anneal(), SETTINGS, run=begun, device=Level())
    return Run.open(tmp_path / "run")


@pytest.fixture(scope="module")
def space(source: Source) -> ScheduleSpace:
    program = Program.from_cubin(source.cubin)
    return ScheduleSpace(program, program.kernel(source.kernel))


def hasty(space: ScheduleSpace) -> Schedule:
    """A schedule that no rules allow, as older ones might have: nobody waits for anything."""
    start = space.start()
    return replace(start, wait=0 * start.wait)


def resumed(run: Run, source: Source) -> Run:
    settings = replace(SETTINGS, evaluations=12)
    with run:
        tune(source, Anneal(), settings, run=run, resume=True, device=Level())
    return run


def test_the_rules_of_today_are_not_asked_twice(
    run: Run, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = json.loads((run.path / "run.json").read_text())
    record["settings"]["rules"] = rules_digest()
    (run.path / "run.json").write_text(json.dumps(record))
    asked: list[bytes] = []

    def verify(before: bytes, after: bytes) -> Verdict:
        asked.append(after)
        return true_verify(before, after)

    monkeypatch.setattr(job, "verify", verify)
    resumed(Run.open(run.path), source)
    assert len(asked) == 1  # the result


def test_a_finalist_that_is_refused_now_is_forgotten(
    run: Run, source: Source, space: ScheduleSpace
) -> None:
    path = run.path / "finalists.json"
    saved = json.loads(path.read_text())
    saved["finalists"].append([1e-9, space.dump(hasty(space))])
    path.write_text(json.dumps(saved))
    after = resumed(run, source)
    kept = json.loads((after.path / "finalists.json").read_text())["finalists"]
    assert space.dump(hasty(space)) not in [state for _, state in kept]
    assert len(kept) >= len(saved["finalists"]) - 1
    assert not (after.path / "refused.cubin").exists()


@pytest.mark.parametrize(("name", "called"), [("current", "present"), ("best", "best")])
def test_a_search_at_a_schedule_that_is_refused_now_cannot_go_on(
    name: str, called: str, run: Run, source: Source, space: ScheduleSpace
) -> None:
    path = run.path / "checkpoint.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: space.dump(hasty(space))}))
    with pytest.raises(BadRun, match=f"the {called} schedule .* start the run anew"):
        resumed(run, source)
