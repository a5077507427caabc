"""Losses of 200 steps: the kept changes beside originals whose parameters moved by one rounding.

    python -m benchmarks run optimizing.losses --out OUT.json [--table TABLE.json]
        [--programs gpt_loop dlrm_train] [--steps 200] [--at-once 4] [--limit 140]

What `nostall optimize` kept of a program is read from the rows of ``optimizing.programs``.  The
program runs as written, again, and five times with each parameter multiplied by 1 - eps, 1 or
1 + eps before its optimiser is made: eps of the type that it computes in.  Then it runs with the
changes, made after two steps as `nostall apply --bundle` does.  Random numbers are held: seeds are
those of the program, and Inductor draws PyTorch's numbers.  The largest distance from the original
in each quarter of the steps, over the band, has to be at most 2; the band is the largest distance
of a moved original so far.  Only for this benchmark: `nostall optimize` compares copies of modules.
Native kernels are bit-equal by their own proof and are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.result_file import load, results, save
from benchmarks.optimizing.whole_programs import FOLDER, programs, split_of
from nostall.attach.program.shadow import TF32, Generators
from nostall.optimizing.program import program_environment

MOVED = 5
QUARTERS = 4
ALLOWED = 2.0
"""Distance of the changed program over the band."""
Curve = Sequence[float]


def judge(curves: Mapping[str, Curve]) -> dict[str, Any]:
    """The distances of ``changed`` and ``again`` from ``original`` over the band of ``moved N``."""
    original = curves["original"]
    moved = [curve for name, curve in curves.items() if name.startswith("moved")]
    steps = min(map(len, curves.values()))
    ends = [steps * number // QUARTERS for number in range(1, QUARTERS + 1)]

    def largest(curve: Curve, begin: int, end: int) -> float:
        pairs = zip(original[begin:end], curve[begin:end], strict=True)
        return max((abs(a - b) for a, b in pairs), default=0.0)

    bands = [max(largest(curve, 0, end) for curve in moved) for end in ends]
    found = [largest(curves["changed"], b, e) for b, e in zip([0, *ends], ends, strict=False)]
    shares = [0.0 if d == 0 else d / band if band else float("inf")
              for d, band in zip(found, bands, strict=True)]  # fmt: skip
    return {
        "steps": steps, "bands": bands, "distances": found, "over_band": max(shares),
        "is_within": max(shares) <= ALLOWED,
        "is_bit_equal": list(curves["changed"][:steps]) == list(original[:steps]),
        "original_repeats": list(curves["again"][:steps]) == list(original[:steps]),
    }  # fmt: skip


def kept_changes(row: Mapping[str, Any]) -> list[dict[str, str]]:
    """The changes that a row of ``optimizing.programs`` keeps, but for native kernels."""
    return [
        {**attempt["change"], "result_class": attempt["class"]}
        for attempt in row["optimize"].get("attempts", [])
        if attempt["outcome"] == "kept" and attempt["change"]["kind"] != "native"
    ]


def measure(
    name: str, changes: Sequence[Mapping[str, str]], options: argparse.Namespace
) -> dict[str, Any]:
    """The curves of one program, and the verdict on them."""
    begin = time.perf_counter()
    words = [str(FOLDER / f"{name}.py"), "--steps", str(options.steps)]
    words += ["--tiny"] if options.tiny else []
    with tempfile.TemporaryDirectory(prefix="nostall-losses-") as temporary:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{temporary}/inductor",
                  "TRITON_CACHE_DIR": f"{temporary}/triton"}  # fmt: skip
        plain = {**os.environ, **caches}
        machine = {"driver": None, "torch": _torch_version()}
        applied = program_environment(plain, {
            "folder": os.devnull, "director": 0, "step": None, "step_is": "", "bundle": name,
            "machine": machine, "changes": list(changes),
        })  # fmt: skip
        jobs = {kind: _start(kind, variables, words, Path(temporary))
                for kind, variables in (("originals", plain), ("changed", applied))}  # fmt: skip
        curves: dict[str, Curve] = {}
        for kind, process in jobs.items():
            until = max(1.0, options.ends - time.perf_counter())
            try:
                _, errors = process.communicate(timeout=until)
            except subprocess.TimeoutExpired:
                for other in jobs.values():
                    other.kill()
                raise TimeoutError(f"{kind} did not end in time") from None
            if process.returncode:
                raise RuntimeError(f"{kind}: {errors.decode(errors='replace').strip()[-300:]}")
            curves |= json.loads((Path(temporary) / f"{kind}.json").read_text())
            if kind == "changed" and b"not applied" in errors:
                raise RuntimeError(errors.decode(errors="replace").strip()[-300:])
    eps = curves.pop("eps")
    return {"split": split_of(name), "changes": list(changes), "eps": eps, **judge(curves),
            "seconds": time.perf_counter() - begin, "curves": curves}  # fmt: skip


def _torch_version() -> str:
    import torch  # lazy: only a measurement needs it

    return str(torch.__version__)


def _start(
    kind: str, variables: Mapping[str, str], words: Sequence[str], folder: Path
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.optimizing.losses", kind,
               str(folder / f"{kind}.json"), *words]  # fmt: skip
    return subprocess.Popen(
        command, env=dict(variables), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def child(kind: str, out: Path, words: Sequence[str]) -> None:
    """Run a program in this process once with changes, or several times without."""
    import torch
    import torch._inductor.config

    torch._inductor.config.fallback_random = True
    recorder = _Recorder(torch)
    runs = {"changed": 0} if kind == "changed" else {
        "original": 0, "again": 0, **{f"moved {n}": n for n in range(1, MOVED + 1)}
    }  # fmt: skip
    curves: dict[str, Any] = {}
    for name, moved in runs.items():
        recorder.begin(moved)
        sys.argv = list(words)
        runpy.run_path(words[0], run_name="__main__")
        curves[name] = [float(loss) for loss in recorder.losses]
    curves |= {} if kind == "changed" else {"eps": recorder.eps}
    out.write_text(json.dumps(curves))


class _Recorder:
    """Keeps the losses whose gradients a program asks for, and moves its parameters."""

    def __init__(self, torch: Any) -> None:
        self.losses: list[Any] = []
        self.moved, self.eps, self._is_moved = 0, float(torch.finfo(torch.float32).eps), set[int]()
        self.torch = torch
        backward, autocast = torch.Tensor.backward, torch.autocast.__enter__
        optimizer = torch.optim.Optimizer.__init__

        def kept(loss: Any, *args: Any, **kwargs: Any) -> Any:
            self.losses.append(loss.detach().clone())
            return backward(loss, *args, **kwargs)

        def entered(context: Any) -> Any:
            if context._enabled:
                self.eps = max(self.eps, float(torch.finfo(context.fast_dtype).eps))
            return autocast(context)

        def made(this: Any, *args: Any, **kwargs: Any) -> None:
            optimizer(this, *args, **kwargs)
            self.move([p for group in this.param_groups for p in group["params"]])

        torch.Tensor.backward, torch.autocast.__enter__ = kept, entered
        torch.optim.Optimizer.__init__ = made

    def begin(self, moved: int) -> None:
        """A run begins; ``moved``: number of the moved original, 0 for none."""
        self.losses, self.moved, self._is_moved = [], moved, set()

    def move(self, parameters: Sequence[Any]) -> None:
        """Move parameters by one rounding of what the program computes in."""
        torch = self.torch
        is_tf32 = torch.backends.cudnn.conv.fp32_precision == "tf32"
        for parameter in parameters:
            own = float(torch.finfo(parameter.dtype).eps)
            if parameter.is_cuda and parameter.dim() == 4 and is_tf32:
                own = max(own, TF32)
            self.eps = max(self.eps, own)
        draws = Generators(1000 + self.moved)
        with torch.no_grad():
            for parameter in parameters if self.moved else ():
                if id(parameter) not in self._is_moved:  # several optimisers
                    self._is_moved.add(id(parameter))
                    parameter.copy_(draws.moved(parameter, self.eps))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", type=Path, default=results("optimizing") / "programs_h200.json")
    parser.add_argument("--programs", nargs="*", help="default: those of --table with changes")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=1, help="programs that run at once")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of all programs")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, for tests")


def main(options: argparse.Namespace) -> int:
    """Returns 1 if a program has no curves, or if its losses are not within the band."""
    table = load(options.table)["programs"]
    waiting = [name for name in options.programs or programs() if kept_changes(table.get(name, {
        "optimize": {}}))]  # fmt: skip
    rows: dict[str, Any] = {}
    options.ends = time.perf_counter() + options.limit
    lock = threading.Lock()

    def work() -> None:
        while waiting and time.perf_counter() < options.ends:
            name = waiting.pop(0)
            try:
                row = measure(name, kept_changes(table[name]), options)
            except Exception as error:  # any: the other programs are still to be measured
                row = {"failure": f"{type(error).__name__}: {error}"}
            with lock:
                rows[name] = row
                save(options.out, kind="measured", tiny=options.tiny, allowed=ALLOWED,
                     programs=rows)  # fmt: skip
                print(f"{name}: {line(row)}", flush=True)

    threads = [threading.Thread(target=work) for _ in range(options.at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return int(not all(row.get("is_within") for row in rows.values()))


def line(row: Mapping[str, Any]) -> str:
    """The verdict in words."""
    if "failure" in row:
        return f"no curves: {row['failure']}"
    if row["is_bit_equal"]:
        return "bit-equal"
    words = "within" if row["is_within"] else "NOT within"
    return f"{words} twice the band: {row['over_band']:.2f} of it"


if __name__ == "__main__":
    child(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
