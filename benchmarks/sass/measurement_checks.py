"""Checks of measuring on a GPU: inputs, comparisons, clocks, nulls, overlap, error texts.

    python -m benchmarks run sass.measurement_checks \\
        --out benchmarks/sass/results/measurement_checks.json

The file is written after each part. A second run does only missing or failed parts, so ``--limit``
can split the work. ``--part`` selects parts; ``million`` (ten million samples of one kernel) runs
only if it is selected. Needs a GPU of compute capability 9.0.
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
from nostall.tuning.sources.source import Source, load_cubin
from nostall.tuning.sources.triton_source import compile_triton

Body = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
KERNELS = ("dot_product", "transpose", "rmsnorm", "softmax", "gemm_leakyrelu@mma")
TWO_KERNELS = ("dot_product", "gemm_leakyrelu@mma")


@lru_cache
def source(name: str) -> Source:
    """An example kernel, compiled for sm_90."""
    if name in ("dot_product", "transpose"):
        launch = LaunchSpec.from_toml(EXAMPLES / "nvcc" / f"{name}.toml")
        return load_cubin(EXAMPLES / "nvcc" / f"{name}.sm_90.cubin", None, launch)
    return compile_triton(EXAMPLES / f"{name.partition('@')[0]}.py", name)


def kernel(name: str) -> Kernel:
    """An example kernel with its launch."""
    example = source(name)
    assert example.launch is not None
    return Kernel(example.cubin, example.kernel, example.launch)


def inputs() -> Body:
    """Compare device-made inputs and mismatch counts with those of numpy, bit for bit."""
    from tests.unit.gpu.evaluator.test_device_code import COUNT, DTYPES, near_pairs, reference

    from nostall.gpu.driver import Cuda
    from nostall.gpu.evaluator import device_code
    from nostall.gpu.evaluator.checking import Buffers

    cuda, equal, mismatches = Cuda(), {}, {}
    for dtype in DTYPES:
        spec = Buffer(name="x", dtype=dtype, shape=(COUNT,), low=-3.0, high=2.0, bound=200)
        buffers = Buffers(cuda, LaunchSpec(args=(spec,)), 1, 0, None)
        number = (1 << 40) + 5
        buffers.set_sample(number)
        buffers.generate_inputs(0)
        expected_input = reference(dtype, number, -3.0, 5.0, 200, key=0x5851F42D4C957F2D)
        got = cuda.download(buffers._inputs[0]["x"], expected_input.nbytes)
        equal[dtype] = bool(got.tobytes() == expected_input.tobytes())
        buffers.release()
    for dtype in sorted(device_code.FLOAT_DTYPES):
        tolerance = Tolerance(rtol=1e-3, atol=1e-4)
        got, expected, wrong = near_pairs(dtype, tolerance.rtol, tolerance.atol)
        spec = Buffer(name="y", dtype=dtype, shape=(len(got),), role="out")
        buffers = Buffers(cuda, LaunchSpec(args=(spec,)), 1, 0, tolerance)
        for values, is_expected in ((expected, True), (got, False)):
            data = np.ascontiguousarray(values)
            cuda.call("cuMemcpyHtoDAsync", buffers.pointers["y"], data, data.nbytes, cuda.stream)
            cuda.synchronize()
            if is_expected:
                buffers.save_expected(0)
        mismatches[dtype] = {"wrong": buffers.count_mismatches(0), "numpy": wrong}
        buffers.release()
    right = all(equal.values()) and all(c["wrong"] == c["numpy"] for c in mismatches.values())
    return {"right": right, "inputs_equal": equal, "beyond_tolerance": mismatches}


def unsafe() -> Body:
    """Swap neighbouring instructions without checks; the GPU process must survive each outcome."""
    outcome_counts: dict[str, int] = {}
    details: list[str] = []
    for name in ("dot_product", "rmsnorm"):
        original = source(name)
        texts = Cubin.parse(original.cubin).texts
        text = next(t for t in texts if t.name == original.kernel)
        rng = np.random.default_rng(0)
        with LocalGpu(kernel(name), MeasurementPlan(deadline=4.0)) as gpu:
            for at in rng.choice(text.size // 16 - 2, 8, replace=False):
                offset = text.file_offset + 16 * int(at)
                data = original.cubin
                swapped = data[offset + 16 : offset + 32] + data[offset : offset + 16]
                outcome = gpu.evaluate(data[:offset] + swapped + data[offset + 32 :])
                outcome_counts[outcome.status] = outcome_counts.get(outcome.status, 0) + 1
                if outcome.timing is None and len(details) < 6:
                    details.append(f"{name}: {outcome.status}: {outcome.detail[:150]}")
            afterwards = gpu.evaluate(original.cubin)
            details.append(f"{name}: the original afterwards: {afterwards.status}")
    return {"fates": outcome_counts, "details": details}


def samples(name: str, checks: int = 20_000) -> Body:
    """Random inputs per second on which the original is compared with itself."""
    with LocalGpu(kernel(name)) as gpu:
        outcome = gpu.compare(source(name).cubin, 16, checks)
    seconds = outcome.phase_seconds.get("check", float("nan"))
    timing = outcome.timing
    return {
        "fate": outcome.status,
        "detail": outcome.detail,
        "samples": checks,
        "check_s": round(seconds, 3),
        "samples_per_s": round(checks / seconds),
        "us": float(np.median(timing.original)) * 1e6 if timing else None,
    }


def nulls(name: str, repeats: int = 4) -> Body:
    """Compare the original with itself in new processes, with one load a side and with more."""
    comparisons: Body = {}
    for loads in (1, MeasurementPlan().loads):
        rows = []
        with LocalGpu(kernel(name), MeasurementPlan(loads=loads)) as gpu:
            for _ in range(repeats):
                outcome = gpu.compare(source(name).cubin, 200, 1)
                if outcome.timing is None:
                    return {"fate": outcome.status, "detail": outcome.detail}
                timing = outcome.timing
                comparison = Comparison.from_samples(
                    timing.original,
                    timing.candidate,
                    timing.null,
                    kind="measured",
                    loads=timing.loads,
                )
                keys = ("ratio", "low", "high", "null_low", "null_high", "verdict")
                rows.append({key: getattr(comparison, key) for key in keys})
        excluded = sum(not r["low"] <= 1 <= r["high"] for r in rows)
        excluded += sum(not r["null_low"] <= 1 <= r["null_high"] for r in rows)
        claimed = sum(r["verdict"] != "same" for r in rows)
        comparisons[f"{loads} loads"] = {
            "intervals": 2 * repeats,
            "without_1": excluded,
            "verdicts_not_same": claimed,
            "comparisons": rows,
        }
    return comparisons


def clocks(name: str) -> Body:
    """Time a kernel with each timing method, with warm and cold L2; microseconds a launch."""
    times: Body = {}
    for clock in TIMING_METHODS:
        for cold in (False, True):
            label = f"{clock}, {'cold' if cold else 'warm'}"
            try:
                with LocalGpu(kernel(name), MeasurementPlan(clock=clock, cold=cold)) as gpu:
                    outcome = gpu.evaluate(source(name).cubin)
            except NostallError as error:
                times[label] = {"refused": str(error), "exit_code": error.exit_code}
                continue
            timing = outcome.timing
            times[label] = {"fate": outcome.status, "detail": outcome.detail[:300]}
            if timing is not None:
                us = np.asarray(timing.original) * 1e6
                times[label] |= {"us": float(np.median(us)), "spread_us": float(np.ptp(us))}
    return times


class BlockingDevice:
    """A device without asynchronous evaluation, so that nothing overlaps."""

    def __init__(self, device: Device) -> None:
        self.device, self.info = device, device.info

    def evaluate(self, cubin: bytes) -> Outcome:
        return self.device.evaluate(cubin)

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        return self.device.compare(cubin, rounds, checks)


def throughput(name: str, seconds: float = 3.0) -> Body:
    """Candidates per second, one by one and with the next candidates prepared during timing."""
    program = Program.from_cubin(source(name).cubin)
    space = ScheduleSpace(program, program.kernel(source(name).kernel))
    launch = source(name).launch
    rates: Body = {}
    with LocalGpu(kernel(name)) as gpu:
        warm_up = GpuObjective(space, gpu, launch.flops if launch else None)
        Anneal().run(space, warm_up, Budget(evaluations=30))  # numba compiles here
        for label, device in (("one by one", BlockingDevice(gpu)), ("overlapped", gpu)):
            objective = GpuObjective(space, device, launch.flops if launch else None)
            result = Anneal().run(space, objective, Budget(seconds=seconds), seed=1)
            parts = {part: s / result.seconds for part, s in objective.phase_seconds.items()}
            rates[label] = {
                "per_s": round(result.evaluations / result.seconds, 1),
                "fates": dict(objective.outcome_counts),
                "share": {part: round(share, 3) for part, share in parts.items()},
                "start_us": result.start_measurement.value * 1e6,
            }
    return rates


def refusals() -> Body:
    """Error texts and exit codes for kernels that cannot be measured."""

    def measure(kernel: Kernel, plan: MeasurementPlan | None = None) -> str:
        with LocalGpu(kernel, plan) as gpu:
            return f"accepted: {gpu.compare(kernel.cubin, 8, 64).status}"

    small = kernel("transpose")
    big = Buffer(name="x", dtype="f32", shape=(1 << 20, 1 << 16))
    args = tuple(big if a.name == "x" else a for a in small.launch.args)
    huge = replace(small, launch=small.launch.model_copy(update={"args": args}))
    wrong_arch = replace(small, cubin=(EXAMPLES / "nvcc" / "transpose.sm_80.cubin").read_bytes())
    file = ROOT / "benchmarks" / "kernels" / "nondeterministic.py"
    atomic_sum = compile_triton(file, "atomic_sum")
    assert atomic_sum.launch is not None
    nondeterministic = Kernel(atomic_sum.cubin, atomic_sum.kernel, atomic_sum.launch)
    attempts: dict[str, Callable[[], str]] = {
        "out of memory": lambda: measure(huge),
        "wrong architecture": lambda: measure(wrong_arch),
        "not deterministic": lambda: measure(nondeterministic),
        "not deterministic, --tolerance 1e-3": lambda: measure(
            nondeterministic, MeasurementPlan(tolerance=Tolerance(rtol=1e-3))
        ),
    }
    texts: Body = {}
    for label, attempt in attempts.items():
        try:
            texts[label] = {"said": attempt()}
        except NostallError as error:
            texts[label] = {"said": str(error), "exit_code": error.exit_code}
    return texts


def sanitizer() -> Body:
    """Results of compute-sanitizer on unchanged kernels."""
    return {
        name: {
            tool: vars(result) for tool, result in sanitize(k, k.cubin, MeasurementPlan()).items()
        }
        for name, k in ((name, kernel(name)) for name in ("dot_product", "rmsnorm"))
    }


def command(*flags: str) -> Body:
    """Run ``nostall tune`` end to end."""
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        line = [
            *(sys.executable, "-m", "nostall", "tune", str(EXAMPLES / "rmsnorm.py:rmsnorm")),
            *("--objective", "gpu", "--seconds", "5", "--checks", "2000", "--no-store"),
            *("--out", str(Path(folder) / "run"), "--format", "json", *flags),
        ]
        process = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    body: Body = {"exit_code": process.returncode, "said": process.stderr[-500:]}
    if process.returncode == 0:
        result = json.loads(process.stdout)
        result["comparison"].pop("samples", None)
        keys = ("ratio", "improved", "evaluations", "fates", "spent", "comparison", "sanitizer")
        body |= {key: result.get(key) for key in keys}
    return body


def parts() -> dict[str, Callable[[], Body]]:
    """All parts by name, the most important first."""
    by_name: dict[str, Callable[[], Body]] = {"inputs": inputs, "refusals": refusals}
    by_name["command"] = lambda: command()
    for name in KERNELS:
        by_name[f"throughput {name}"] = lambda name=name: throughput(name)  # type: ignore[misc]
    for name in TWO_KERNELS:
        by_name[f"clocks {name}"] = lambda name=name: clocks(name)  # type: ignore[misc]
    by_name["unsafe"] = unsafe
    for name in TWO_KERNELS:
        by_name[f"samples {name}"] = lambda name=name: samples(name)  # type: ignore[misc]
        by_name[f"nulls {name}"] = lambda name=name: nulls(name)  # type: ignore[misc]
    by_name["sanitizer"] = sanitizer
    by_name["command, sanitizer"] = lambda: command("--sanitizer")
    by_name["million"] = lambda: samples("dot_product", 10_000_000)
    return by_name


def _missing_parts(done: Body, only: list[str] | None) -> Iterator[tuple[str, Callable[[], Body]]]:
    for name, part in parts().items():
        missing = name not in done or "error" in done[name]
        is_selected = name != "million" if only is None else any(re.match(o, name) for o in only)
        if missing and is_selected:
            yield name, part


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--limit", type=float, default=240.0, help="start no part after so many seconds"
    )
    parser.add_argument(
        "--part", nargs="*", help="only parts whose names start with these patterns"
    )


def main(options: argparse.Namespace) -> None:
    started = monotonic()
    before: Body = json.loads(options.out.read_text()) if options.out.exists() else {}
    done: Body = before.get("parts", {})
    about: Body = before.get("about", {})
    for name, part in _missing_parts(done, options.part):
        if monotonic() - started > options.limit:
            print("the time is up; run again for the other parts", flush=True)
            break
        began = monotonic()
        try:
            if not about:
                with LocalGpu(kernel("dot_product")) as gpu:
                    about = dict(gpu.info)
            body = part()
        except NostallError as error:
            body = {"error": str(error), "exit_code": error.exit_code}
        except Exception as error:  # recorded; the other parts still run
            body = {"error": repr(error), "trace": traceback.format_exc()[-1500:]}
        done[name] = {**body, "seconds": round(monotonic() - began, 2)}
        print(name, json.dumps(done[name])[:600], flush=True)
        save(options.out, kind="measured", about=about, parts=done)
