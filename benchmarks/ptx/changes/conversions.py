"""Conversions of integers to f16 through f32: all integers on the card, and what they are worth.

    python -m benchmarks run ptx.conversions --out benchmarks/ptx/results/conversions.json

One kernel converts each of the 2**32 integers, signed and unsigned, both ways, and counts other
results.  Then each kernel of users that has such conversions is compared, as its fastest
configuration, with the same PTX in which only they are replaced, in a process of its own with a
null.

Both ways round once: an f32 holds each integer up to 2**24 in magnitude, and f16 rounds all that
lies beyond 65520 to infinity.  ptxas makes ``I2F.F16`` of the one, an instruction of the unit for
special functions, and ``I2FP.F32.S32`` and a packed ``F2FP`` of the other.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import re
import tempfile
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.comparison import comparison_record
from benchmarks.harness.result_file import save
from benchmarks.kernels.new_projects.entries import PROJECTS, new_project_entries
from benchmarks.kernels.suite import Entry
from benchmarks.kernels.unseen import unseen_entries
from benchmarks.ptx.assembler_suite import fastest_build
from benchmarks.sass.build_comparison import ProcessTimer
from benchmarks.sass.compiler_baseline import try_build
from nostall.core.launch import LaunchSpec
from nostall.gpu import Kernel, LocalGpu, MeasurementPlan
from nostall.gpu.driver import Cuda, KernelArguments
from nostall.ptx.assemble.ptxas import run_ptxas
from nostall.ptx.assemble.versions import find_assemblers
from nostall.sass import validate as validate_cubin
from nostall.tuning.assembler.commands import find_command
from nostall.tuning.gpu_objective import decide

KERNELS = ("int4_gemm", "zero_point_gemm")
_DIRECT = re.compile(r"(?<=\t)cvt\.rn\.f16\.([su]32)\s+(%\w+),\s*(%\w+);")
_BLOCKS, _THREADS = 4096, 256
_EACH = 2**32 // (_BLOCKS * _THREADS)
"""Integers of one thread."""
_PTX = f"""\
.version 8.0
.target sm_90
.address_size 64
.visible .entry count(.param .u64 out)
{{
	.reg .pred %p<4>; .reg .b16 %h<5>; .reg .b32 %r<8>; .reg .f32 %f<3>; .reg .b64 %d<4>;
	ld.param.u64 %d1, [out];
	mov.u32 %r1, %ctaid.x; mov.u32 %r2, %tid.x; mad.lo.u32 %r3, %r1, {_THREADS}, %r2;
	mul.wide.u32 %d2, %r3, 4; add.s64 %d3, %d1, %d2;
	mul.lo.u32 %r4, %r3, {_EACH}; mov.u32 %r5, 0; mov.u32 %r6, 0;
next:
	cvt.rn.f16.s32 %h1, %r4; cvt.rn.f32.s32 %f1, %r4; cvt.rn.f16.f32 %h2, %f1;
	cvt.rn.f16.u32 %h3, %r4; cvt.rn.f32.u32 %f2, %r4; cvt.rn.f16.f32 %h4, %f2;
	setp.ne.b16 %p1, %h1, %h2; @%p1 add.u32 %r5, %r5, 1;
	setp.ne.b16 %p2, %h3, %h4; @%p2 add.u32 %r5, %r5, 1;
	add.u32 %r4, %r4, 1; add.u32 %r6, %r6, 1;
	setp.lt.u32 %p3, %r6, {_EACH}; @%p3 bra next;
	st.global.u32 [%d3], %r5;
	ret;
}}
"""

Row = dict[str, Any]


def count_differences() -> int:
    """Integers whose f16 differs between the two ways, of all signed and unsigned ones."""
    cuda = Cuda()
    with tempfile.TemporaryDirectory() as folder:
        run = run_ptxas(find_assemblers()[0], _PTX, ["--gpu-name=sm_90"], Path(folder))
    size = _BLOCKS * _THREADS * 4
    out = cuda.allocate(size)
    cuda.fill(out, 0xFF, size)
    spec = LaunchSpec(grid=(_BLOCKS, 1, 1), block=(_THREADS, 1, 1), args=())
    arguments = KernelArguments(((out,), (ctypes.c_void_p,)))
    cuda.launch(cuda.load(run.cubin, "count"), spec, arguments)
    cuda.synchronize()
    return int(cuda.download(out, size).view(np.uint32).astype(np.int64).sum())


def through_f32(ptx: str) -> tuple[str, int]:
    """The PTX with the conversions made in two steps, and their number."""
    return _DIRECT.subn(
        r"{ .reg .f32 %via; cvt.rn.f32.\1 %via, \3; cvt.rn.f16.f32 \2, %via; }", ptx
    )


def measure(entry: Entry, compilers: ProcessPoolExecutor, timer: ProcessTimer) -> Row:
    """The fastest configuration of a kernel beside the same with other conversions."""
    built = list(compilers.map(try_build, repeat(entry), entry.options))
    baseline = fastest_build(built, timer)
    source = baseline.source
    assert source.ptx is not None and source.launch is not None
    compiler = find_command(source, find_assemblers())
    text, replaced = through_f32(source.ptx)
    arguments = compiler.command.arguments()
    with tempfile.TemporaryDirectory() as folder:
        run = run_ptxas(compiler.assemblers[0], text, arguments, Path(folder))
    assert run.status == "assembled" and validate_cubin(run.cubin).safe, run.detail
    with LocalGpu(Kernel(source.cubin, source.kernel, source.launch), MeasurementPlan()) as gpu:
        decision = decide(gpu, run.cubin, rounds=200, checks=16)
        about = dict(gpu.info)
    return {
        "kernel": entry.name,
        "project": PROJECTS.get(entry.kernel),
        "conversions": replaced,
        "baseline": [dict(timed) for timed in baseline.timed],
        "over_a": comparison_record(decision),
        "gpu": about,
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)


def main(options: argparse.Namespace) -> int:
    """Check all integers, then measure each kernel."""
    differences = count_differences()
    print(f"{differences} of 2 x 2**32 integers differ", flush=True)
    rows: list[Row] = []
    known = (*unseen_entries(), *new_project_entries())
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(6, mp_context=context) as compilers, ProcessTimer() as timer:
        for entry in known:
            if entry.kernel in KERNELS:
                rows.append(measure(entry, compilers, timer))
                over = rows[-1]["over_a"]
                shown = over and {k: over[k] for k in ("verdict", "ratio", "low", "high")}
                print(entry.name, rows[-1]["conversions"], shown, flush=True)
                save(options.out, kind="measured", differences=differences, rows=rows)
    return int(differences > 0)
