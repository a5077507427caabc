"""Errors: one line, the exit code, and no partial files."""

from __future__ import annotations

import os
import shlex
import struct
import sys
from pathlib import Path

import pytest

from tests.e2e.cli import LAUNCH, NVCC, SMALL, Done, error_line
from tests.e2e.cli import nostall as in_new_process
from tests.e2e.cli import nostall_here as nostall
from tests.unit.sass.binary.cubin_builder import SectionSpec, elf, text

GOOD = SMALL.read_bytes()


def patched(offset: int, form: str, value: int) -> bytes:
    """The cubin with a field of its ELF header replaced."""
    data = bytearray(GOOD)
    struct.pack_into(form, data, offset, value)
    return bytes(data)


SECTION_HEADERS = struct.unpack_from("<Q", GOOD, 40)[0]
FILES = {
    "empty": (b"", "not an ELF file"),
    "text": (b"#!/usr/bin/env python3\n", "not an ELF file"),
    "header": (GOOD[:50], "truncated"),
    "truncated": (GOOD[: len(GOOD) // 2], "truncated"),
    "amd": (elf(text(), machine=224), "machine 224"),
    "without_text": (elf(SectionSpec(".nv.info", 0x70000000)), "no machine code"),
    "absurd_size": (patched(SECTION_HEADERS + 64 * 3 + 32, "<Q", 1 << 60), "claims bytes"),
    "absurd_count": (patched(60, "<H", 0xFFFF), "do not fit"),
    "absurd_table": (patched(40, "<Q", (1 << 64) - 64), "do not fit"),
    "fatbin": (bytes.fromhex("50ed55ba") + b"\xff" * 60, "cuobjdump"),
}
"""Name -> (contents, part of the error message)."""


@pytest.mark.parametrize("name", FILES)
def test_files_that_cannot_be_read(name: str, tmp_path: Path) -> None:
    data, message = FILES[name]
    path = tmp_path / f"{name}.cubin"
    path.write_bytes(data)
    line = error_line(nostall("verify", path))
    assert message in line and str(path) in line


def test_tune_and_inspect_report_unreadable_files(tmp_path: Path) -> None:
    path, out = tmp_path / "x.cubin", tmp_path / "run"
    path.write_bytes(FILES["truncated"][0])
    assert "truncated" in error_line(nostall("inspect", path))
    assert "truncated" in error_line(nostall("tune", path, "--out", out, "--evaluations", 5))
    assert not out.exists()


def test_a_host_program_is_not_a_cubin() -> None:
    program = Path(os.path.realpath(sys.executable))
    assert "machine" in error_line(nostall("verify", program))


@pytest.mark.parametrize("path", sorted(NVCC.glob("refused*.cubin")), ids=lambda p: p.stem)
def test_an_unsupported_architecture(path: Path, tmp_path: Path) -> None:
    line = error_line(nostall("tune", path, "--launch", LAUNCH, "--out", tmp_path / "run"))
    assert "supported are sm_75" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["inspect", "verify", "tune"])
def test_missing_files_and_folders(command: str, tmp_path: Path) -> None:
    assert "No such file" in error_line(nostall(command, tmp_path / "nothing.cubin", cwd=tmp_path))
    reason = "has no recipe.json" if command == "verify" else "holds 0 cubins"
    assert reason in error_line(nostall(command, tmp_path, cwd=tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_the_second_file_of_verify_is_named(tmp_path: Path) -> None:
    truncated = tmp_path / "truncated.cubin"
    truncated.write_bytes(GOOD[:100])
    assert str(truncated) in error_line(nostall("verify", SMALL, truncated))


@pytest.mark.parametrize("command", ["inspect", "verify", "tune"])
def test_without_nvdisasm(command: str, tmp_path: Path) -> None:
    options = ["--launch", LAUNCH, "--out", tmp_path / "run"] if command == "tune" else []
    done = nostall(command, SMALL, *options, NOSTALL_NVDISASM="/nonexistent")
    assert "NOSTALL_NVDISASM" in error_line(done, 3)
    assert list(tmp_path.iterdir()) == []


def test_doctor_without_nvdisasm() -> None:
    done = nostall("doctor", NOSTALL_NVDISASM="/nonexistent")
    assert done.code == 3
    assert "MISSING" in done.out and "Traceback" not in done.err
    assert done.err.startswith("nostall: nvdisasm is missing: NOSTALL_NVDISASM is '/nonexistent'")
    assert "unset it" in done.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--strategy", "magic"], "magic"),
        (["--evaluations", "0"], "greater than 0"),
        (["--evaluations", "-5"], "--evaluations is -5"),
        (["--seconds", "0"], "greater than 0"),
        (["--seconds", "-1"], "--seconds is -1"),
        (["--seconds", "nan"], "--seconds is nan"),
        (["--seconds", "inf"], "--seconds is inf"),
        (["--seed", "-1", "--evaluations", "5"], "--seed is -1"),
        (["--kernel", "nothing"], "no kernel 'nothing'"),
        (["--launch", "nothing.toml"], "cannot read launch file"),
    ],
)
def test_bad_options_of_tune(options: list[str], message: str, tmp_path: Path) -> None:
    launch = [] if "--launch" in options else ["--launch", LAUNCH]
    done = nostall("tune", SMALL, *launch, "--out", tmp_path / "run", *options, cwd=tmp_path)
    assert message in error_line(done)
    assert list(tmp_path.iterdir()) == []


def test_tune_without_a_launch(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert "--launch" in error_line(nostall("tune", SMALL, "--evaluations", 5, "--out", out))
    assert not out.exists()


def test_nothing_to_tune() -> None:
    assert "nothing to tune" in error_line(nostall("tune"))


def test_a_launch_file_with_an_unknown_key(tmp_path: Path) -> None:
    launch = tmp_path / "spec.toml"
    launch.write_text("grid = [1, 1, 1]\ngird = 2\n")
    done = nostall("tune", SMALL, "--launch", launch, "--out", tmp_path / "run")
    assert "gird" in error_line(done)
    assert not (tmp_path / "run").exists()


def test_a_launch_file_with_deep_nesting(tmp_path: Path) -> None:
    launch = tmp_path / "spec.toml"
    launch.write_text("a = " + "[" * 100_000)
    assert "nested too deeply" in error_line(nostall("inspect", SMALL, "--launch", launch))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_folder(tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    done = nostall("tune", SMALL, "--launch", LAUNCH, "--evaluations", 5, "--out", folder / "run")
    assert "choose a writable directory" in error_line(done)


def test_an_out_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file" / "run", tmp_path / "file", Path("/proc/nostall")):
        done = nostall("tune", SMALL, "--launch", LAUNCH, "--evaluations", 5, "--out", out)
        assert "cannot write" in error_line(done)
    assert (tmp_path / "file").read_text() == "mine"


def test_other_files_in_the_out_folder_are_kept(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    error_line(nostall("tune", SMALL, "--evaluations", 5, "--out", tmp_path))
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_file_names_that_are_not_text(tmp_path: Path) -> None:
    for name in (b"\xff\xfe.cubin", b"[red]:x:\n.cubin"):
        line = error_line(nostall("verify", tmp_path / os.fsdecode(name)))
        assert "cannot read" in line and ".cubin" in line


PYTHON_FILES = {
    "no_kernel.py": ("", "launched no kernel that can be tuned"),
    "syntax.py:k": ("def k(:\n", "SyntaxError"),
    "raises.py:k": ("raise ValueError('for\\nfun')\n", "ValueError"),
    "exits.py:k": ("import sys\nsys.exit(0)\n", "SystemExit"),
    "plain.py:k": ("def k():\n    pass\n", "not a @triton.jit function"),
    "lacks.py:k": ("x = 1\n", "has no kernel 'k'"),
}


@pytest.mark.parametrize("target", PYTHON_FILES)
def test_python_files(target: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    body, message = PYTHON_FILES[target]
    (tmp_path / target.partition(":")[0]).write_text(body)
    done = nostall("tune", tmp_path / target, "--out", tmp_path / "run")
    assert message in error_line(done)
    assert not (tmp_path / "run").exists()


def test_a_missing_python_file(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    assert "there is no file" in error_line(nostall("inspect", tmp_path / "nothing.py:k"))


def test_an_unknown_architecture() -> None:
    pytest.importorskip("triton")
    done = nostall("inspect", SMALL.parents[1] / "softmax.py:softmax", "--arch", "hopper")
    assert "architecture 'hopper'" in error_line(done)


def test_a_folder_that_is_not_a_run(tmp_path: Path) -> None:
    assert "not a run directory" in error_line(nostall("tune", "--resume", tmp_path))
    assert "run" in error_line(nostall("report", tmp_path))
    (tmp_path / "run.json").write_text('{"schema_version": 99}')
    assert "run.json" in error_line(nostall("tune", "--resume", tmp_path))


@pytest.mark.parametrize(
    "args", [["nothing"], ["verify"], ["verify", "a", "--format", "xml"], ["tune", "--seed", "x"]]
)
def test_usage_errors(args: list[str]) -> None:
    done = nostall(*args)
    assert done.code == 2
    assert done.out == "" and "Traceback" not in done.err and done.err


def test_an_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("mine")
    done = nostall("tune", SMALL, "--launch", LAUNCH, "--evaluations", 5, "--out", tmp_path)
    assert "already holds a run" in error_line(done)
    assert (tmp_path / "run.json").read_text() == "mine"


def tune_without_gpu(tmp_path: Path, *options: object) -> Done:
    """Run ``nostall tune`` while no GPU is visible; it must leave no run directory."""
    budget = ["--evaluations", 5, "--out", tmp_path / "run"]
    done = nostall("tune", SMALL, "--launch", LAUNCH, *budget, *options, CUDA_VISIBLE_DEVICES="-1")
    assert not (tmp_path / "run").exists()
    return done


@pytest.mark.slow  # it waits ten seconds for an answer
def test_an_unreachable_scheduler(tmp_path: Path) -> None:
    measured = ["--objective", "gpu", "--scheduler", "tcp://127.0.0.1:9"]
    line = error_line(tune_without_gpu(tmp_path, *measured), 3)
    assert "no Dask scheduler answers at tcp://127.0.0.1:9" in line


def test_workers_without_gpus(tmp_path: Path) -> None:
    line = error_line(tune_without_gpu(tmp_path, "--workers", 2, "--objective", "gpu"), 3)
    assert "no usable GPU" in line or "nostall[gpu]" in line


@pytest.mark.parametrize(
    "words", [("tune", "--objective", "model"), ("bench",)], ids=["tune", "bench"]
)
def test_the_remedy_for_a_missing_launch_writes_it(words: tuple[str, ...], tmp_path: Path) -> None:
    cubin = tmp_path / "a kernel.cubin"
    cubin.write_bytes(GOOD)
    verb, *options = words
    line = error_line(nostall(verb, cubin, *options))
    remedy = shlex.split(line.split("`")[1])
    assert remedy[:2] == ["nostall", "init"]
    assert nostall(*remedy[1:], cwd=tmp_path).code == 0
    assert line.endswith(f"give --launch {remedy[-1]}")
    assert (tmp_path / remedy[-1]).exists()


def test_an_error_while_ctrl_c_is_handled_is_the_interruption(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def clean_up_fails() -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise UnboundLocalError("the clean-up of a library")

    monkeypatch.setattr("nostall.cli._run_app", clean_up_fails)
    assert error_line(nostall("doctor"), 130) == "nostall: interrupted"


def test_ctrl_c_while_the_packages_load(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")
    done = in_new_process("doctor", PYTHONPATH=str(tmp_path))
    assert error_line(done, 130) == "nostall: interrupted"


def test_a_terminal_of_unknown_width() -> None:
    assert "nostall optimize" in in_new_process("--help", COLUMNS="0").out


def test_folders_that_are_no_run(tmp_path: Path) -> None:
    (tmp_path / "report.html").touch()
    assert str(tmp_path / "report.html") in error_line(nostall("report", tmp_path))
    for path, reason in ((tmp_path, "run.json: No such file"), (tmp_path / "no", "(No such file")):
        line = error_line(nostall("runs", "show", path))
        assert reason in line and line.count(str(path)) == 1
    line = error_line(nostall("verify", tmp_path))
    assert line.endswith("give two cubins") and "best.cubin" not in line


@pytest.mark.parametrize("words", [("record", "--out", "file"), ("apply", "--log", ".")])
def test_outputs_are_refused_before_the_program_runs(words: tuple[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    program = ("--", sys.executable, "-c", "open('ran', 'w')")
    assert "cannot write" in error_line(nostall(*words, *program, cwd=tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_program_without_launches_leaves_no_folder(tmp_path: Path) -> None:
    done = nostall("record", "--out", "made", "--", sys.executable, "-c", "", cwd=tmp_path)
    assert done.code == 0 and list(tmp_path.iterdir()) == []


def test_a_store_that_cannot_be_written_does_not_take_the_result_away(tmp_path: Path) -> None:
    words = ("tune", SMALL, "--launch", LAUNCH, "--evaluations", "300", "--store", "--out", "run")
    done = nostall(*words, cwd=tmp_path, NOSTALL_HOME="/proc/nothing")
    assert done.code == 2 and "modelled gain: 1." in done.out
    assert "set NOSTALL_HOME to a writable folder" in done.err.splitlines()[-1]
    assert (tmp_path / "run" / "report.html").exists()


def test_a_run_that_ends_before_its_search_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("nostall.cli.tuning.tune._search", interrupted)
    error_line(nostall("tune", SMALL, "--launch", LAUNCH, cwd=tmp_path), 130)
    assert list(tmp_path.iterdir()) == []
