"""Run directories: round trips, logs cut off by a kill, and invalid files."""

import dataclasses
import json
import math
import multiprocessing
import os
import subprocess
import sys

import pytest

from nostall.core import BadRun, Checkpoint, Run, Trial
from nostall.core.files.atomic import remove_abandoned, write_atomically

TRIALS = [
    Trial(0, 1.0, True, 1.0, "start", 0, 0.0),
    Trial(1, 0.5, True, 0.5, 'slide("a", 1), twice', 3, 0.125),
    Trial(2, math.inf, False, 0.5, "two\nlines", 4, 0.25, "illegal address, at 0x10"),
    Trial(3, 0.1 + 0.2, False, 0.1, "x", 4, 1 / 3),
]
CHECKPOINT = Checkpoint(
    "anneal", 7, 4, 1, "a", 0.5, "b", 0.1, {"state": {"state": 2**127 + 1, "inc": 3}}, {"t": 0.1}
)


def write_log(path, trials):
    run = Run.create(path, "tune", {"seed": 1})
    with run:
        for trial in trials:
            run.on_trial(trial)
    return path / "trials.csv"


def test_an_opened_run_equals_the_written_one(tmp_path):
    write_log(tmp_path / "run", TRIALS)
    run = Run.open(tmp_path / "run")
    assert list(run.trials()) == TRIALS
    assert run.record.settings == {"seed": 1}
    assert run.record.status == "running"
    assert run.checkpoint() is None
    run.on_checkpoint(CHECKPOINT)
    run.finish("done", {"ratio": 1.5})
    reopened = Run.open(tmp_path / "run")
    assert reopened.checkpoint() == CHECKPOINT
    assert (reopened.record.status, reopened.record.result) == ("done", {"ratio": 1.5})


def test_a_log_cut_at_any_byte_loses_at_most_the_last_row(tmp_path):
    log = write_log(tmp_path / "run", TRIALS)
    content = log.read_bytes()
    ends = [
        write_log(tmp_path / str(count), TRIALS[:count]).stat().st_size
        for count in range(1, len(TRIALS) + 1)
    ]
    run = Run.open(tmp_path / "run")
    for length in range(len(content)):
        log.write_bytes(content[:length])
        trials = list(run.trials())
        assert len(trials) >= sum(end <= length for end in ends)
        # Only the failure text and the move of a cut row may differ from the original.
        for trial, original in zip(trials, TRIALS, strict=False):
            assert dataclasses.replace(trial, failure=None, move="") == dataclasses.replace(
                original, failure=None, move=""
            )


def test_logging_continues_after_a_cut_row(tmp_path):
    log = write_log(tmp_path / "run", TRIALS[:2])
    content = log.read_bytes()
    for length in range(len(content)):
        log.write_bytes(content[:length])
        with Run.open(tmp_path / "run") as run:
            for trial in TRIALS:
                run.on_trial(trial)
            run.on_checkpoint(CHECKPOINT)
            assert list(run.trials()) == TRIALS


def test_logging_continues_after_a_run_is_finished_or_left(tmp_path):
    run = Run.create(tmp_path / "run", "tune", {"seed": 1})
    with run:
        run.on_trial(TRIALS[0])
        run.finish("interrupted", {})
        run.restart({"seed": 1})
        run.on_trial(TRIALS[1])
    with run:
        run.on_trial(TRIALS[2])
    assert list(Run.open(run.path).trials()) == TRIALS[:3]


def test_a_trial_logged_twice_counts_once(tmp_path):
    write_log(tmp_path / "run", [*TRIALS, dataclasses.replace(TRIALS[1], value=0.4)])
    trials = list(Run.open(tmp_path / "run").trials())
    assert [trial.index for trial in trials] == [0, 1, 2, 3]
    assert trials[1].value == 0.4


def test_trials_are_on_disk_after_a_checkpoint_without_closing(tmp_path):
    run = Run.create(tmp_path / "run", "tune", {})
    run.on_trial(TRIALS[0])
    run.on_checkpoint(CHECKPOINT)
    assert list(Run.open(tmp_path / "run").trials()) == TRIALS[:1]
    run.finish("interrupted", {})


def test_a_second_run_in_the_same_directory_is_rejected(tmp_path):
    Run.create(tmp_path, "tune", {})
    with pytest.raises(BadRun, match="already holds a run"):
        Run.create(tmp_path, "tune", {})


def test_a_path_that_cannot_be_a_directory_is_rejected(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadRun, match=r"cannot write .* a writable directory with --out"):
        Run.create(tmp_path / "file" / "run", "tune", {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "run.json"),
        (b"\xff", "not a run directory"),
        (b"{}", "command"),
        (b'{"schema_version": 9}', "schema_version"),
    ],
)
def test_an_invalid_run_file_is_rejected(tmp_path, text, message):
    (tmp_path / "run.json").write_bytes(text)
    with pytest.raises(BadRun, match=message):
        Run.open(tmp_path)


def test_a_missing_run_is_rejected(tmp_path):
    with pytest.raises(BadRun, match="not a run directory"):
        Run.open(tmp_path / "none")


@pytest.mark.parametrize("text", ["", "[1]", '{"seed": 1}', json.dumps({"other": 1})])
def test_an_invalid_checkpoint_is_rejected(tmp_path, text):
    run = Run.create(tmp_path, "tune", {})
    (tmp_path / "checkpoint.json").write_text(text)
    with pytest.raises(BadRun, match=r"checkpoint\.json"):
        run.checkpoint()


def test_a_checkpoint_of_version_1_is_read_with_the_names_of_version_2(tmp_path):
    run = Run.create(tmp_path, "tune", {})
    saved = Checkpoint("anneal", 0, 5, 0, "s", 1.0, "s", 1.0, {}, {"walked": 3.0, "phase": 2.0})
    content = {**dataclasses.asdict(saved)}
    (tmp_path / "checkpoint.json").write_text(json.dumps(content))
    loaded = run.checkpoint()
    assert loaded == dataclasses.replace(saved, memory={"steps": 3.0, "phase": 2.0})
    run.on_checkpoint(loaded)
    assert json.loads((tmp_path / "checkpoint.json").read_text())["version"] == 2
    assert run.checkpoint() == loaded


def test_a_checkpoint_of_a_later_version_is_rejected(tmp_path):
    run = Run.create(tmp_path, "tune", {})
    (tmp_path / "checkpoint.json").write_text('{"version": 3, "memory": {}}')
    with pytest.raises(BadRun, match="version is 3; allowed are 1 and 2"):
        run.checkpoint()


def test_an_atomic_write_replaces_all_or_nothing(tmp_path, monkeypatch):
    target = tmp_path / "out"
    write_atomically(target, b"old")

    def fail(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(BadRun, match="No space left"):
        write_atomically(target, b"new")
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_atomic_write_to_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(BadRun, match="cannot write"):
        write_atomically(tmp_path / "none" / "out", b"x")


def test_an_interrupted_write_leaves_no_temporary_file(tmp_path, monkeypatch):
    write_atomically(tmp_path / "file", b"old")

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "file", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"


WRITES = 40


def write_often(path, box):
    """Write checkpoints into a run, without its lock; puts the error, or an empty text."""
    run = Run.open(path)
    try:
        for _ in range(WRITES):
            run.write("checkpoint.json", b"x" * 100_000)
        box.put("")
    except BadRun as error:
        box.put(str(error))


def test_files_that_a_living_process_writes_are_not_swept(tmp_path):
    Run.create(tmp_path, "tune", {})
    box = multiprocessing.get_context("spawn").Queue()
    writer = multiprocessing.get_context("spawn").Process(target=write_often, args=(tmp_path, box))
    writer.start()
    sweeps = 0
    while box.empty():
        remove_abandoned(tmp_path)
        sweeps += 1
    assert box.get(timeout=30) == ""
    writer.join()
    assert sweeps > WRITES


def test_files_of_a_killed_process_are_swept_and_others_kept(tmp_path):
    kept = {".env.template", ".notes.json.deadbeef", "x.partial"}
    for name in (*kept, ".run.json.0123abcd.partial"):
        (tmp_path / name).write_text("")
    with Run.create(tmp_path, "tune", {}):
        assert {path.name for path in tmp_path.iterdir()} == kept | {"run.json", "lock"}


def test_one_process_writes_a_run(tmp_path):
    with Run.create(tmp_path / "run", "tune", {}):
        message = rf"being written by process {os.getpid()} on "
        with pytest.raises(BadRun, match=message), Run.open(tmp_path / "run"):
            pass
        assert Run.open(tmp_path / "run").record.status == "running"  # readers need no lock
    with Run.open(tmp_path / "run"):
        pass


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    Run.create(tmp_path, "tune", {})
    program = (
        "import sys, time; from pathlib import Path; from nostall.core import Run\n"
        "run = Run.open(Path(sys.argv[1])); run.__enter__(); print('in', flush=True)\n"
        "time.sleep(60)"
    )
    arguments = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "in\n"
        with pytest.raises(BadRun, match=f"process {process.pid}"), Run.open(tmp_path):
            pass
        process.kill()
    with Run.open(tmp_path):
        pass


def test_the_lock_is_not_followed_through_a_link(tmp_path):
    Run.create(tmp_path / "run", "tune", {})
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "run" / "lock").unlink()
    (tmp_path / "run" / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(BadRun, match="cannot write"), Run.open(tmp_path / "run"):
        pass
    assert (tmp_path / "precious").read_text() == "mine"
