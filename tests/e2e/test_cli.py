"""Commands on the examples of the repository: output, files and exit codes."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nostall.sass.binary import toolchain
from tests.e2e.cli import (
    EXAMPLES,
    LAUNCH,
    NVCC,
    SMALL,
    command,
    environment,
    error_line,
    nostall,
    nostall_here,
)

ESCAPE = "\x1b["


def tune(out: Path, *options: object, evaluations: int = 50) -> list[object]:
    """Arguments that tune an example cubin."""
    budget = ["--evaluations", evaluations]
    return ["tune", SMALL, "--launch", LAUNCH, *budget, "--out", out, *options]


def status(run: Path) -> str:
    return str(json.loads((run / "run.json").read_text())["status"])


def test_the_installed_script() -> None:
    script = Path(sys.executable).parent / "nostall"
    done = subprocess.run([script, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    for name in ("doctor", "inspect", "tune", "verify", "report"):
        assert name in done.stdout
    done = subprocess.run([script, "verify", "/nothing"], capture_output=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith(b"nostall: ")


def test_doctor() -> None:
    done = nostall_here("doctor")
    assert done.code == 0 and done.out.startswith("Ready: ")
    for use in ("torch.compile", "serving", "vLLM"):
        assert use in done.out
    assert len(done.out.splitlines()) < 45
    checks = {check["part"]: check for check in nostall_here("doctor", "--format", "json").json}
    assert checks["nvdisasm"]["ok"] and checks["nvdisasm"]["needed"]


def test_inspect() -> None:
    done = nostall_here("inspect", SMALL)
    assert done.code == 0 and done.err == ""
    assert "sm_90" in done.out and "movable" in done.out and "safe" in done.out
    properties = nostall_here("inspect", SMALL, "--format", "json").json
    assert properties["kernel"] == "transpose" and properties["architecture"] == "sm_90"
    assert properties["safe"] is True and properties["findings"] == []
    assert properties["kind"] == "no matrix instructions"
    assert sum(properties["modelled_bound"].values()) == pytest.approx(1.0, abs=0.001)
    (gained,) = properties["measured_gains"]
    text = " ".join(done.out.split())
    assert gained in text and "bound by" in text and "; assumed are 256 blocks of" in text
    assert 0 < properties["movable"] < properties["instructions"]
    assert properties["movable"] + sum(properties["pins"].values()) == properties["instructions"]
    assert sum(properties["pipes"].values()) == properties["instructions"]


def test_inspect_prints_every_instruction() -> None:
    properties = nostall_here("inspect", SMALL, "--format", "json").json
    lines = nostall_here("inspect", SMALL, "--listing").out.splitlines()
    listed = [line for line in lines if line[:6].strip("0123456789abcdef") == "" and line[:6]]
    assert len(listed) == properties["instructions"]
    assert any("LDG" in line for line in listed) and any("EXIT" in line for line in listed)


def test_inspect_chooses_a_kernel_and_an_image() -> None:
    fatbin = NVCC / "atomics.fatbin"
    assert "choose one with --arch" in error_line(nostall_here("inspect", fatbin))
    assert "name one of: " in error_line(nostall_here("inspect", fatbin, "--arch", "sm_80"))
    options = ["--arch", "sm_90", "--kernel", "spin_lock", "--format", "json"]
    properties = nostall_here("inspect", fatbin, *options).json
    assert (properties["kernel"], properties["architecture"]) == ("spin_lock", "sm_90")


def test_inspect_ignores_the_other_kernels(tmp_path: Path) -> None:
    """One kernel that nvdisasm cannot read must not hide the others."""
    from nostall.sass.binary.cubin import Cubin

    data = bytearray((NVCC / "atomics.sm_80.cubin").read_bytes())
    damaged, *others = [text for text in Cubin.parse(bytes(data)).texts if text.is_kernel]
    for at in range(damaged.file_offset, damaged.file_offset + damaged.size, 16):
        data[at : at + 16] = b"\xff" * 16
    path = tmp_path / "one damaged.cubin"
    path.write_bytes(data)
    line = error_line(nostall_here("inspect", path, "--kernel", damaged.name))
    assert "nvdisasm rejects this input" in line
    document = nostall_here("inspect", path, "--kernel", others[0].name, "--format", "json").json
    intact = nostall_here(
        "inspect", NVCC / "atomics.sm_80.cubin", "--kernel", others[0].name, "--format", "json"
    ).json
    assert document == intact and damaged.name in document["kernels"]


def test_verify() -> None:
    done = nostall_here("verify", SMALL)
    assert done.code == 0 and done.out.startswith("safe: ")
    assert nostall_here("verify", SMALL, SMALL).code == 0
    another_kernel = EXAMPLES / "nvcc" / "dot_product.sm_90.cubin"
    report = nostall_here("verify", SMALL, another_kernel, "--format", "json")
    assert report.code == 1 and report.json["safe"] is False and report.json["findings"]


def test_verify_rejects_a_cubin_without_waits(tmp_path: Path) -> None:
    """Without the waits of the control words, nothing protects the loads."""
    from nostall.sass.binary.cubin import Cubin
    from nostall.sass.binary.encoding import WAIT

    data = bytearray(SMALL.read_bytes())
    text = Cubin.parse(bytes(data)).texts[0]
    for at in range(text.file_offset, text.file_offset + text.size, 16):
        word = int.from_bytes(data[at : at + 16], "little") & ~WAIT.mask
        data[at : at + 16] = word.to_bytes(16, "little")
    bad = tmp_path / "bad.cubin"
    bad.write_bytes(data)
    for args in ([SMALL, bad], [bad]):
        done = nostall_here("verify", *args)
        assert done.code == 1 and "UNSAFE" in done.out and "reason" in done.out
    quiet = nostall_here("verify", SMALL, bad, "--quiet")
    assert quiet.code == 1 and len(quiet.out.splitlines()) == 1


def test_verify_reads_fatbins() -> None:
    fatbin, uncompressed = NVCC / "atomics.fatbin", NVCC / "atomics.plain.fatbin"
    assert nostall_here("verify", fatbin, uncompressed, "--arch", "sm_80").code == 0
    assert nostall_here("verify", fatbin, NVCC / "atomics.sm_80.cubin", "--arch", "sm_80").code == 0
    error_line(nostall_here("verify", fatbin))


def test_tune_a_cubin(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = nostall(*tune(out))
    assert done.code == 0, done.err
    assert "modelled" in done.out and "verifier: safe" in done.out
    assert done.out.splitlines()[-1] == (
        f"next:     nostall verify {out / 'original.cubin'} {out / 'best.cubin'}"
    )
    assert (out / "original.cubin").read_bytes() == SMALL.read_bytes()
    assert status(out) == "done"
    assert len((out / "trials.csv").read_text().splitlines()) > 40
    assert "<html" in (out / "report.html").read_text()
    assert not [p for p in out.iterdir() if p.name.startswith(".")]
    assert nostall_here("verify", out / "original.cubin", out / "best.cubin").code == 0
    second = tmp_path / "second"
    result = nostall_here(*tune(second, "--format", "json")).json
    assert (second / "best.cubin").read_bytes() == (out / "best.cubin").read_bytes()
    assert result["kind"] == "modelled" and result["ratio"] >= 1.0 and result["verdict"]["safe"]


def test_report_writes_the_page_again(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert nostall_here(*tune(out, "--quiet")).code == 0
    (out / "report.html").unlink()
    done = nostall_here("report", out)
    assert done.code == 0 and "report.html" in done.out
    assert (out / "report.html").stat().st_size > 1000


def test_a_run_is_resumed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = nostall_here(*tune(out, "--format", "json", evaluations=40)).json
    done = nostall_here("tune", "--resume", out, "--evaluations", 80, "--format", "json")
    assert done.code == 0, done.err
    assert (first["evaluations"], done.json["evaluations"]) == (40, 120)
    assert done.json["best"] <= first["best"]
    assert status(out) == "done"
    assert nostall_here("verify", out / "original.cubin", out / "best.cubin").code == 0


def test_tune_an_image_of_a_fatbin(tmp_path: Path) -> None:
    launch = tmp_path / "spec.toml"
    launch.write_text(
        "grid = [8, 1, 1]\nblock = [128, 1, 1]\n"
        '[[args]]\nname = "x"\ndtype = "i32"\nshape = [1024]\nrole = "inout"\nbound = 9\n'
        '[[args]]\nname = "f"\ndtype = "f32"\nshape = [1024]\nrole = "inout"\n'
    )
    out = tmp_path / "run"
    options = ["--arch", "sm_80", "--kernel", "scoped_atomics", "--launch", launch]
    done = nostall_here(
        "tune", NVCC / "atomics.fatbin", *options, "--evaluations", 20, "--out", out
    )
    assert done.code == 0, done.err
    assert (out / "original.cubin").read_bytes() == (NVCC / "atomics.sm_80.cubin").read_bytes()


def test_tune_a_triton_kernel(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    out = tmp_path / "run"
    target = f"{EXAMPLES / 'softmax.py'}:softmax"
    budget = ["--objective", "model", "--evaluations", 50]
    done = nostall_here("tune", target, *budget, "--out", out, "--format", "json")
    assert done.code == 0, done.err
    assert done.json["verdict"]["safe"] and done.json["evaluations"] >= 50
    assert nostall_here("verify", out / "original.cubin", out / "best.cubin").code == 0


def test_options_that_a_resumed_run_cannot_honour_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert nostall_here(*tune(out, "--quiet", evaluations=20)).code == 0
    for options in (["--seed", 3], ["--strategy", "sip"], ["--checks", 4], ["--out", out], [SMALL]):
        line = error_line(nostall_here("tune", "--resume", out, *options, "--evaluations", 5))
        name = options[0] if str(options[0]).startswith("--") else "TARGET"
        assert f"{name} cannot be given with --resume" in line
    line = error_line(nostall_here("tune", "--resume", out))
    assert "is done" in line and "--evaluations" in line
    line = error_line(nostall_here("tune", SMALL, "--launch", LAUNCH, "--out", out))
    assert f"`nostall tune --resume {out}`" in line


@pytest.mark.slow
def test_two_processes_do_not_write_one_run(tmp_path: Path) -> None:
    out = tmp_path / "my run"
    args = tune(out, evaluations=100_000_000)
    with subprocess.Popen(command(*args), env=environment()) as process:
        wait_for(out / "checkpoint.json", process)
        line = error_line(nostall("tune", "--resume", out))
        assert f"being written by process {process.pid} on" in line
        process.kill()
    assert nostall("tune", "--resume", out, "--evaluations", 5, "--quiet").code == 0


def held_nvdisasm(folder: Path) -> tuple[Path, Path]:
    """An nvdisasm that waits as long as a file exists: the tool, and the file."""
    tool, held = folder / "nvdisasm", folder / "held"
    real = shlex.quote(str(toolchain.find("nvdisasm")))
    wait = f"while [ -e {shlex.quote(str(held))} ]; do sleep 0.05; done"
    tool.write_text(f'#!/bin/sh\n{wait}\nexec {real} "$@"\n')
    tool.chmod(0o755)
    return tool, held


def test_a_second_ctrl_c_says_what_is_kept(tmp_path: Path) -> None:
    """It comes while the best schedule is verified, which needs nvdisasm."""
    out = tmp_path / "my run"
    args = tune(out, evaluations=100_000_000)
    tool, held = held_nvdisasm(tmp_path)
    variables = environment(NOSTALL_NVDISASM=str(tool))
    process = subprocess.Popen(
        command(*args), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables
    )
    try:
        wait_for(out / "checkpoint.json", process)
        held.touch()
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        notice = process.stderr.readline() + process.stderr.readline()
        assert "Ctrl-C again leaves at once" in notice
        time.sleep(0.3)  # two signals at the same moment count as one
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=60)
    finally:
        held.unlink(missing_ok=True)
        process.kill()
    evaluations = json.loads((out / "checkpoint.json").read_text())["evaluations"]
    assert (process.returncode, printed) == (130, "") and "Traceback" not in errors
    assert f"keeps {evaluations} evaluations" in errors
    words = shlex.split(errors.partition("`")[2].partition("`")[0])
    resumed = nostall_here(*words[1:], "--evaluations", 5, "--format", "json")
    assert resumed.json["evaluations"] == evaluations + 5


def wait_for(path: Path, process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def interrupt(args: list[object], ready: Path) -> subprocess.CompletedProcess[str]:
    """Run a command and send Ctrl-C after the file ``ready`` exists."""
    process = subprocess.Popen(
        command(*args),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        deadline = time.monotonic() + 120
        while not ready.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    return subprocess.CompletedProcess(args, process.returncode, out, err)


def test_ctrl_c_keeps_the_best_schedule(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = interrupt(tune(out, evaluations=100_000_000), out / "trials.csv")
    assert done.returncode == 0, done.stderr
    assert "stopped: interrupted" in done.stdout and "Traceback" not in done.stderr
    assert status(out) == "interrupted"
    assert nostall_here("verify", out / "original.cubin", out / "best.cubin").code == 0
    resumed = nostall_here("tune", "--resume", out, "--seconds", 0.5, "--format", "json")
    assert resumed.code == 0, resumed.err
    assert status(out) == "done"


def test_colour_follows_the_environment() -> None:
    assert ESCAPE in nostall("doctor", FORCE_COLOR="1").out
    done = nostall("doctor", NO_COLOR="1")
    assert done.code == 0 and ESCAPE not in done.out
    assert ESCAPE not in nostall("inspect", SMALL, "--listing").out


def test_output_on_an_ascii_terminal() -> None:
    done = nostall("inspect", SMALL, PYTHONIOENCODING="ascii")
    assert done.code == 0 and done.out.isascii()


def test_a_closed_pipe_causes_no_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        done = subprocess.run(
            command("inspect", SMALL, "--listing"),
            stdout=pipe,
            stderr=subprocess.PIPE,
            env=environment(),
            check=False,
        )
    assert b"Traceback" not in done.stderr
