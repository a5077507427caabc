"""Extract a kernel that torch.compile generates: its cubin and its launch.

    python -m benchmarks run kernels.inductor --out FOLDER

Compiles layer norm + GELU on the GPU with empty caches, records what Inductor compiles and
launches, and writes FOLDER/NAME.cubin and FOLDER/NAME.json, which ``benchmarks.sass.suite
--inductor FOLDER`` reads. Needs a GPU, and torch with Triton. Uses private names of Inductor
(torch 2.13); another version may need changes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nostall.core import BadInput
from nostall.core.files.atomic import write_atomically
from nostall.core.launch import Buffer, Constant, LaunchSpec, Scalar
from nostall.gpu import Kernel, LocalGpu
from nostall.tuning.sources.compiled_launch import compiled_launch
from nostall.tuning.sources.triton_source import TRITON_TYPES

ROWS, COLUMNS = 4096, 1024
_FLOPS_AN_ELEMENT = 20.0
"""Estimate: mean, variance, scaling, and a GELU with the error function."""
NAME = "inductor_layernorm_gelu"


@dataclass(frozen=True)
class RecordedLaunch:
    """A launch by Inductor: its autotuner and the arguments."""

    autotuner: Any
    args: tuple[Any, ...]


@dataclass(frozen=True)
class RecordedCompilation:
    """A compilation by Triton: its source object, the options, the compiled kernel."""

    source: Any
    options: Mapping[str, Any]
    kernel: Any


def extract_kernel(
    launched: RecordedLaunch, compiled: Sequence[RecordedCompilation], flops: float
) -> tuple[bytes, Any]:
    """(cubin, launch) of a recorded launch; raises BadInput if its grid is not ``Grid1D``."""
    tuner = launched.autotuner
    config = tuner.launchers[0].config
    compilation = _find_compilation(compiled, config)
    args = _arguments(tuner.triton_meta, config.kwargs, launched.args)
    numel = getattr(args.get("xnumel"), "value", None)
    grid = tuner.inductor_meta.get("grid_type")
    if grid != "Grid1D" or numel is None:
        raise BadInput(f"Inductor's grid is {grid!r} over xnumel={numel}; only Grid1D is supported")
    blocks = -(-int(numel) // int(config.kwargs.get("XBLOCK", 1)))
    launch = LaunchSpec(
        grid=(blocks, 1, 1),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        flops=flops,
    )
    constants = {name: a.constant for name, a in args.items() if isinstance(a, Constant)}
    return compilation.kernel.asm["cubin"], compiled_launch(
        launch, args, constants, compilation.kernel.metadata
    )


def _find_compilation(compiled: Sequence[RecordedCompilation], config: Any) -> RecordedCompilation:
    """The compilation of the launched configuration."""
    for compilation in compiled:
        names = compilation.source.fn.arg_names
        constants = {
            names[key[0]] if isinstance(key, tuple) else key: value
            for key, value in compilation.source.constants.items()
        }
        warps = compilation.options.get("num_warps") == config.num_warps
        stages = compilation.options.get("num_stages") == config.num_stages
        if warps and stages and config.kwargs.items() <= constants.items():
            return compilation
    raise BadInput(
        f"none of {len(compiled)} compilations has the launched configuration ({config}); torch "
        "compiled in another process or took it from a cache"
    )


def _arguments(
    meta: Mapping[str, Any], fixed: Mapping[str, Any], passed_values: Sequence[Any]
) -> dict[str, Buffer | Scalar | Constant]:
    """The launch's arguments by name, in the kernel's order."""
    signature = meta["signature"]
    passed = [name for name in signature if name not in fixed]
    if len(passed) != len(passed_values):
        raise BadInput(f"Inductor passed {len(passed_values)} arguments, the kernel takes {passed}")
    values = dict(zip(passed, passed_values, strict=True))
    types = {triton_type: dtype for dtype, triton_type in TRITON_TYPES.items()}
    arguments: dict[str, Buffer | Scalar | Constant] = {}
    for name, kind in signature.items():
        if name in fixed:
            arguments[name] = Constant(name=name, constant=fixed[name])
        elif kind == "constexpr" or name in meta.get("constants", {}):
            arguments[name] = Constant(name=name, constant=values[name])
        elif kind.startswith("*"):
            role = "out" if name.startswith("out") else "in"
            arguments[name] = Buffer(
                name=name,
                dtype=types[kind.lstrip("*k")],
                shape=tuple(values[name].shape),
                role="inout" if name.startswith("in_out") else role,
            )
        else:
            arguments[name] = Scalar(name=name, dtype=types[kind], value=values[name])
    return arguments


def record_compilation() -> tuple[list[RecordedLaunch], list[RecordedCompilation]]:
    """Compile and run the function once; returns the launches and compilations of Inductor."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    import torch
    import triton
    from torch._inductor import config
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    for name in ("use_static_cuda_launcher", "use_static_triton_launcher"):
        if hasattr(config, name):
            setattr(config, name, False)
    launched: list[RecordedLaunch] = []
    compiled: list[RecordedCompilation] = []
    run, build = CachingAutotuner.run, triton.compile

    def recording_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        launched.append(RecordedLaunch(self, args))
        return run(self, *args, **kwargs)

    def recording_build(source: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = build(source, *args, **kwargs)
        compiled.append(RecordedCompilation(source, dict(kwargs.get("options") or {}), kernel))
        return kernel

    def function(x: Any, weight: Any, bias: Any) -> Any:
        normal = torch.nn.functional.layer_norm(x, (COLUMNS,), weight, bias)
        return torch.nn.functional.gelu(normal)

    CachingAutotuner.run, triton.compile = recording_run, recording_build
    try:
        x = torch.randn(ROWS, COLUMNS, device="cuda", dtype=torch.float16)
        w, b = torch.randn(2, COLUMNS, device="cuda", dtype=torch.float16)
        torch.compile(function)(x, w, b)
        torch.cuda.synchronize()
    finally:
        CachingAutotuner.run, triton.compile = run, build
    return launched, compiled


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for the cubin and its launch"
    )


def main(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="nostall-") as caches:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = caches
        os.environ["TRITON_CACHE_DIR"] = caches
        launched, compiled = record_compilation()
    if len(launched) != 1:
        raise SystemExit(f"Inductor launched {len(launched)} kernels; expected one fused kernel")
    cubin, launch = extract_kernel(launched[0], compiled, _FLOPS_AN_ELEMENT * ROWS * COLUMNS)
    options.out.mkdir(parents=True, exist_ok=True)
    write_atomically(options.out / f"{NAME}.json", launch.model_dump_json(indent=1).encode())
    write_atomically(options.out / f"{NAME}.cubin", cubin)
    kernel = compiled[0].kernel.metadata.name
    with LocalGpu(Kernel(cubin, kernel, launch)) as gpu:
        outcome = gpu.evaluate(cubin)
    print(f"{kernel}: grid {launch.grid}, block {launch.block}, {outcome.status} {outcome.detail}")
