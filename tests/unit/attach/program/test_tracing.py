"""The trace of a few steps, taken by PyTorch's profiler on a CPU."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from nostall.attach.program import session, tracing  # noqa: E402
from nostall.attach.program.tracing import Trace, trace_obstacle  # noqa: E402
from nostall.optimizing.device_time import OPTIMIZER, traced  # noqa: E402
from nostall.optimizing.job import Options  # noqa: E402
from tests.unit.attach.program.test_session import Program  # noqa: E402


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    """A program whose facts say that it runs on a GPU."""
    gc.collect()
    facts = session.Session._facts
    monkeypatch.setattr(session.Session, "_facts", lambda *a: {**facts(*a), "cuda": True})
    monkeypatch.setattr(tracing, "Trace", lambda path: Trace(path, ["CPU"]))
    program = Program(tmp_path)
    program.session.settings = {**program.session.settings, "trace": True}
    yield program
    program.session.segments.remove()


def test_the_trace_has_the_steps_and_those_of_the_optimiser(program: Program) -> None:
    program.run(9)
    assert not program.events("watched")
    program.run(6)
    (watched,) = program.events("watched")
    names = [e["name"] for e in json.loads(Path(watched["trace_file"]).read_text())["traceEvents"]]
    assert len({n for n in names if n.startswith("ProfilerStep#")}) == session.TRACED
    assert sum(n.startswith(OPTIMIZER) for n in names) == session.TRACED
    assert watched["obstacle"] == "" and watched["calls"] == 1
    assert len(watched["steps"]) == 6 and watched["mean_seconds"] > 0
    events = json.loads(Path(watched["trace_file"]).read_text())["traceEvents"]
    named = {e["args"].get("External id"): e["name"] for e in events if e.get("cat") == "cpu_op"}
    assert {named[number] for number in watched["padded"]} == {
        "aten::addmm",
        "aten::mm",
    }  # one output
    assert "ran on a GPU" in traced(watched)["obstacle"]


def test_a_trace_of_other_work_gives_no_bound(program: Program) -> None:
    program.run(10)
    program.model(torch.ones(4, 8))  # an evaluation between two steps
    program.run(5)
    (watched,) = program.events("watched")
    assert "other work" in watched["trace_obstacle"] and watched["trace_file"] is None


def test_products_with_aligned_shapes_are_not_padded(tmp_path: Path) -> None:
    for sizes, dtype, expected in (
        ((16, 16, 16), torch.bfloat16, 0), ((16, 12, 16), torch.bfloat16, 1),
        ((16, 12, 16), torch.float32, 0), ((16, 13, 16), torch.float32, 1),
        ((16, 1, 16), torch.float32, 1), ((16, 16, 1), torch.float32, 0),
        ((16, 63, 1), torch.float32, 1),
    ):  # fmt: skip
        trace = Trace(str(tmp_path / "t.json"), ["CPU"])
        torch.ones(sizes[:2], dtype=dtype) @ torch.ones(sizes[1:], dtype=dtype)
        trace.step(last=True)
        assert len(trace.write()) == expected


def test_the_programs_own_profiler_is_left_alone(program: Program) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        assert trace_obstacle() == "a profiler of the program runs"
        program.run(12)
    (watched,) = program.events("watched")
    assert watched["trace_file"] is None and "a profiler" in watched["trace_obstacle"]
    assert any("addmm" in event.key for event in own.key_averages())
    assert trace_obstacle() == "the program has a profiler of its own"
    del own
    gc.collect()
    assert trace_obstacle() == ""


def test_nothing_is_traced_where_steps_are_measured_later(program: Program) -> None:
    program.session.settings = {**program.session.settings, "trace": False}
    program.run(12)
    (watched,) = program.events("watched")
    assert watched["trace_file"] is None and "after all attempts" in watched["trace_obstacle"]
    assert Options(dry_run=True).settings["trace"] and not Options().settings["trace"]
    program.order(do="trace", changes=[])  # after all attempts
    program.run(5)
    (done,) = program.events("done")
    names = [e["name"] for e in json.loads(Path(done["trace_file"]).read_text())["traceEvents"]]
    assert len({n for n in names if n.startswith("ProfilerStep#")}) == session.TRACED
    assert not torch._C._autograd._profiler_enabled() and len(program.events("watched")) == 1


def test_the_end_stops_a_trace(program: Program) -> None:
    program.run(10)
    assert torch._C._autograd._profiler_enabled()
    program.order(do="end", arm=[], exit=False)
    program.run(1)
    assert not torch._C._autograd._profiler_enabled() and program.events("ended")


def test_a_program_that_ends_while_it_is_traced_was_watched(program: Program) -> None:
    program.run(10)
    program.session.at_exit()
    (watched,) = program.events("watched")
    assert watched["trace_obstacle"] == "the program ended before"
    assert not torch._C._autograd._profiler_enabled()


def test_a_profiler_that_fails_ends_no_watch(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("CUPTI is not allowed")

    monkeypatch.setattr(Trace, "write", fail)
    program.run(14)
    (watched,) = program.events("watched")
    assert "CUPTI is not allowed" in watched["trace_obstacle"]
    assert not torch._C._autograd._profiler_enabled()
