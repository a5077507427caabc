"""Does the measuring itself hold on a GPU?  Inputs, comparisons, clocks, nulls, overlap, refusals.

    python -m benchmarks run sass.measurement_checks \\
        --out benchmarks/sass/results/measurement_checks.json

Each part is done once and kept; a second run does only what is missing or failed, so ``--limit``
seconds are enough at a time.  ``--part`` names parts; ``million`` (ten million samples of one
kernel) runs only when it is named.  Needs a GPU of compute capability 9.0.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from benchmarks.harness.result_file import save
from benchmarks.kernels.examples import EXAMPLES
from nostall.core import Budget, Buffer, Comparison, LaunchSpec, NostallError, Tolerance
from nostall.gpu import TIMING_METHODS, Device, Kernel, LocalGpu, MeasurementPlan, Outcome
from nostall.gpu.sanitizer import sanitize
from nostall.sass import Program
from nostall.sass.binary.cubin import Cubin
from nostall.sass.schedule import ScheduleSpace
from nostall.search import Anneal
from nostall.tuning.gpu_objective import GpuObjective
from nostall.tuning.source import Source, compile_triton, load_cubin

Body = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
KERNELS = ("dot_product", "transpose", "rmsnorm", "softmax", "gemm_leakyrelu@mma")
FEW = ("dot_product", "gemm_leakyrelu@mma")


@lru_cache
def source(name: str) -> Source:
    """An example kernel, compiled for sm_90."""
    if name in ("dot_product", "transpose"):
        launch = LaunchSpec.from_toml(EXAMPLES / "nvcc" / f"{name}.toml")
        return load_cubin(EXAMPLES / "nvcc" / f"{name}.sm_90.cubin", None, launch)
    return compile_triton(EXAMPLES / f"{name.partition('@')[0]}.py", name)


def kernel(name: str) -> Kernel:
    found = source(name)
    assert found.launch is not None
    return Kernel(found.cubin, found.kernel, found.launch)


def inputs() -> Body:
    """Inputs made on the device against the formula in numpy, bit for bit; and comparisons."""
    from tests.unit.gpu.test_device_code import COUNT, DTYPES, near_pairs, reference

    from nostall.gpu import device_code
    from nostall.gpu.buffers import Buffers
    from nostall.gpu.driver import Cuda

    cuda, made, compared = Cuda(), {}, {}
    for dtype in DTYPES:
        spec = Buffer(name="x", dtype=dtype, shape=(COUNT,), low=-3.0, high=2.0, bound=200)
        buffers = Buffers(cuda, LaunchSpec(args=(spec,)), 1, 0, None)
        number = (1 << 40) + 5
        buffers.set_sample(number)
        buffers.generate_inputs(0)
        wanted = reference(dtype, number, -3.0, 5.0, 200, key=0x5851F42D4C957F2D)
        got = cuda.download(buffers._inputs[0]["x"], wanted.nbytes)
        made[dtype] = bool(got.tobytes() == wanted.tobytes())
        buffers.release()
    for dtype in sorted(device_code.FLOAT_DTYPES):
        near = Tolerance(rtol=1e-3, atol=1e-4)
        got, expected, wrong = near_pairs(dtype, near.rtol, near.atol)
        spec = Buffer(name="y", dtype=dtype, shape=(len(got),), role="out")
        buffers = Buffers(cuda, LaunchSpec(args=(spec,)), 1, 0, near)
        for values, is_expected in ((expected, True), (got, False)):
            data = np.ascontiguousarray(values)
            cuda.call("cuMemcpyHtoDAsync", buffers.pointers["y"], data, data.nbytes, cuda.stream)
            cuda.synchronize()
            if is_expected:
                buffers.save_expected(0)
        compared[dtype] = {"wrong": buffers.count_mismatches(0), "numpy": wrong}
        buffers.release()
    right = all(made.values()) and all(c["wrong"] == c["numpy"] for c in compared.values())
    return {"right": right, "inputs_equal": made, "beyond_tolerance": compared}


def unsafe() -> Body:
    """Neighbours exchanged without asking the rules: every fate is survived, and told."""
    fates: dict[str, int] = {}
    details: list[str] = []
    for name in ("dot_product", "rmsnorm"):
        found = source(name)
        text = next(t for t in Cubin.parse(found.cubin).texts if t.name == found.kernel)
        rng = np.random.default_rng(0)
        with LocalGpu(kernel(name), MeasurementPlan(deadline=4.0)) as gpu:
            for at in rng.choice(text.size // 16 - 2, 8, replace=False):
                here = text.file_offset + 16 * int(at)
                data = found.cubin
                swapped = data[here + 16 : here + 32] + data[here : here + 16]
                outcome = gpu.evaluate(data[:here] + swapped + data[here + 32 :])
                fates[outcome.status] = fates.get(outcome.status, 0) + 1
                if outcome.timing is None and len(details) < 6:
                    details.append(f"{name}: {outcome.status}: {outcome.detail[:150]}")
            again = gpu.evaluate(found.cubin)
            details.append(f"{name}: the original afterwards: {again.status}")
    return {"fates": fates, "details": details}


def samples(name: str, checks: int = 20_000) -> Body:
    """Samples a second when the original is checked against itself."""
    with LocalGpu(kernel(name)) as gpu:
        outcome = gpu.compare(source(name).cubin, 16, checks)
    spent = outcome.phase_seconds.get("check", float("nan"))
    timing = outcome.timing
    return {
        "fate": outcome.status,
        "detail": outcome.detail,
        "samples": checks,
        "check_s": round(spent, 3),
        "samples_per_s": round(checks / spent),
        "us": float(np.median(timing.original)) * 1e6 if timing else None,
    }


def nulls(name: str, repeats: int = 4) -> Body:
    """The original against itself, in fresh processes, with one load of each side and with 8."""
    found: Body = {}
    for loads in (1, MeasurementPlan().loads):
        rows = []
        with LocalGpu(kernel(name), MeasurementPlan(loads=loads)) as gpu:
            for _ in range(repeats):
                outcome = gpu.compare(source(name).cubin, 200, 1)
                if outcome.timing is None:
                    return {"fate": outcome.status, "detail": outcome.detail}
                timing = outcome.timing
                compared = Comparison.from_samples(
                    timing.original,
                    timing.candidate,
                    timing.null,
                    kind="measured",
                    loads=timing.loads,
                )
                keys = ("ratio", "low", "high", "null_low", "null_high", "verdict")
                rows.append({key: getattr(compared, key) for key in keys})
        excluded = sum(not r["low"] <= 1 <= r["high"] for r in rows)
        excluded += sum(not r["null_low"] <= 1 <= r["null_high"] for r in rows)
        claimed = sum(r["verdict"] != "same" for r in rows)
        found[f"{loads} loads"] = {
            "intervals": 2 * repeats,
            "without_1": excluded,
            "verdicts_not_same": claimed,
            "comparisons": rows,
        }
    return found


def clocks(name: str) -> Body:
    """The same kernel by every clock, warm and cold; microseconds a launch."""
    found: Body = {}
    for clock in TIMING_METHODS:
        for cold in (False, True):
            label = f"{clock}, {'cold' if cold else 'warm'}"
            try:
                with LocalGpu(kernel(name), MeasurementPlan(clock=clock, cold=cold)) as gpu:
                    outcome = gpu.evaluate(source(name).cubin)
            except NostallError as error:
                found[label] = {"refused": str(error), "exit_code": error.exit_code}
                continue
            timing = outcome.timing
            found[label] = {"fate": outcome.status, "detail": outcome.detail[:300]}
            if timing is not None:
                us = np.asarray(timing.original) * 1e6
                found[label] |= {"us": float(np.median(us)), "spread_us": float(np.ptp(us))}
    return found


class Waiting:
    """A device that is not asked while it works."""

    def __init__(self, device: Device) -> None:
        self.device, self.info = device, device.info

    def evaluate(self, cubin: bytes) -> Outcome:
        return self.device.evaluate(cubin)

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        return self.device.compare(cubin, rounds, checks)


def throughput(name: str, seconds: float = 3.0) -> Body:
    """Candidates a second, without and with the next ones prepared meanwhile."""
    program = Program.from_cubin(source(name).cubin)
    space = ScheduleSpace(program, program.kernel(source(name).kernel))
    launch = source(name).launch
    found: Body = {}
    with LocalGpu(kernel(name)) as gpu:
        first = GpuObjective(space, gpu, launch.flops if launch else None)
        Anneal().run(space, first, Budget(evaluations=30))  # everything is compiled after this
        for label, device in (("one by one", Waiting(gpu)), ("overlapped", gpu)):
            measured = GpuObjective(space, device, launch.flops if launch else None)
            ended = Anneal().run(space, measured, Budget(seconds=seconds), seed=1)
            parts = {part: s / ended.seconds for part, s in measured.phase_seconds.items()}
            found[label] = {
                "per_s": round(ended.evaluations / ended.seconds, 1),
                "fates": dict(measured.outcome_counts),
                "share": {part: round(share, 3) for part, share in parts.items()},
                "start_us": ended.start_measurement.value * 1e6,
            }
    return found


def refusals() -> Body:
    """What cannot be measured, and what is said then."""

    def opened(what: Kernel, plan: MeasurementPlan | None = None) -> str:
        with LocalGpu(what, plan) as gpu:
            return f"accepted: {gpu.compare(what.cubin, 8, 64).status}"

    small = kernel("transpose")
    big = Buffer(name="x", dtype="f32", shape=(1 << 20, 1 << 16))
    args = tuple(big if a.name == "x" else a for a in small.launch.args)
    huge = replace(small, launch=small.launch.model_copy(update={"args": args}))
    other = replace(small, cubin=(EXAMPLES / "nvcc" / "transpose.sm_80.cubin").read_bytes())
    adding = compile_triton(ROOT / "benchmarks" / "unrepeatable.py", "atomic_sum")
    assert adding.launch is not None
    unrepeatable = Kernel(adding.cubin, adding.kernel, adding.launch)
    tried: dict[str, Callable[[], str]] = {
        "out of memory": lambda: opened(huge),
        "wrong architecture": lambda: opened(other),
        "not deterministic": lambda: opened(unrepeatable),
        "not deterministic, --tolerance 1e-3": lambda: opened(
            unrepeatable, MeasurementPlan(tolerance=Tolerance(rtol=1e-3))
        ),
    }
    found: Body = {}
    for label, attempt in tried.items():
        try:
            found[label] = {"said": attempt()}
        except NostallError as error:
            found[label] = {"said": str(error), "exit_code": error.exit_code}
    return found


def sanitizer() -> Body:
    """compute-sanitizer over unchanged kernels."""
    return {
        name: {tool: vars(said) for tool, said in sanitize(k, k.cubin, MeasurementPlan()).items()}
        for name, k in ((name, kernel(name)) for name in ("dot_product", "rmsnorm"))
    }


def command(*flags: str) -> Body:
    """``nostall tune`` from end to end."""
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        line = [
            *(sys.executable, "-m", "nostall", "tune", str(EXAMPLES / "rmsnorm.py:rmsnorm")),
            *("--objective", "gpu", "--seconds", "5", "--checks", "2000", "--no-store"),
            *("--out", str(Path(folder) / "run"), "--format", "json", *flags),
        ]
        done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    body: Body = {"exit_code": done.returncode, "said": done.stderr[-500:]}
    if done.returncode == 0:
        result = json.loads(done.stdout)
        result["comparison"].pop("samples", None)
        keys = ("ratio", "improved", "evaluations", "fates", "spent", "comparison", "sanitizer")
        body |= {key: result.get(key) for key in keys}
    return body


def parts() -> dict[str, Callable[[], Body]]:
    """Every part by its name, in the order of what is needed most."""
    found: dict[str, Callable[[], Body]] = {"inputs": inputs, "refusals": refusals}
    found["command"] = lambda: command()
    for name in KERNELS:
        found[f"throughput {name}"] = lambda name=name: throughput(name)  # type: ignore[misc]
    for name in FEW:
        found[f"clocks {name}"] = lambda name=name: clocks(name)  # type: ignore[misc]
    found["unsafe"] = unsafe
    for name in FEW:
        found[f"samples {name}"] = lambda name=name: samples(name)  # type: ignore[misc]
        found[f"nulls {name}"] = lambda name=name: nulls(name)  # type: ignore[misc]
    found["sanitizer"] = sanitizer
    found["command, sanitizer"] = lambda: command("--sanitizer")
    found["million"] = lambda: samples("dot_product", 10_000_000)
    return found


def _wanted(done: Body, only: list[str] | None) -> Iterator[tuple[str, Callable[[], Body]]]:
    for name, part in parts().items():
        missing = name not in done or "error" in done[name]
        chosen = name != "million" if only is None else any(re.match(o, name) for o in only)
        if missing and chosen:
            yield name, part


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=240.0, help="begin nothing after so many s")
    parser.add_argument("--part", nargs="*", help="only parts that begin so")


def main(options: argparse.Namespace) -> None:
    started = monotonic()
    before: Body = json.loads(options.out.read_text()) if options.out.exists() else {}
    done: Body = before.get("parts", {})
    about: Body = before.get("about", {})
    for name, part in _wanted(done, options.part):
        if monotonic() - started > options.limit:
            print("the time is up; run again for the rest", flush=True)
            break
        began = monotonic()
        try:
            if not about:
                with LocalGpu(kernel("dot_product")) as gpu:
                    about = dict(gpu.info)
            body = part()
        except NostallError as error:
            body = {"error": str(error), "exit_code": error.exit_code}
        except Exception as error:  # the other parts are worth having
            body = {"error": repr(error), "trace": traceback.format_exc()[-1500:]}
        done[name] = {**body, "seconds": round(monotonic() - began, 2)}
        print(name, json.dumps(done[name])[:600], flush=True)
        save(options.out, kind="measured", about=about, parts=done)
