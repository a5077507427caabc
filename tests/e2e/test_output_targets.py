"""Options that name an output: what they may name, and what they leave as it is."""

from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.cli import EXAMPLES, LAUNCH, ROOT, SMALL, Done, command, environment, error_line
from tests.e2e.cli import nostall_here as nostall
from tests.e2e.test_characterize import TABLE, TRACE
from tests.e2e.test_cli_plan import _graph
from tests.e2e.test_cli_sharding import CLUSTER, MODULE
from tests.unit.core.files.test_destination import device, names, read_in_background
from tests.unit.workload.trace_events import write

Words = tuple[object, ...]
OUTPUTS: dict[str, Callable[[Path], Words]] = {
    "characterize --report": lambda at: ("characterize", at / "jobs.csv", "--report"),
    "characterize traces": lambda at: ("characterize", at / "rank0.json", "--report"),
    "characterize --learn": lambda at: (
        "characterize", at / "rank0.json", "--kind", "x", "--learn",
    ),
    "plan --out": lambda at: (*_plan(at), "--out"),
    "plan --gantt": lambda at: (*_plan(at), "--gantt"),
    "simulate --out": lambda at: ("simulate", at / "plan.json", "--out"),
    "simulate --gantt": lambda at: ("simulate", at / "plan.json", "--gantt"),
    "sharding --picture": lambda at: (
        *_sharding(at), "--out", at / "sharding.json", "--export", at / "styles.py", "--picture",
    ),
    "serving batch --out": lambda at: (
        "serving", "batch", "--trace", ROOT / "tests/corpus/serving/azure_code.csv", "--out",
    ),
    "init --out": lambda at: ("init", SMALL, "--out"),
    "store export": lambda at: ("store", "export", "--modelled"),
}  # fmt: skip
"""Words of a command that ends with the option of its output."""
EXTENSIONS = {"plan --gantt": ".svg", "simulate --gantt": ".svg"}
"""Extensions that an option asks for; a stream cannot have them, but a link to it can."""


def _plan(at: Path) -> Words:
    cluster = EXAMPLES / "clusters" / "dapple-a-2x8.toml"
    return ("plan", at / "model-pbs-4.txt", "--cluster", cluster, "--planner", "dapple")


def _sharding(at: Path) -> Words:
    words = ("--cluster", at / "two.toml", "--planner", "sharding", "--mesh", "2")
    return ("plan", f"{at / 'train.py'}:build", *words, "--global-batch", "4")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Input files of all commands, and a store with a record."""
    at = tmp_path_factory.mktemp("inputs")
    (at / "jobs.csv").write_text(TABLE)
    write(at / "rank0.json", TRACE)
    (at / "model-pbs-4.txt").write_text(_graph())
    (at / "train.py").write_text(MODULE)
    (at / "two.toml").write_text(CLUSTER.format(memory=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NOSTALL_HOME", str(at / "home"))
        assert nostall(*_plan(at), "--out", at / "plan.json").code == 0
        counted = ("--evaluations", 300, "--launch", LAUNCH)
        assert nostall("tune", SMALL, *counted, "--store", "--out", at / "run").code == 0
        yield at


@pytest.fixture(params=OUTPUTS)
def words(request: pytest.FixtureRequest, inputs: Path) -> Words:
    if request.param.startswith("sharding"):
        pytest.importorskip("torch", reason="modules need the extra nostall[torch]")
        pytest.importorskip("scipy", reason="planning needs the extra nostall[sharding]")
    if request.param == "characterize --learn":
        pytest.importorskip("sklearn", reason="labels need the extra nostall[learn]")
    return OUTPUTS[request.param](inputs)


@pytest.fixture
def extension(request: pytest.FixtureRequest) -> str:
    return EXTENSIONS.get(request.node.callspec.params["words"], "")


def test_files_links_fifos_and_devices(words: Words, extension: str, tmp_path: Path) -> None:
    target, link = tmp_path / f"target{extension}", tmp_path / f"link{extension}"
    link.symlink_to(target)
    done = nostall(*words, link)  # creates the target of a dangling link
    assert done.code == 0, done.err
    assert link.is_symlink() and target.is_file() and not target.is_symlink()
    content = target.read_bytes()
    assert content
    if words[0] != "init":  # keeps existing files
        target.chmod(0o600)
        assert nostall(*words, link).code == 0
        assert link.is_symlink() and stat.S_IMODE(target.stat().st_mode) == 0o600
    fifo = tmp_path / f"fifo{extension}"
    os.mkfifo(fifo)
    thread, parts = read_in_background(fifo)
    assert nostall(*words, fifo).code == 0
    thread.join(30)
    assert parts[0][:5] == content[:5]
    full = device(tmp_path / f"full{extension}", 7)
    assert f"cannot write {full}: No space left" in error_line_of(nostall(*words, full))
    null = device(tmp_path / f"null{extension}", 3)
    assert nostall(*words, null).code == 0
    assert stat.S_ISFIFO(fifo.lstat().st_mode)
    assert stat.S_ISCHR(full.lstat().st_mode) and stat.S_ISCHR(null.lstat().st_mode)
    assert not list(tmp_path.glob(".*"))


def error_line_of(done: Done) -> str:
    """The error of a command that may have printed before it wrote."""
    assert done.code == 2, done
    assert "Traceback" not in done.err
    (line,) = (line for line in done.err.splitlines() if line.startswith("nostall: "))
    return line


def test_what_cannot_be_written(words: Words, extension: str, tmp_path: Path) -> None:
    folder, loop, file = (tmp_path / f"{name}{extension}" for name in ("folder", "loop", "file"))
    folder.mkdir()
    loop.symlink_to(loop)
    file.write_text("mine")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / f"socket{extension}"))
    for path in (folder, loop, tmp_path / f"socket{extension}", file / f"x{extension}"):
        line = error_line_of(nostall(*words, path))
        assert re.search(r"cannot (write|read|create)|exists already|not a folder", line), line
    assert file.read_text() == "mine" and folder.is_dir() and loop.is_symlink()
    assert not list(tmp_path.glob(".*")) and not list(folder.iterdir())


def test_names_that_are_not_utf8(words: Words, extension: str, tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff\xfe" + extension.encode())
    done = nostall(*words, path)
    assert done.code == 0, done.err
    assert path.stat().st_size > 0


INPUTS = ("jobs.csv", "rank0.json", "model-pbs-4.txt", "train.py", "two.toml")


@pytest.mark.parametrize("form", ["table", "json"])
def test_inputs_whose_names_are_not_utf8(
    words: Words, extension: str, inputs: Path, tmp_path: Path, form: str
) -> None:
    strange = tmp_path / os.fsdecode(b"caf\xff")
    strange.symlink_to(inputs)
    for name in INPUTS:
        stem, dot, end = name.partition(".")
        other = inputs / f"{stem}{os.fsdecode(bytes([0xFE]))}{dot}{end}"
        if not other.exists():
            other.write_bytes((inputs / name).read_bytes())

    def renamed(word: object) -> object:
        text = str(word).replace(str(inputs), str(strange))
        for name in INPUTS[:3]:
            stem, dot, end = name.partition(".")
            text = text.replace(name, f"{stem}\udcfe{dot}{end}")
        return text

    options = ("--format", "json") if form == "json" and words[0] != "serving" else ()
    done = nostall(*map(renamed, words), tmp_path / f"out{extension}", *options)
    assert done.code == 0, done.err
    done.out.encode()
    if "--learn" not in words and "export" not in words:  # compressed
        assert (tmp_path / f"out{extension}").read_text("utf-8")


def test_a_run_whose_names_are_not_utf8(inputs: Path, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xff")
    folder.mkdir()
    cubin, launch, run = (folder / os.fsdecode(b"\xfe" + end) for end in (b".cubin", b".toml", b""))
    cubin.write_bytes(SMALL.read_bytes())
    launch.write_bytes(LAUNCH.read_bytes())
    counted = ("--evaluations", 300, "--launch", launch, "--out", run)
    done = nostall("tune", cubin, *counted)
    assert done.code == 0, done.err
    assert (run / "report.html").read_text("utf-8")
    for again in (
        ("tune", "--resume", run, "--evaluations", 600),
        ("report", run),
        ("runs", "ls", folder),
        ("inspect", cubin, "--format", "json"),
        ("verify", cubin, "--format", "json"),
        ("init", cubin, "--out", folder / "launch.toml", "--format", "json"),
    ):
        done = nostall(*again)
        assert done.code == 0, (again, done.err)


@pytest.mark.parametrize("is_file", [True, False], ids=["file", "pipe"])
def test_standard_output_is_written(is_file: bool, inputs: Path, tmp_path: Path) -> None:
    name = "/dev/stdout"
    arguments = command("characterize", inputs / "jobs.csv", "--report", name)
    if is_file:
        with (tmp_path / "out").open("w") as file:
            subprocess.run(arguments, stdout=file, env=environment(), check=True)
        text = (tmp_path / "out").read_text()
    else:
        text = subprocess.run(
            arguments, stdout=subprocess.PIPE, env=environment(), check=True, text=True
        ).stdout
    assert text.startswith("<!doctype html>") and f"report: {name}" in text
    assert names(tmp_path) == (["out"] if is_file else [])


def test_a_reader_of_a_fifo_that_ends(inputs: Path, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    def read() -> None:
        with fifo.open("rb") as file:
            file.read(1)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    done = nostall("characterize", inputs / "rank0.json", "--report", fifo)
    thread.join(10)
    if done.code:  # the page may fit into the pipe
        assert "Broken pipe; start its reader again" in error_line(done)
    assert stat.S_ISFIFO(fifo.lstat().st_mode)


@pytest.mark.parametrize("arguments", [("store", "ls", "--format", "json"), ("doctor",)])
def test_printed_output_that_cannot_be_written(arguments: tuple[str, ...], tmp_path: Path) -> None:
    reader, ended = os.pipe()
    os.close(reader)
    full = os.open(device(tmp_path / "full", 7), os.O_WRONLY)
    env = environment(NOSTALL_HOME=str(tmp_path / "home"))
    for output, reason in ((ended, "Broken pipe"), (full, "No space left on device")):
        done = subprocess.run(
            command(*arguments), stdout=output, stderr=subprocess.PIPE, env=env, text=True
        )
        assert done.returncode == 2, done.stderr
        assert done.stderr.strip().splitlines()[-1].startswith("nostall: cannot read or write")
        assert reason in done.stderr and "Traceback" not in done.stderr
        os.close(output)


def test_closed_standard_streams_are_no_files_of_ours(tmp_path: Path) -> None:
    words = " ".join(map(str, command("store", "ls", "--format", "json")))
    env = environment(NOSTALL_HOME=str(tmp_path / "home"))
    done = subprocess.run(f"{words} <&- >&- 2>&-", shell=True, env=env)
    assert done.returncode == 0
