"""Whole models by the torch.compile backend, beside torch.compile as it is, on a GPU.

    python -m benchmarks.fusion_backend OUT [--models PART] [--seconds 300] [--dtype bfloat16]

For every model of ``benchmarks.fusion_backend_models``, each in a process of its own:

- ``start``: torch.compile and the backend with empty caches, then again with warm ones: seconds of
  the first step, of the steps until the backend has chosen, and the processor time it says.
- ``steady``: eager (twice: the null), torch.compile, max-autotune-no-cudagraphs, and the backend in
  both modes, with and without a choice (``always``: stitched kernels whatever they cost), steps
  interleaved round by round; seconds per step, and kernels that one step launches (profiler).

OUT is a folder with one JSON for each model and part; those that are there are left out, so an
interrupted run goes on.  A model that takes longer than ``--seconds`` is ended and named.
``--small --device cpu`` tries all of it in Triton's interpreter (set TRITON_INTERPRET=1): times are
worth nothing then.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.fusion_backend_models import Model, models
from benchmarks.provenance import save
from nostall.attach.compile.backend import Backend
from nostall.attach.compile.report import GraphReport
from nostall.core.measurement import Comparison

AUTOTUNE = "max-autotune-no-cudagraphs"
ALWAYS = {"nostall.choose": "stitched"}
METHODS: dict[str, tuple[str, str | None, Mapping[str, Any]]] = {
    "eager": ("eager", None, {}),
    "eager again": ("eager", None, {}),
    "compile": ("inductor", None, {}),
    "max-autotune": ("inductor", AUTOTUNE, {}),
    "nostall": ("nostall", None, {}),
    "nostall max-autotune": ("nostall", AUTOTUNE, {}),
    "always": ("nostall", None, ALWAYS),
    "always, all kernels": ("nostall", None, {**ALWAYS, "nostall.extent": "all"}),
}
STARTED = ("compile", "nostall")
MOST_SHARE = 0.5
"""Of the time of a process, what may pass until the backend has chosen."""
Step = Callable[[], object]


class Program:
    """A model by one method; ``step`` is what a user's loop does."""

    def __init__(self, model: Model, method: str, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        kind, mode, given = METHODS[method]
        module, inputs = model.make()
        dtype = getattr(torch, options.dtype)
        self.module: nn.Module = module.to(options.device, dtype).train(model.train)
        self.inputs = [
            x.to(options.device, dtype if x.is_floating_point() else None) for x in inputs
        ]
        self.train = model.train
        self.reports: list[GraphReport] = []
        function = own_code(self.module)
        if kind == "nostall":
            backend = Backend()
            self.reports = backend.reports
            # PyTorch takes either a mode or options.
            extra = torch._inductor.list_mode_options(mode) if mode else {}
            extra |= {"nostall.rest": options.rest, "nostall.background": not options.steady}
            function = torch.compile(function, backend=backend, options={**extra, **given})
        elif kind == "inductor" and options.rest == "inductor":
            function = torch.compile(function, mode=mode)
        elif kind == "inductor":
            function = torch.compile(function, backend="aot_eager")
        self.function = function

    def step(self) -> None:
        if not self.train:
            with torch.no_grad():
                self.function(*self.inputs)
            return
        self.module.zero_grad(set_to_none=True)
        self.function(*self.inputs).float().square().mean().backward()

    @property
    def chosen(self) -> bool:
        """Whether every graph has settled for a version."""
        return all(r.reason for r in self.reports)


def own_code(module: nn.Module) -> Callable[..., Any]:
    """The module behind a function with code of its own: Dynamo keeps what it compiled by code, and
    the methods would wait for each other's guards."""
    scope: dict[str, Any] = {"module": module}
    exec("def call(*inputs):\n    return module(*inputs)\n", scope)
    found: Callable[..., Any] = scope["call"]
    return found


def seconds(step: Step, device: str) -> float:
    """One step, until the device has done it."""
    began = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


# -- how a program starts --------------------------------------------------------------------------


def start(model: Model, method: str, options: argparse.Namespace) -> dict[str, Any]:
    """A fresh process: first step, steps until the choice, and what the backend says of itself."""
    program = Program(model, method, options)
    began = time.perf_counter()
    times = [seconds(program.step, options.device)]
    while not program.chosen and time.perf_counter() - began < MOST_SHARE * options.seconds:
        times.append(seconds(program.step, options.device))
    return {
        "first_s": times[0],
        "until_chosen_s": time.perf_counter() - began,
        "steps": len(times),
        "graphs": [told(report) for report in program.reports],
    }


def told(report: GraphReport) -> dict[str, Any]:
    """A report for a result file; samples stay in it."""
    return {
        "state": report.state,
        "reason": report.reason,
        "kernels": report.kernels,
        "from_store": report.from_store,
        "refused": [[why, what, count] for (why, what), count in report.refused.items()],
        "compared": report.compared.model_dump() if report.compared else None,
        "seconds": report.seconds,
        "cpu_seconds": report.cpu_seconds,
    }


def started(name: str, options: argparse.Namespace, limit: float) -> dict[str, Any]:
    """Both methods, cold and warm, each in a process with caches of its own."""
    found: dict[str, Any] = {}
    for method in STARTED:
        with tempfile.TemporaryDirectory(prefix="nostall-") as place:
            for state in ("cold", "warm"):
                out = Path(place) / f"{state}.json"
                caches = {
                    "NOSTALL_HOME": f"{place}/nostall",
                    "TORCHINDUCTOR_CACHE_DIR": f"{place}/inductor",
                    "TRITON_CACHE_DIR": f"{place}/triton",
                }
                child([str(out), "--start", method, "--models", name], options, limit, caches)
                found[f"{method}, {state}"] = json.loads(out.read_text())
    return found


# -- how it runs -----------------------------------------------------------------------------------


def steady(model: Model, options: argparse.Namespace) -> dict[str, Any]:
    """All methods in one process, side by side."""
    programs = {name: Program(model, name, options) for name in METHODS}
    for program in programs.values():
        # At the second step the backend stitches and compares.
        for _ in range(4):
            program.step()
    samples: dict[str, list[float]] = {name: [] for name in programs}
    names = list(programs)
    for round_ in range(options.rounds):
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            samples[name].append(seconds(programs[name].step, options.device))
    return {
        "samples_s": samples,
        "launches": {name: launches(p.step, options.device) for name, p in programs.items()},
        "compared": compared(samples),
        "graphs": {n: [told(r) for r in p.reports] for n, p in programs.items() if p.reports},
    }


def launches(step: Step, device: str) -> int | None:
    """Kernels that the GPU runs in one step; None without a GPU."""
    if device != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        seconds(step, device)
    return sum(
        1
        for event in found.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not event.name.startswith(("Memcpy", "Memset"))
    )


def compared(samples: Mapping[str, list[float]]) -> dict[str, Any]:
    """The backend against torch.compile in the same mode; the null is eager beside itself."""
    found = {}
    spread = [b / a for a, b in zip(samples["eager"], samples["eager again"], strict=True)]
    pairs = [("compile", name) for name in ("nostall", "always", "always, all kernels")]
    for base, name in [*pairs, ("max-autotune", "nostall max-autotune"), ("eager", "compile")]:
        null = [x * s for x, s in zip(samples[base], spread, strict=True)]
        result = Comparison.of(samples[base], samples[name], null, kind="measured")
        found[f"{name} over {base}"] = {
            "ratio": round(result.ratio, 4),
            "low": round(result.low, 4),
            "high": round(result.high, 4),
            "verdict": result.verdict,
        }
    return found


# -- all of it -------------------------------------------------------------------------------------


def child(
    what: list[str], options: argparse.Namespace, limit: float, caches: Mapping[str, str]
) -> None:
    """This program once more, for one model; raises what ``subprocess`` raises."""
    command = [sys.executable, "-m", "benchmarks.fusion_backend", *what]
    command += ["--device", options.device, "--dtype", options.dtype, "--rest", options.rest]
    command += ["--rounds", str(options.rounds), "--seconds", str(limit)]
    command += [*(["--small"] if options.small else [])]
    subprocess.run(command, env={**os.environ, **caches}, timeout=limit, check=True)


def one(options: argparse.Namespace) -> None:
    """In this process: the only model that is named, one part."""
    if options.device == "cpu":
        from nostall.fusion.codegen.interpreted import prepare

        prepare()
    model = models(options.small)[options.models]
    if options.start:
        options.out.write_text(json.dumps(start(model, options.start, options)))
        return
    save(options.out, model=options.models, **about(options), **steady(model, options))


def about(options: argparse.Namespace) -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else None
    return {"gpu": gpu, "torch": torch.__version__, "dtype": options.dtype, "small": options.small}


def every(options: argparse.Namespace) -> None:
    """Every model and part whose file is not there yet."""
    options.out.mkdir(parents=True, exist_ok=True)
    for name in (name for name in models(options.small) if options.models in name):
        for part in ("start", "steady"):
            out = options.out / f"{name}.{part}.json"
            if out.exists():
                continue
            try:
                if part == "start":
                    found = started(name, options, options.seconds)
                    save(out, model=name, **about(options), starts=found)
                else:
                    with tempfile.TemporaryDirectory(prefix="nostall-") as place:
                        home = {"NOSTALL_HOME": place}
                        child(
                            [str(out), "--steady", "--models", name], options, options.seconds, home
                        )
            except (subprocess.SubprocessError, OSError) as error:
                print(f"{name}, {part}: {error}", flush=True)
                continue
            body = json.loads(out.read_text())
            print(f"{name}, {part}: {body.get('compared') or 'done'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", default="", help="only those whose name has this part")
    parser.add_argument("--seconds", type=float, default=300, help="for one process")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--rest", default="inductor", choices=("inductor", "eager"))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--start", choices=STARTED, help="in this process (used by itself)")
    parser.add_argument("--steady", action="store_true", help="in this process (used by itself)")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no GPU here; run this on one, or give --small --device cpu")
    if options.start or options.steady:
        one(options)
    else:
        every(options)


if __name__ == "__main__":
    main()
