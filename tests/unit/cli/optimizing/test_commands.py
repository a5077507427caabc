"""`nostall optimize` and `nostall apply --bundle` on programs of a user."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from nostall import __version__
from nostall.attach.program.machine import cpu_name
from nostall.attach.program.roots import model_identity
from nostall.cli.optimizing import optimize as cli_optimize
from nostall.optimizing.job import Options
from nostall.optimizing.recording import RECORDING_FILE
from tests.e2e.cli import ROOT, Done, command, environment, error_line, nostall, nostall_here
from tests.unit.optimizing.test_diagnosis import result

torch = pytest.importorskip("torch")

LOOP = """
import os, sys, torch, torch.nn as nn
torch.manual_seed(0)
net = nn.Sequential(*[m for _ in range({layers}) for m in (nn.Linear(16, 16), nn.Tanh())])
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
for i in range(int(os.environ.get("STEPS", 1000000))):
    opt.zero_grad()
    net(torch.randn(8, 16)).square().mean().backward()
    opt.step()
    {extra}
print("flags", opt.param_groups[0]["fused"], opt.param_groups[0]["foreach"])
"""
WATCH = ("optimize", "--dry-run", "--out", "out", "--")


def write(folder: Path, extra: str = "pass", layers: int = 2) -> Path:
    path = folder / "train.py"
    path.write_text(LOOP.format(extra=extra, layers=layers))
    return path


def run(folder: Path, *words: object, **variables: str) -> Done:
    """Run with one thread, and temporary files in ``folder``."""
    (folder / "tmp").mkdir(exist_ok=True)
    variables = {
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder / "tmp"),
        "COLUMNS": "80",
        **variables,
    }
    return nostall(*words, cwd=folder, **variables)


def left(folder: Path) -> list[str]:
    """What the command left among temporary files."""
    return [path.name for path in (folder / "tmp").iterdir() if path.name.startswith("nostall-")]


def test_a_program_is_watched_and_ended(tmp_path: Path) -> None:
    program = write(tmp_path, 'open("log.txt", "w").write(str(i))')
    done = run(tmp_path, *WATCH, sys.executable, program)
    assert done.code == 0, done.err
    assert "measured on CPU" in done.out and "torch.compile" in done.out
    assert "the program was ended before its own end; these files changed" in done.out
    assert max(map(len, done.out.splitlines()[:8])) <= 80
    document = json.loads((tmp_path / "out" / "result.json").read_text())
    assert document["watched"]["roots"] == ["Sequential"] and document["kept"] == []
    assert (tmp_path / "out" / "report.html").exists()
    assert not (tmp_path / "out" / "bundle.json").exists()
    assert left(tmp_path) == []
    replayed = run(tmp_path, "optimize", "--replay", "out/recording.json.gz")
    assert replayed.code == 0 and "replayed from a recording" in " ".join(replayed.out.split())
    assert replayed.out.splitlines()[:8] == done.out.splitlines()[:8]
    again = json.loads((tmp_path / "replayed" / "result.json").read_text())
    assert {**again, "notes": document["notes"]} == document
    line = error_line(nostall_here("optimize", "--replay", "out/result.json", cwd=tmp_path))
    assert "give the recording.json.gz" in line


INFERENCE = """
import torch, torch.nn as nn
net = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
with torch.inference_mode():
    for i in range({steps}):
        net(torch.randn(8, 16))
"""


def test_inference_has_steps(tmp_path: Path) -> None:
    program = tmp_path / "serve.py"
    program.write_text(INFERENCE.format(steps=10**7))
    done = run(tmp_path, *WATCH, sys.executable, program)
    assert done.code == 0, done.err
    assert "a step is each call of Sequential" in " ".join(done.out.split())
    program.write_text(INFERENCE.format(steps=4))
    done = run(tmp_path, *WATCH, sys.executable, program)
    text = " ".join(done.out.split())
    assert "4 calls of Sequential showed no period" in text and "--step" in text


def test_the_next_command_has_a_folder_in_the_place_of_scratch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cli_optimize._show_next(["python", "train.py", "--out={scratch}"], [Path("o/bundle.json")])
    assert "apply --bundle o/bundle.json -- python train.py --out=FOLDER" in capsys.readouterr().err


@pytest.mark.slow
def test_files_of_an_earlier_run_do_not_stay(tmp_path: Path) -> None:
    """A bundle that the new result does not prove would be applied."""
    found = result()
    assert [path.name for path in cli_optimize._write(found, tmp_path)][-1] == "bundle.json"
    found.attempts = found.attempts[:1]
    (tmp_path / "kernels.zip").write_bytes(b"of an earlier run")
    assert "bundle.json" not in [path.name for path in cli_optimize._write(found, tmp_path)]
    assert not (tmp_path / "bundle.json").exists() and not (tmp_path / "kernels.zip").exists()


def test_a_resumed_run_leaves_no_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / RECORDING_FILE).write_bytes(b"of another result")
    monkeypatch.setattr(cli_optimize, "read_earlier", lambda *_: object())
    monkeypatch.setattr(cli_optimize, "run_job", lambda *_, **__: result())
    cli_optimize._run(["python"], Options(), tmp_path, None, quiet=True)
    assert (tmp_path / "result.json").exists() and not (tmp_path / RECORDING_FILE).exists()


@pytest.mark.parametrize(
    ("end", "code", "text"),
    [
        ("if i == 12: sys.exit(7)", 7, "exit code 7"),
        ("if i == 2: os._exit(9)", 9, "exit code 9"),
        ("if i == 2: os.kill(os.getpid(), 9)", 137, "signal 9 (Killed)"),
    ],
)
def test_a_crash_keeps_its_exit_code(tmp_path: Path, end: str, code: int, text: str) -> None:
    done = run(tmp_path, *WATCH, sys.executable, write(tmp_path, end))
    assert done.code == code
    assert f"the program ended with {text}" in done.out
    unseen = "the program failed before enough steps were seen; its output says why"
    assert (unseen in done.out) == ("i == 2:" in end)


def test_bad_input_is_refused_at_once(tmp_path: Path) -> None:
    line = error_line(nostall_here("optimize", "--", "no-such-program", cwd=tmp_path))
    assert "cannot run 'no-such-program'" in line
    line = error_line(nostall_here("optimize", "--minutes", 0, "--", "true", cwd=tmp_path))
    assert "--minutes is 0" in line
    line = error_line(nostall_here("optimize", "--step", "train.py", "--", "true", cwd=tmp_path))
    assert "give module:function" in line
    line = error_line(nostall_here("optimize", "--resume", "no", "--", "true", cwd=tmp_path))
    assert "give the --out folder of an earlier run" in line
    line = error_line(nostall_here("optimize", "trace.json", cwd=tmp_path))
    assert "trace.json" in line
    line = error_line(nostall_here("apply", "--bundle", "b.json", "--", "true", cwd=tmp_path))
    assert "cannot read b.json" in line


def test_programs_without_python_or_steps_are_told(tmp_path: Path) -> None:
    done = nostall_here("optimize", "--out", "out", "--", "true", cwd=tmp_path)
    assert (done.code, "no Python process" in done.out) == (0, True)
    done = nostall_here("optimize", "--", sys.executable, "-I", "-c", "pass", cwd=tmp_path)
    assert "with -I, -E or -S" in done.out
    done = nostall_here("optimize", "--", sys.executable, "-c", "print(1)", cwd=tmp_path)
    assert "no step was seen" in done.out and not (tmp_path / "out").exists()


@pytest.mark.parametrize("out", ["/proc/results", "file/results"])
def test_a_folder_that_cannot_be_written_is_told_before_the_program_runs(
    tmp_path: Path, out: str
) -> None:
    (tmp_path / "file").touch()
    program = (sys.executable, "-c", "open('ran', 'w')")
    done = nostall_here("optimize", "--out", out, "--", *program, cwd=tmp_path)
    assert done.code == 2 and "cannot be written" in done.err and "--out FOLDER" in done.err
    assert not (tmp_path / "ran").exists()


def test_a_trace_gives_advice() -> None:
    trace = ROOT / "tests" / "unit" / "workload" / "h200" / "gpt.json.gz"
    done = nostall_here("optimize", trace)
    assert done.code == 0 and "nothing was tried" in done.out
    assert "what to fix first" in done.out
    document = nostall_here("optimize", trace, "--format", "json").json
    assert document["ranks"][0]["fix_first"] and "no bounds" in document["note"]


@pytest.mark.slow
def test_each_attempt_is_measured_and_only_gains_are_kept(tmp_path: Path) -> None:
    program = write(tmp_path, layers=40)
    done = run(
        tmp_path, "optimize", "--format", "json", "--minutes", 4, "--again", "--out", "out", "--",
        sys.executable, program,
    )  # fmt: skip
    assert done.code == 0, done.err
    document = json.loads(done.out)
    compiled = document["attempts"][0]
    assert compiled["change"]["kind"] == "compile" and compiled["class"] == "within rounding"
    assert compiled["proof"]["pairs"] >= 6 and compiled["outcome"] in ("kept", "dropped")
    assert (tmp_path / "out" / "bundle.json").exists() == bool(document["kept"])
    if document["kept"]:  # which of them gain depends on the machine
        assert document["together"]["interval"][0] > 1.0
    assert left(tmp_path) == []


@pytest.mark.slow
def test_a_run_that_was_stopped_is_resumed(tmp_path: Path) -> None:
    # Nobody ends the program of a killed command, so it ends itself.
    program = write(
        tmp_path,
        'ppid = globals().get("ppid", os.getppid())\n    if os.getppid() != ppid: os._exit(0)',
    )
    words = "--minutes", 4, "--", sys.executable, program
    (tmp_path / "tmp").mkdir()
    variables = environment(OMP_NUM_THREADS="1", TMPDIR=str(tmp_path / "tmp"))
    process = subprocess.Popen(
        command("optimize", "--out", "out", *words), cwd=tmp_path, env=variables,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stderr is not None
        assert any("torch.compile: kept" in line or "torch.compile: dropped" in line
                   or "torch.compile: refused" in line for line in process.stderr)  # fmt: skip
        process.kill()  # nothing is written at the end
    done = run(tmp_path, "optimize", "--resume", "out", *words)
    assert done.code == 0, done.err
    assert "tried in the earlier run: torch.compile" in done.err
    assert "torch.compile: checking" not in done.err and "fused optimiser: " in done.err
    document = json.loads((tmp_path / "out" / "result.json").read_text())
    assert "(earlier run)" in document["attempts"][0]["reason"]
    assert document["attempts"][1]["change"]["value"] == "fused"


def network() -> torch.nn.Module:
    """That of :data:`LOOP`."""
    layers = [m for _ in range(2) for m in (torch.nn.Linear(16, 16), torch.nn.Tanh())]
    return torch.nn.Sequential(*layers)


def bundle(path: Path, **machine: str) -> Path:
    """A bundle of this machine with a fused optimiser."""
    numbers = {"ratio": 1.5, "interval": (1.4, 1.6)}
    here = {"device": cpu_name(), "driver": None, "torch": torch.__version__}
    change = {"name": "fused optimiser", "kind": "optimizer", "value": "fused",
              "result_class": "within rounding", "line": "AdamW(..., fused=True)"}  # fmt: skip
    content = {
        "format": "nostall program bundle", "schema_version": 4, "command": ["python", "train.py"],
        "identity": {"model": model_identity([network()]), "sources": {}},
        "machine": {**here, "nostall": __version__, **machine}, "step": None,
        "changes": [{**change, **numbers}], **numbers, "null_interval": (0.9, 1.1),
    }  # fmt: skip
    path.write_text(json.dumps(content))
    return path


@pytest.mark.slow
def test_a_bundle_is_applied_where_it_fits(tmp_path: Path) -> None:
    program = write(tmp_path)
    words = "--", sys.executable, program
    fitting = bundle(tmp_path / "fitting.json")
    applied = run(tmp_path, "apply", "--bundle", fitting, *words, STEPS="9")
    assert applied.code == 0, applied.err
    assert "flags True" in applied.out and "applied fused optimiser" in applied.err
    other = bundle(tmp_path / "other.json", torch="9.0")
    refused = run(tmp_path, "apply", "--bundle", other, *words)
    assert refused.code == 2 and "was measured with torch 9" in refused.err
    assert left(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "note"),
    [
        ("\n    import threading; threading.Thread(target=input).start() if i == 0 else 0", ""),
        ("\n    import subprocess; subprocess.Popen(['sleep', '300']) if i == 0 else 0", ""),
    ],
)
def test_what_outlives_the_last_step_is_ended(extra: str, note: str, tmp_path: Path) -> None:
    begin = time.monotonic()
    done = run(tmp_path, *WATCH, sys.executable, write(tmp_path, extra))
    assert done.code == 0 and time.monotonic() - begin < 200
    assert left(tmp_path) == []


@pytest.mark.slow
def test_a_bare_except_does_not_keep_the_program(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        LOOP.format(extra="pass", layers=2)
        .replace("    opt.step()", "    try: opt.step()\n    except: pass")
    )  # fmt: skip
    done = run(tmp_path, *WATCH, sys.executable, program)
    assert done.code == 0 and "outlived its last step" in done.out


@pytest.mark.slow
def test_two_ranks_end_at_one_step(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    begin = "import torch.distributed as dist; dist.init_process_group('gloo')\nnet = nn.parallel."
    text = LOOP.format(extra="pass", layers=2).replace(
        "opt = ", f"{begin}DistributedDataParallel(net)\nopt = ", 1
    )
    program.write_text(text)
    done = run(
        tmp_path, *WATCH, sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2,
        program,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "2 ranks" in (tmp_path / "out" / "report.html").read_text()
    assert "Connection closed" not in done.err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    variables = environment(OMP_NUM_THREADS="1", TMPDIR=str(tmp_path / "tmp"))
    words = command("optimize", "--out", "out", "--", sys.executable, write(tmp_path))
    process = subprocess.Popen(
        words, cwd=tmp_path, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    with process:
        assert process.stderr is not None
        assert any("watched" in line for line in process.stderr)
        os.kill(process.pid, number)
        process.stderr.read()
    assert process.returncode == 130
    assert left(tmp_path) == []


HANDLES = """
import time, torch
net = torch.nn.Linear(8, 8)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
while True:
    try:
        net(torch.ones(4, 8)).sum().backward()
        opt.step()
        print("running", flush=True)
        time.sleep(0.3)
    except KeyboardInterrupt:
        print("handled", flush=True)
"""


@pytest.mark.slow
def test_ctrl_c_that_the_program_handles_ends_the_command(tmp_path: Path) -> None:
    """The terminal's keys go to the program."""
    (tmp_path / "train.py").write_text(HANDLES)
    words = command("optimize", "--out", tmp_path, "--", sys.executable, tmp_path / "train.py")
    child, terminal = pty.fork()
    if not child:
        os.execve(words[0], words, environment(OMP_NUM_THREADS="1"))
    shown, is_pressed = b"", False
    with suppress(OSError):  # the terminal is closed
        while data := os.read(terminal, 4096):
            shown += data
            if b"running" in shown and not is_pressed:
                is_pressed = os.write(terminal, b"\x03") > 0
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 130
    assert b"handled" in shown and b"what was proven before is kept" in shown


def test_a_value_of_another_kind_is_refused(tmp_path: Path) -> None:
    """PyTorch would fail at it inside the program."""
    path = bundle(tmp_path / "b.json")
    document = json.loads(path.read_text())
    document["changes"][0]["kind"] = "compile"
    path.write_text(json.dumps(document))
    line = error_line(nostall_here("apply", "--bundle", path, "--", "true", cwd=tmp_path))
    assert "'fused' is no value of 'compile'" in line
