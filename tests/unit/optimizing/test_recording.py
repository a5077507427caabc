"""Recorded runs: the same result follows from their samples, and changed ones are refused."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nostall.core.errors import BadInput
from nostall.optimizing import job
from nostall.optimizing.program import ProgramEnded, TimeIsUp
from nostall.optimizing.recording import (
    RECORDING_FILE,
    Entry,
    Recorder,
    read_recording,
    write_recording,
)
from nostall.optimizing.result import Result
from tests.docs.tutorial import ROOT
from tests.unit.optimizing.test_diagnosis import facts
from tests.unit.optimizing.test_job import Answers


def recorded(folder: Path, *, ends: type[Exception] | None = None, again: bool = False) -> Result:
    """A recording of a run with made-up answers, in ``folder``."""
    raw = {**facts(flags=["fused"]).raw, "main_thread": True}
    program = Answers(raw)
    asked = program.ask

    def ask(until: float, **order: Any) -> Any:
        if ends is not None and program.orders == 4:
            raise ends("the program ended") if ends is ProgramEnded else ends
        return asked(until, **order)

    program.ask = ask  # type: ignore[method-assign]
    options, result, starts = job.Options(again=again), Result(["python", "x.py"]), []
    try:
        job._Job(job._recorded(program, starts), options, print, result).run()  # type: ignore[arg-type]
    except TimeIsUp:
        result.notes.append(job._time_is_up(options))
    except ProgramEnded:
        result.notes.append("the program ended before all levels were tried")
    job._settle(result)
    if again:
        job._confirm(job._recorded(Answers(raw), starts), options, print, result)  # type: ignore[arg-type]
    result.notes.append("files changed, such as log.txt")
    write_recording(starts, options, result, folder)
    return result


def replayed(folder: Path) -> Result:
    return job.replay(read_recording(folder / RECORDING_FILE), lambda line: None)


SHIPPED = sorted((ROOT / "examples" / "recordings").glob("*.program.json.gz"))
"""Runs on a GPU that `make run` and a tutorial replay."""


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_recordings_are_replayed(path: Path, tmp_path: Path) -> None:
    recording = read_recording(path)
    found = job.replay(recording, lambda line: None)
    assert found.kept and found.together is not None and found.together.faster
    assert found.together.comparison is not None
    assert recording.result["together"]["ratio"] == pytest.approx(found.together.comparison.ratio)
    assert recording.result["device"].startswith("NVIDIA")

    (tmp_path / RECORDING_FILE).write_bytes(path.read_bytes())
    changed(tmp_path, faster)
    with pytest.raises(BadInput, match="its samples give"):
        replayed(tmp_path)


def changed(folder: Path, change: Callable[[Any], None]) -> None:
    path = folder / RECORDING_FILE
    document = json.loads(gzip.decompress(path.read_bytes()))
    change(document)
    path.write_bytes(gzip.compress(json.dumps(document).encode()))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("ends", [None, TimeIsUp, ProgramEnded])
def test_the_same_result_follows(ends: type[Exception] | None, again: bool, tmp_path: Path) -> None:
    result = recorded(tmp_path, ends=ends, again=again and ends is None)
    found = replayed(tmp_path)
    assert found.kept and found.notes[-1].startswith("replayed from a recording")
    assert found.notes[:-1] == result.notes
    document, expected = found.as_json(), result.as_json()
    assert json.dumps({**document, "notes": []}) == json.dumps({**expected, "notes": []})


def blocks(document: Any) -> list[Any]:
    return [event for entry in document["starts"][0] if entry["what"] == "ask"
            for event in entry["answer"] if event["event"] == "block"]  # fmt: skip


def faster(document: Any) -> None:
    """Someone's samples, with the verdicts as they were."""
    for block in blocks(document)[:24]:
        block["seconds"] *= 0.9 if block["arm"] == 1 else 1.0


def better(document: Any) -> None:
    document["result"]["together"]["ratio"] = 9.0


def kept(document: Any) -> None:
    document["result"]["attempts"][0]["outcome"] = "dropped"


def other_order(document: Any) -> None:
    entry = next(e for e in document["starts"][0] if e["what"] == "ask" and "arms" in e["question"])
    entry["question"]["blocks"].reverse()


def no_seconds(document: Any) -> None:
    del blocks(document)[0]["seconds"]


def wider_bound(document: Any) -> None:
    document["starts"][0][0]["answer"]["parts"]["forward"] = [0.35] * 20


def other_device(document: Any) -> None:
    document["starts"][0][0]["answer"]["device"] = "CPU other"


def other_step(document: Any) -> None:
    document["result"]["step"] = "loop:step"


def more_entries(document: Any) -> None:
    document["starts"][0].append(document["starts"][0][-1])


def other_note(document: Any) -> None:
    document["options"]["allow_numerics"] = True
    document["starts"][0][0]["answer"]["main_thread"] = False


def fewer_blocks(document: Any) -> None:
    entry = next(e for e in document["starts"][0] if (e["question"] or {}).get("do") == "blocks")
    entry["answer"].pop(0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (fewer_blocks, "is not one of a program"),
        (faster, "attempts.0.* its samples give"),
        (better, "together.ratio is 9.0 in the recording"),
        (kept, 'attempts.0.outcome is "dropped" in the recording'),
        (other_order, "the job asks"),
        (no_seconds, "is not one of a program"),
        (wider_bound, "levels.0"),
        (other_device, "device is .* in the recording"),
        (other_step, "step is .* in the recording"),
        (lambda document: document["result"].update(more=1), "more is 1 in the recording"),
        (lambda document: document["result"].update(nostall="0.0.1"), "nostall is"),
        (more_entries, "and 1 more follow"),
        (other_note, "which the recording lacks"),
        (lambda document: document.update(schema_version=2), "schema_version"),
        (lambda document: document["options"].update(minutes="long"), "is not one of a program"),
        (lambda document: document["options"].update(hook="x"), "is not one of a program"),
        (lambda document: document["starts"].clear(), "is not one of a program"),
    ],
)
def test_changed_recordings_are_refused(
    change: Callable[[Any], None], reason: str, tmp_path: Path
) -> None:
    recorded(tmp_path)
    changed(tmp_path, change)
    with pytest.raises(BadInput, match=reason):
        replayed(tmp_path)


def test_an_interrupted_run_ends_where_it_was_interrupted(tmp_path: Path) -> None:
    result = recorded(tmp_path)

    def cut(document: Any) -> None:
        starts = document["starts"][0]
        last = max(at for at, entry in enumerate(starts) if entry["what"] == "ask")
        del starts[last:]  # measured together
        document["result"]["together"] = None
        document["result"]["notes"] = [
            "the kept changes were measured one after the other, not together"
        ]

    changed(tmp_path, cut)
    with pytest.raises(BadInput, match="together is null in the recording"):
        replayed(tmp_path)  # the product of the gains follows
    assert result.together is not None


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("{}")
    for name in (path, tmp_path / "missing"):
        with pytest.raises(BadInput, match="--replay: cannot read"):
            read_recording(name)
    path.write_bytes(gzip.compress(b'{"format": 1}'))
    with pytest.raises(BadInput, match="is no recording"):
        read_recording(path)
    path.write_bytes(gzip.compress(b"{}" * 1000)[:-9])
    with pytest.raises(BadInput, match="--replay: "):
        read_recording(path)


def test_a_recorder_keeps_the_end_of_a_program() -> None:
    class Ends:
        orders = 0

        def ask(self, until: float, **order: Any) -> Any:
            raise ProgramEnded("it crashed")

    recorder = Recorder(Ends())  # type: ignore[arg-type]
    with pytest.raises(ProgramEnded):
        recorder.ask(0.0, do="warm")
    assert recorder.entries == [Entry(what="ask", question={"do": "warm"}, ended="it crashed")]


@pytest.mark.parametrize(
    ("key", "value"),
    [("command", 7), ("notes", "x"), ("files_written_while_watched", 7), ("program_exit_code", "a"),
     ("command_files", None)],
)  # fmt: skip
def test_what_is_taken_over_has_its_type(key: str, value: Any, tmp_path: Path) -> None:
    recorded(tmp_path)
    path = tmp_path / RECORDING_FILE
    document = json.loads(gzip.decompress(path.read_bytes()))
    document["result"][key] = value
    path.write_bytes(gzip.compress(json.dumps(document).encode()))
    with pytest.raises(BadInput, match=f"--replay: .*{key}"):
        replayed(tmp_path)
