"""Measurements on a GPU for ``benchmarks.workload.fit``: features, operator times, profiles.

    NCCL_NVLS_ENABLE=0 python -m benchmarks run workload.gpu --out OUT_DIR
    python -m benchmarks run workload.gpu --device cpu --tiny --out OUT_DIR      (a test run)

Writes OUT_DIR/workload_gpu.json and small traces.  Each measurement is a process with a time limit.
A second run with the same OUT_DIR repeats only measurements that failed.  Measurements with several
GPUs need at least two visible GPUs, and those with hardware counters need ncu.  A failed
measurement has its reason in the result file.
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
from nostall.core.files.atomic import write_atomically

OPERATORS_S, MODEL_S, RANKS_S, COUNTERS_S = 75.0, 45.0, 75.0, 60.0
"""Time limits in seconds."""
MIN_S = 8.0
"""A measurement does not start if fewer seconds are left."""
MODELS = ("resnet", "bert", "gpt")


@dataclass(frozen=True)
class Setting:
    """Device, model size and output folder of all measurements."""

    device: str
    tiny: bool
    out: Path

    @property
    def options(self) -> list[str]:
        """The command-line options of the measuring scripts."""
        return ["--device", self.device, *(["--tiny"] if self.tiny else [])]


@dataclass(frozen=True)
class Measurement:
    """One entry of the result file."""

    name: str
    limit: float
    """Seconds that it may take."""
    run: Callable[[float], dict[str, Any]]
    """Measures within a limit in seconds."""


class MeasurementFailed(Exception):
    """A measurement gave no result; the message is the reason."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument(
        "--seconds", type=float, default=225.0, help="time limit of all measurements together"
    )
    parser.add_argument("--out", type=Path, required=True)


def main(options: argparse.Namespace) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    setting = Setting(options.device, options.tiny, options.out)
    path = options.out / "workload_gpu.json"
    body = json.loads(path.read_text()) if path.exists() else {"steps": {}}
    end = monotonic() + options.seconds
    body |= {**head(), "kind": "measured", "about": environment(setting)}
    results = body["steps"]
    for measurement in measurements(setting, body["about"]["gpus"]):
        if "failed" not in results.get(measurement.name, {"failed": ""}):
            continue
        results[measurement.name] = _run_measurement(measurement, end - monotonic())
        write_atomically(path, (json.dumps(body) + "\n").encode())
    failed = {name: result["failed"] for name, result in results.items() if "failed" in result}
    print(f"{len(results) - len(failed)} of {len(results)} measurements done", failed)


def environment(setting: Setting) -> dict[str, Any]:
    """Versions and GPU, read in a process of its own that frees the GPU when it exits."""
    code = (
        "import json, torch, transformers; c = torch.cuda; n = c.device_count(); "
        "print(json.dumps({'torch': torch.__version__, 'transformers': transformers.__version__, "
        "'gpus': n, 'device': c.get_device_name(0) if n else 'none', "
        "'cudnn': torch.backends.cudnn.version(), 'cuda': torch.version.cuda}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    versions: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**versions, "options": setting.options}


def measurements(setting: Setting, gpus: int) -> list[Measurement]:
    """All measurements, the most important first."""
    planned = [Measurement("operators", OPERATORS_S, partial(_operators, setting))]
    planned += [Measurement(f"model {m}", MODEL_S, partial(_model, setting, m)) for m in MODELS]
    if gpus > 1 or setting.device == "cpu":
        planned.append(Measurement("ranks", RANKS_S, partial(_ranks, setting)))
    if setting.device == "cuda":
        planned += [Measurement(f"counters {m}", COUNTERS_S, partial(_counters, m)) for m in MODELS]
    return planned


def _run_measurement(measurement: Measurement, remaining: float) -> dict[str, Any]:
    limit = min(measurement.limit, remaining)
    if limit < MIN_S:
        return {"failed": "no time was left"}
    start = monotonic()
    try:
        result = measurement.run(limit)
    except (MeasurementFailed, OSError, ValueError, subprocess.SubprocessError) as error:
        result = {"failed": f"{type(error).__name__}: {error}"[:1000]}
    seconds = round(monotonic() - start, 1)
    state = "failed" if "failed" in result else "done"
    print(measurement.name, state, f"in {seconds} s", flush=True)
    return {**result, "took_seconds": seconds}


def _run_script(arguments: list[str], limit: float) -> None:
    code, _, errors = run_within([sys.executable, "-m", *arguments], limit)
    if code:
        raise MeasurementFailed(f"exit code {code}: {errors.strip()[-800:]}")


def _operators(setting: Setting, limit: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "part.json"
        script = ["benchmarks.workload.gpu_operators", *setting.options, "--out", str(out)]
        _run_script(script, limit)
        return _read_json(out)


def _model(setting: Setting, name: str, limit: float) -> dict[str, Any]:
    trace = setting.out / f"{name}.json.gz"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "part.json"
        script = ["benchmarks.workload.gpu_profile", "--model", name, *setting.options]
        _run_script([*script, "--out", str(out), "--trace", str(trace)], limit)
        return _read_json(out)


def _ranks(setting: Setting, limit: float) -> dict[str, Any]:
    """Run two ranks.  If the limit is reached, the parts that rank 0 has written are used."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out = setting.out / "ranks_part.json"
    out.unlink(missing_ok=True)
    script = ["-m", "benchmarks.workload.gpu_ranks", *setting.options, "--out", str(out)]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, *script, "--trace", "ddp"],
            env={"NCCL_NVLS_ENABLE": "0", **os.environ, **group, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    end, errors = monotonic() + limit, ""
    try:
        for process in processes:
            errors += process.communicate(timeout=max(0.1, end - monotonic()))[1][-600:]
    except subprocess.TimeoutExpired:
        errors += f"time ran out after {limit:.0f} s"
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if not out.exists():
        raise MeasurementFailed(errors)
    result = _read_json(out)
    out.unlink()
    is_incomplete = any(process.returncode for process in processes)
    return {**result, **({"incomplete": errors} if is_incomplete else {})}


def _counters(name: str, limit: float) -> dict[str, Any]:
    ncu = find_ncu()
    if ncu is None:
        raise MeasurementFailed("ncu is not on the path")
    return count(ncu, name, limit)


def _read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content
