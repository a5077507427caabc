"""The stages of the job, with a program whose answers are made up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nostall.optimizing import job
from nostall.optimizing import program as program_module
from nostall.optimizing.earlier import command_files, read_earlier
from nostall.optimizing.program import Program, TimeIsUp, written_files
from nostall.optimizing.result import Result
from tests.unit.optimizing.test_diagnosis import facts
from tests.unit.optimizing.test_earlier import written

SPEEDS = {"torch.compile": 1.3, "fused optimiser": 1.2, "foreach optimiser": 1.0, "TF32": 1.5,
          "back end nostall": 1.0, "CUDA graphs": 1.0}  # fmt: skip


class Answers:
    """A program that runs as fast as its changes say."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw, self.orders, self.asked = raw, 0, list[tuple[str, tuple[str, ...]]]()
        self.trace: Mapping[str, Any] = {"obstacle": "the program has a profiler of its own"}

    def clock(self) -> float:
        return 0.0

    def wait_watched(self, until: float = 0.0) -> Mapping[str, Any]:
        return self.raw

    def ranks_agree(self, number: int | None = None) -> bool:
        return True

    def ask(self, until: float, **order: Any) -> list[Mapping[str, Any]]:
        self.orders += 1
        if order["do"] == "trace":
            return [{"event": "done", "trace": self.trace}]
        names = [order["name"]] if order["do"] == "check" else order.get("arm", order.get("arms"))
        self.asked.append((order["do"], tuple(map(str, names))))
        if order["do"] == "check":
            return [{"event": "done", "refusal": "", "result_class": "within rounding"}]
        if order["do"] == "warm":
            return [{"event": "done", "failures": []}]
        return [*self._blocks(order), {"event": "done"}]

    def _blocks(self, order: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        events = []
        for at, arm in enumerate(order["blocks"]):
            seconds = float(order["steps"]) * (1 + 0.002 * (at * 7 % 5))
            for name in order["arms"][arm]:
                seconds /= SPEEDS[name]
            steps = [(1, None, False)] * order["steps"]
            events.append({"event": "block", "arm": arm, "seconds": seconds, "steps": steps,
                           "compiled": False, "failures": []})  # fmt: skip
        return events


def run(
    raw: Mapping[str, Any], earlier: Any = None, **options: Any
) -> tuple[Result, Answers, list[int]]:
    """The result, the program that was asked, and how many attempts were saved each time."""
    result, saved = Result(["python"]), list[int]()
    program = Answers({**raw, "main_thread": True})
    stages = job._Job(
        program,  # type: ignore[arg-type]
        job.Options(**options), lambda line: None, result,
    )  # fmt: skip
    stages.save, stages.earlier = (lambda r: saved.append(len(r.attempts))), earlier
    stages.run()
    return result, program, saved


def test_gains_are_kept_and_saved_one_by_one() -> None:
    result, program, saved = run(facts(flags=["fused"]).raw)
    assert [attempt.level.name for attempt in result.kept] == ["torch.compile", "fused optimiser"]
    assert saved == [1, 2]
    assert result.together is not None and result.together.comparison is not None
    assert result.together.comparison.ratio == pytest.approx(1.56, rel=0.01)
    assert ("check", ("torch.compile",)) in program.asked


def test_what_a_kept_change_includes_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = {**facts(cuda=True).raw, "keeps_gradients": False}
    monkeypatch.setitem(SPEEDS, "CUDA graphs", 2.0)
    result, program, _ = run(raw, minutes=1e6)
    tried = [names[0] for what, names in program.asked if what == "check"]
    assert tried[0] == "CUDA graphs" and not {"torch.compile", "back end nostall"} & set(tried)
    assert "not tried: torch.compile, because CUDA graphs includes it" in result.notes
    assert result.attempts[0].proof is not None and result.attempts[0].proof.pairs == 8
    monkeypatch.setitem(SPEEDS, "CUDA graphs", 1.1)
    _, program, _ = run(raw, minutes=1e6)
    assert ("check", ("back end nostall",)) in program.asked


def test_what_was_tried_is_not_tried_again(tmp_path: Path) -> None:
    made = written(tmp_path)  # torch.compile was dropped, the fused optimiser is kept
    earlier = read_earlier(tmp_path, made.command, None)
    result, program, saved = run(facts().raw, earlier)
    assert not any(what == "check" for what, _ in program.asked) and saved == []
    assert [attempt.level.name for attempt in result.kept] == ["fused optimiser"]
    assert result.together is not None and result.together.faster  # measured in this run
    more = {**facts(flags=["fused", "foreach"]).raw, "flags": ["foreach"]}
    result, program, saved = run(more, earlier)
    assert ("check", ("foreach optimiser",)) in program.asked
    assert result.kept == [] and saved == [2]


def test_numbers_change_only_if_it_is_allowed() -> None:
    raw = facts(cuda=True).raw
    result, _, _ = run(raw, minutes=1e6)
    assert "TF32" not in [attempt.level.name for attempt in result.attempts]
    result, _, _ = run(raw, minutes=1e6, allow_numerics=True)
    assert result.attempts[-1].level.name == "TF32"


def traced_afterwards(without_both: float) -> Result:
    """A run on a GPU whose trace after all attempts leaves so much of a step of one second."""
    result = Result(["python"])
    program = Answers({**facts(flags=["fused"], cuda=True).raw, "main_thread": True})
    program.trace = {
        "obstacle": "", "steps": 3, "step": 1.1, "busy": 0.9, "pointwise": 0.1, "optimizer": 0.3,
        "without_compile": without_both, "without_optimizer": 0.6, "without_both": without_both,
    }  # fmt: skip
    job._Job(program, job.Options(minutes=1e6), lambda line: None, result).run()  # type: ignore[arg-type]
    return result


def test_bounds_follow_from_a_trace_after_all_attempts() -> None:
    result = traced_afterwards(0.5)
    levels = {level.name: level for level in result.levels}
    assert levels["torch.compile"].bound == pytest.approx(2.0, rel=0.02)
    assert "idle" in levels["torch.compile"].reason
    assert next(level.name for level in result.levels if level.change) == "CUDA graphs"
    assert not any("error of nostall" in note for note in result.notes)


def test_a_gain_above_its_bound_is_reported_as_an_error() -> None:
    result = traced_afterwards(0.9)
    assert any(
        note.startswith("torch.compile gains 1.29") and "error of nostall" in note
        for note in result.notes
    )


@pytest.mark.parametrize("host", [1.0, 0.4])
def test_bounds_are_of_the_original_if_the_time_is_up(
    host: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later attempts run on top of kept ones, and the host may be faster than in the watch."""
    monkeypatch.setitem(SPEEDS, "CUDA graphs", 2.9)
    compare = job._Job._compare
    monkeypatch.setattr(
        job._Job, "_compare",
        lambda self, *a: replace(found := compare(self, *a),
                                 seconds=tuple(host * s for s in found.seconds)),
    )  # fmt: skip

    def ends(_: Any) -> None:
        raise TimeIsUp

    monkeypatch.setattr(job._Job, "_together", ends)
    result = Result(["python"])
    raw = facts(flags=["fused"], cuda=True).raw
    parts = {**raw["parts"], "loader": [0.3 for _ in raw["parts"]["loader"]]}
    program = Answers({**raw, "parts": parts, "main_thread": True, "keeps_gradients": False})
    program.trace = {
        "obstacle": "", "steps": 3, "step": 1.1, "busy": 0.3 * host, "pointwise": 0.1 * host,
        "optimizer": 0.1 * host, "without_compile": 0.1 * host, "without_optimizer": 0.2 * host,
        "without_both": 0.1 * host,
    }  # fmt: skip
    stages = job._Job(program, job.Options(minutes=1e6), lambda line: None, result)  # type: ignore[arg-type]
    with pytest.raises(TimeIsUp):
        stages.run()
    levels = {level.name: level for level in result.levels}
    assert [attempt.level.name for attempt in result.kept] == ["CUDA graphs", "fused optimiser"]
    assert levels["CUDA graphs"].bound == pytest.approx(1 / 0.3, rel=0.05)
    assert not any("error of nostall" in note for note in result.notes)


def test_a_bound_beside_other_changes_is_of_the_shorter_step() -> None:
    assert job.bound_over(1.0, 1.25) == pytest.approx(1.25)
    assert job.bound_over(2.0, 1.25) == pytest.approx(1 / 0.6)
    assert job.bound_over(6.0, 1.25) is None and job.bound_over(2.0, None) is None


def test_files_of_a_command_are_compared_by_content(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("1")
    one = command_files(["python", str(path), "--x"])
    path.write_text("2")
    assert list(one) == [str(path)] and one != command_files(["python", str(path), "--x"])


def test_files_in_the_scratch_folder_are_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is removed with them."""
    (tmp_path / "work").mkdir()
    (tmp_path / "scratch").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    (tmp_path / "scratch" / "model.pt").write_text("")
    program: Any = SimpleNamespace(command=["python", str(tmp_path / "scratch")], began=0.0)
    program.scratch = tmp_path / "scratch"
    assert written_files(program) == []
    program.scratch = tmp_path / "other"
    assert written_files(program) == [str(tmp_path / "scratch" / "model.pt")]


def test_files_of_the_command_itself_are_not_those_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "optimized"
    own.mkdir()
    (own / "result.json").write_text("{}")
    (tmp_path / "model.pt").write_text("")
    (tmp_path / "latest").symlink_to(tmp_path / "gone")
    program: Any = SimpleNamespace(
        command=["python", "train.py", str(tmp_path / "scratch")], began=0.0,
        scratch=tmp_path / "scratch",
    )  # fmt: skip
    assert written_files(program, Path("optimized")) == [str(tmp_path / "model.pt")]
    # What `> model.pt` makes of the command is no file of the program either.
    log = (tmp_path / "model.pt").stat()
    monkeypatch.setattr(program_module.os, "fstat", lambda _: log)
    assert written_files(program, Path("optimized")) == []


@pytest.mark.parametrize("value", [1.0, math.nan, math.inf])
def test_parameters_that_diverged_are_equal_on_all_ranks(value: float) -> None:
    program = object.__new__(Program)
    watched = {"event": "watched", "checksum": [1.0, value]}
    program.events = [watched, dict(watched)]
    assert program.ranks_agree()
    program.events = [watched, {"event": "watched", "checksum": [1.0, 2.0]}]
    assert not program.ranks_agree()


class Ending(Answers):
    """A program whose time is over; Ctrl-C comes while it ends."""

    events: Sequence[Any] = ()
    exit_code = 0
    process, was_killed, was_ended = SimpleNamespace(returncode=0), False, True
    was_interrupted = hears_ctrl_c = False

    def __init__(self, *_: Any) -> None:
        super().__init__({**facts().raw, "main_thread": True})
        self.ends = 0

    def __enter__(self) -> Ending:
        return self

    def __exit__(self, *_: object) -> None: ...

    def ask(self, until: float, **order: Any) -> list[Mapping[str, Any]]:
        if self.orders:
            raise TimeIsUp
        return super().ask(until, **order)

    def end(self, *, exits: bool) -> None:
        self.ends += 1
        if self.ends == 1:
            raise KeyboardInterrupt


def test_an_interrupt_while_the_program_ends_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "Program", Ending)
    monkeypatch.setattr(job, "written_files", lambda *_: [])
    monkeypatch.setattr(job, "_recorded", lambda program, _: program)
    result = job.optimize(["python"], job.Options(), lambda line: None)
    assert result.interrupted and job.INTERRUPTED in result.notes
    assert "--minutes 10 are over: more were to be tried" in result.notes
