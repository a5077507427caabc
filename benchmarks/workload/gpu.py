"""Modules described, operators timed, steps profiled: all that workload_fit needs from a GPU.

    NCCL_NVLS_ENABLE=0 python -m benchmarks run workload.gpu --out OUT_DIR
    python -m benchmarks run workload.gpu --device cpu --tiny --out OUT_DIR      (a trial, no figures)

Writes OUT_DIR/workload_gpu.json and small traces.  Each step is a process with a time limit of its
own; begun again with the same OUT_DIR, steps that are done are not done again.  Steps for several
GPUs run where several are visible, those for counters where ncu can read them; what was not done
says why.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.harness.ncu import count, find_ncu, run_within
from benchmarks.harness.result_file import head
from nostall.core.files import write_atomically

OPERATORS_S, MODEL_S, RANKS_S, COUNTERS_S = 75.0, 45.0, 75.0, 60.0
LEAST_S = 8.0
"""A step is not begun with less time than this."""
MODELS = ("resnet", "bert", "gpt")


@dataclass(frozen=True)
class Setting:
    """Where and how everything runs."""

    device: str
    tiny: bool
    out: Path

    @property
    def options(self) -> list[str]:
        return ["--device", self.device, *(["--tiny"] if self.tiny else [])]


@dataclass(frozen=True)
class Step:
    """A part of the result, the seconds it may take, and what makes it within a limit."""

    name: str
    limit: float
    make: Callable[[float], dict[str, Any]]


class NotDone(Exception):
    """Why a step gave nothing."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, default=225.0, help="no step goes on longer")
    parser.add_argument("--out", type=Path, required=True)


def main(given: argparse.Namespace) -> None:
    given.out.mkdir(parents=True, exist_ok=True)
    setting = Setting(given.device, given.tiny, given.out)
    path = given.out / "workload_gpu.json"
    body = json.loads(path.read_text()) if path.exists() else {"steps": {}}
    end = monotonic() + given.seconds
    body |= {**head(), "kind": "measured", "about": about(setting)}
    for step in steps(setting, body["about"]["gpus"]):
        if "failed" not in body["steps"].get(step.name, {"failed": ""}):
            continue
        body["steps"][step.name] = _done(step, end - monotonic())
        write_atomically(path, (json.dumps(body) + "\n").encode())
    missing = {k: v["failed"] for k, v in body["steps"].items() if "failed" in v}
    print(f"{len(body['steps']) - len(missing)} of {len(body['steps'])} steps done", missing)


def about(setting: Setting) -> dict[str, Any]:
    """What it runs on; asked in a process of its own, which then frees the GPU."""
    ask = (
        "import json, torch, transformers; c = torch.cuda; n = c.device_count(); "
        "print(json.dumps({'torch': torch.__version__, 'transformers': transformers.__version__, "
        "'gpus': n, 'device': c.get_device_name(0) if n else 'none', "
        "'cudnn': torch.backends.cudnn.version(), 'cuda': torch.version.cuda}))"
    )
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "options": setting.options}


def steps(setting: Setting, gpus: int) -> list[Step]:
    """Everything to do, what matters most first."""
    found = [Step("operators", OPERATORS_S, partial(_operators, setting))]
    found += [Step(f"model {m}", MODEL_S, partial(_model, setting, m)) for m in MODELS]
    if gpus > 1 or setting.device == "cpu":
        found.append(Step("ranks", RANKS_S, partial(_ranks, setting)))
    if setting.device == "cuda":
        found += [Step(f"counters {m}", COUNTERS_S, partial(_counters, m)) for m in MODELS]
    return found


def _done(step: Step, left: float) -> dict[str, Any]:
    limit = min(step.limit, left)
    if limit < LEAST_S:
        return {"failed": "no time was left"}
    began = monotonic()
    try:
        found = step.make(limit)
    except (NotDone, OSError, ValueError, subprocess.SubprocessError) as error:
        found = {"failed": f"{type(error).__name__}: {error}"[:1000]}
    took = round(monotonic() - began, 1)
    print(step.name, "failed" if "failed" in found else "done", f"in {took} s", flush=True)
    return {**found, "took_seconds": took}


def _run(words: list[str], limit: float) -> None:
    command = [sys.executable, "-m", *words]
    code, _, said = run_within(command, limit)
    if code:
        raise NotDone(f"exit code {code}: {said.strip()[-800:]}")


def _operators(setting: Setting, limit: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "part.json"
        _run(["benchmarks.workload.gpu_operators", *setting.options, "--out", str(out)], limit)
        return _read(out)


def _model(setting: Setting, name: str, limit: float) -> dict[str, Any]:
    trace = setting.out / f"{name}.json.gz"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "part.json"
        words = ["benchmarks.workload.gpu_profile", "--model", name, *setting.options]
        _run([*words, "--out", str(out), "--trace", str(trace)], limit)
        return _read(out)


def _ranks(setting: Setting, limit: float) -> dict[str, Any]:
    """Two ranks side by side; what the first wrote counts even where time ran out later."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out = setting.out / "ranks_part.json"
    out.unlink(missing_ok=True)
    words = ["-m", "benchmarks.workload.gpu_ranks", *setting.options, "--out", str(out)]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, *words, "--trace", "ddp"],
            env={"NCCL_NVLS_ENABLE": "0", **os.environ, **shared, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    end, said = monotonic() + limit, ""
    try:
        for one in ranks:
            said += one.communicate(timeout=max(0.1, end - monotonic()))[1][-600:]
    except subprocess.TimeoutExpired:
        said += f"time ran out after {limit:.0f} s"
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    if not out.exists():
        raise NotDone(said)
    found = _read(out)
    out.unlink()
    return {**found, **({"incomplete": said} if any(one.returncode for one in ranks) else {})}


def _counters(name: str, limit: float) -> dict[str, Any]:
    ncu = find_ncu()
    if ncu is None:
        raise NotDone("there is no ncu on the path")
    return count(ncu, name, limit)


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found
