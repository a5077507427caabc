"""Programs around vLLM: starts that take turns, with made-up answers of each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nostall.attach.program.machine import cpu_name
from nostall.attach.program.start import VARIABLE
from nostall.attach.vllm import calls
from nostall.attach.vllm.calls import Engines, decode_reads
from nostall.core.errors import BadInput
from nostall.optimizing import job
from nostall.optimizing.bundle import bundle_environment, read_bundle, write_bundle
from nostall.optimizing.earlier import Earlier
from nostall.optimizing.engine import ARGUMENT, distance, engine_levels
from nostall.optimizing.page import write_page
from nostall.optimizing.program import ProgramEnded, TimeIsUp
from nostall.optimizing.recording import read_recording, write_recording
from nostall.optimizing.result import Result
from tests.unit.optimizing.test_diagnosis import facts

SPEEDS = {"enable_prefix_caching": 1.5, "max_num_seqs": 0.9, "async_scheduling": 1.001}


def places(shift: float = 0.0, token: int = 3) -> list[Any]:
    """Two generated tokens of one sequence, with logarithms of probabilities."""
    return [[[token, {"3": -0.1 + shift, "4": -2.5, "5": -4.0}], [4, {"4": -0.2, "3": -3.0}]]]


def engine(**changes: Any) -> dict[str, Any]:
    """What a start shows."""
    return {
        "vllm": "0.25.1", "cuda": False, "device": cpu_name(), "model": ["Llama"], "world": 1,
        "model_digest": "c" * 64,
        "backend": None, "eager": False, "async_scheduling": False, "prefix_caching": False,
        "most_sequences": 8, "most_batched": 4096, "largest_graph": 0, "cache_tokens": 10_000,
        "speculates": False, "given": {"async_scheduling": False}, "call": 0, "call_seconds": 1.0,
        "ready_seconds": 20.0,
        "sequences": 32, "prompt_tokens": 3200, "output_tokens": 320, "tokens": [1, 2],
        "reads": 1000.0, "reads_once": 600.0, "prompts": "ab", "problem": "",
        "samples": [[1.0, 320], [1.01, 320], [0.99, 320]],
        "check": {"batch": places(), "other batch": places(1e-6), "eps": 1.2e-7,
                  "repeated": [1, 2]},
        **changes,
    }  # fmt: skip


def watched(**changes: Any) -> dict[str, Any]:
    return {**facts(roots=["Llama"], optimizers=[], flags=[], step_is="one call").raw,
            "main_thread": True, "engine": engine(**changes)}  # fmt: skip


class Starts:
    """A program whose starts are as fast as their arguments say."""

    def __init__(self, **changes: Any) -> None:
        self.changes, self.asked = changes, list[tuple[str, ...]]()
        self.orders = 0
        self.settings: Mapping[str, Any] = {}

    def clock(self) -> float:
        return 0.0

    def wait_watched(self, until: float = 0.0) -> Mapping[str, Any]:
        arguments = self.settings.get("arguments", {})
        if self.settings:
            self.asked.append(tuple(arguments))
        speed = 1.0 + 0.001 * len(self.asked)
        for name in arguments:
            speed *= SPEEDS[name]
        samples = [[seconds / speed, 320] for seconds in (1.0, 1.01, 0.99)]
        changed = {name: each for name, each in self.changes.items() if arguments}
        return watched(**{"samples": samples, **changed})


def run(folder: Path | None = None, options: Any = None, **changes: Any) -> tuple[Result, Starts]:
    options = options or job.Options()
    program, result, starts = Starts(**changes), Result(["python", "g.py"]), list[Any]()
    stages = job._Job(job._recorded(program, starts), options, print, result)  # type: ignore[arg-type]

    def start(settings: Mapping[str, Any], until: float) -> Any:
        program.settings = settings
        return job._recorded(program, starts).wait_watched(until, settings)  # type: ignore[arg-type]

    stages._start_engine = start  # type: ignore[method-assign]
    stages.files = lambda: list(changes.get("files", []))
    stages.run()
    if folder is not None:
        write_recording(starts, options, result, folder)
    return result, program


def test_starts_take_turns_and_a_gain_is_kept() -> None:
    result, program = run()
    assert [a.level.name for a in result.kept] == ["prefix caching"]
    outcomes = {a.level.name: a.outcome for a in result.attempts}
    assert outcomes["more sequences"] == outcomes["asynchronous scheduling"] == "dropped"
    caching = ("enable_prefix_caching",)
    assert program.asked[:3] == [caching, (), caching]
    assert result.together is not None and result.together.comparison is not None
    assert result.together.comparison.ratio == pytest.approx(1.5, rel=0.01)
    assert "tokens of 100% of 32 sequences are equal" in result.attempts[0].reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"check": {"batch": places(0.01), "eps": 1.2e-7}}, "are off by"),
        ({"check": {"batch": places(token=5), "eps": 1.2e-7}}, None),
        ({"samples": [[0.5, 200]] * 3}, "generates 200 tokens"),
        ({"prompts": "other"}, "prompts differ from start to start"),
        ({"problem": "a repeated call fails"}, "a repeated call fails"),
    ],
)
def test_ways_to_look_faster_are_refused(changes: dict[str, Any], reason: str | None) -> None:
    result, _ = run(**changes)
    attempt = next(a for a in result.attempts if a.level.name == "prefix caching")
    if reason is None:  # another of tokens with equal probabilities may be chosen
        assert attempt.outcome == "kept"
    else:
        assert attempt.outcome == "refused" and reason in attempt.reason
        assert not result.kept


def test_a_less_probable_token_is_far_off() -> None:
    one, other = places()[0], [[5, {"5": -0.1, "4": -2.5, "9": -4.0}]]
    assert distance([one[:1]], [other])[0] > 2


def test_a_start_that_is_no_faster_refutes_the_others() -> None:
    program = Starts()
    slow = {"samples": [[1.0, 320], [1.01, 320], [0.99, 320]]}
    result = Result(["python"])
    stages = job._Job(program, job.Options(), print, result)  # type: ignore[arg-type]

    def start(settings: Mapping[str, Any], until: float) -> Any:
        program.settings = settings
        program.changes = slow if len(program.asked) == 2 else {}
        return program.wait_watched()

    stages._start_engine = start  # type: ignore[method-assign]
    stages.run()
    assert result.attempts[0].outcome == "refused"
    assert "a start with it is as slow as one without" in result.attempts[0].reason


def test_time_that_is_up_after_one_start_leaves_what_it_measured() -> None:
    result = Result(["python"])
    stages = job._Job(Starts(), job.Options(), print, result)  # type: ignore[arg-type]
    asked = []

    def start(settings: Mapping[str, Any], until: float) -> Any:
        asked.append(settings["batches"])
        if len(asked) == 2:
            raise TimeIsUp
        return watched(samples=[[0.5, 320], [0.51, 320], [0.49, 320]])

    stages._start_engine = start  # type: ignore[method-assign]
    with pytest.raises(TimeIsUp):
        stages.run()
    [attempt] = result.attempts
    assert attempt.outcome == "undecided" and not result.kept
    assert attempt.proof is not None and attempt.proof.comparison is not None
    assert attempt.proof.comparison.ratio == pytest.approx(2, rel=0.01)
    assert asked == [1, 0]  # probabilities are not generated again for the original
    document = json.loads(json.dumps(result.as_json()))
    earlier = Earlier.model_validate(document, strict=False)
    assert earlier.attempt(attempt.level) is None  # --resume tries it again


def test_programs_that_write_files_are_not_started_again_unasked() -> None:
    result, program = run(files=["out.txt"])
    assert not program.asked and "--again" in result.notes[-1]
    result, program = run(options=job.Options(run_to_end=True))
    assert not program.asked and "--run-to-end" in result.notes[-1]


def test_a_crash_refuses_one_change() -> None:
    result = Result(["python"])
    stages = job._Job(Starts(), job.Options(), print, result)  # type: ignore[arg-type]

    def start(settings: Mapping[str, Any], until: float) -> Any:
        raise ProgramEnded("the program ended")

    stages._start_engine = start  # type: ignore[method-assign]
    stages.run()
    assert {a.outcome for a in result.attempts} == {"refused"} and not result.kept


def test_a_replay_derives_the_same(tmp_path: Path) -> None:
    result, _ = run(tmp_path)
    found = job.replay(read_recording(tmp_path / "recording.json.gz"), print)
    assert found.together == result.together
    assert [a.reason for a in found.attempts] == [a.reason for a in result.attempts]


def test_a_bundle_has_engine_arguments_and_nothing_else(tmp_path: Path) -> None:
    result, _ = run()
    path = write_bundle(result, tmp_path / "bundle.json")
    variables = bundle_environment(read_bundle(path), path, {}, None)
    settings = json.loads(variables[VARIABLE])
    assert settings["engine"] == {
        "arguments": {"enable_prefix_caching": True}, "applied": ["prefix caching"],
        "vllm": "0.25.1", "model": "c" * 64,
    }  # fmt: skip
    assert "LLM(..., enable_prefix_caching=True)" in write_page(result, tmp_path / "p").read_text()
    path.write_text(path.read_text().replace("enable_prefix_caching=true", "worker_cls=os.system"))
    with pytest.raises(BadInput, match="no bundle"):
        read_bundle(path)
    assert not ARGUMENT.fullmatch("max_num_seqs=1; x")


def test_levels_name_why_they_are_not_tried() -> None:
    gpu = watched(cuda=True, largest_graph=512, most_sequences=1024, sequences=4000,
                  cache_tokens=10**6, given={"async_scheduling": None})  # fmt: skip
    found = {level.name: level for level in engine_levels(job.Facts(gpu))}
    attention, graphs = found["nostall attention"], found["larger CUDA graphs"]
    assert attention.change and attention.share == pytest.approx(0.4)
    assert graphs.change and graphs.change["value"] == "max_cudagraph_capture_size=1024"
    gpu["engine"] |= {"vllm": "0.32.0", "largest_graph": 2048}
    found = {level.name: level for level in engine_levels(job.Facts(gpu))}
    assert "it was run with 0.25" in found["nostall attention"].reason
    assert not found["larger CUDA graphs"].change and not found["CUDA graphs"].change


def test_shared_pages_are_read_once_by_the_longest() -> None:
    shared = list(range(32))
    total, once = decode_reads([[*shared, 1], [*shared, 2], [7] * 33], [10, 4, 2])
    assert total == 33 * 16 + (100 + 16 + 4) / 2
    assert once == total - 32 * 4


def test_a_repeated_call_has_the_messages_of_then() -> None:
    llm: Any = SimpleNamespace(prompts=[])
    engines: Any = Engines(SimpleNamespace(), {})  # type: ignore[arg-type]
    engines._ended = llm.prompts.append
    chat: Any = engines._noted(lambda llm, messages, tools=None: messages)
    messages = [[{"role": "user", "content": "a"}]]
    chat(llm, messages)
    chat(llm, messages=messages)
    messages[0].append({"role": "assistant", "content": "b"})
    first, second = llm.prompts
    assert [len(conversation) for conversation in first.args[0]] == [1]
    assert [len(conversation) for conversation in second.kwargs["messages"]] == [1]


def test_an_engine_of_another_model_has_its_own_arguments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class EngineArgs:
        max_num_seqs, max_num_batched_tokens = 256, None

        def create_engine_config(self) -> Any:
            self.max_num_batched_tokens = self.max_num_batched_tokens or 8 * self.max_num_seqs
            return self.max_num_seqs, self.max_num_batched_tokens

    settings = {"arguments": {"max_num_seqs": 1024}, "applied": ["more sequences"], "vllm": None,
                "model": "0" * 64}  # fmt: skip
    monkeypatch.setattr(calls, "model_digest", lambda config: "1" * 64)
    monkeypatch.setattr(calls, "vllm_version", lambda: None)
    session: Any = SimpleNamespace()
    Engines(session, settings).change_arguments(SimpleNamespace(EngineArgs=EngineArgs))  # type: ignore[arg-type]
    assert EngineArgs().create_engine_config() == (256, 2048)
    assert "the bundle is not applied" in capsys.readouterr().err
