"""Check of kernels of random operator graphs against fp64, on a GPU or in Triton's interpreter.

    python -m benchmarks run fusion.random_graphs --graphs 300 [--out FILE] [--seed N]
        [--floats A,B]

Graphs have inputs of the dtypes ``--floats`` (fp32 and fp16), int32 and bool.  They depend on the
seed only; the result has a digest of all graphs.  On a GPU kernels are compiled, and every graph
with fp16 also runs in bf16; without a GPU kernels run in Triton's interpreter.

Each kernel has a randomly drawn plan.  Tensors lie between guard bands; a third of the graphs get
NaN, Inf and -0.0.  Half of the graphs run the explorer's kernels, including packed ones; the others
run kernels that are as large as possible.  In many graphs the first size is dynamic, and the same
kernels run at two sizes.

Further checks: the mask of dropout in both passes, for equal seeds and, on a GPU, in replays of a
CUDA graph; the random numbers in kernels of every scheme, bit by bit; on a GPU also casts to fp8.
Exit code 1 if a graph is wrong or an operator was not stitched.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants
from tests.unit.fusion.codegen.accuracy import (
    OutOfBoundsWrite,
    find_value_errors,
    random_inputs,
    with_guard_bands,
)
from tests.unit.fusion.codegen.graphs.random_graphs import RandomGraph, operator_graphs
from tests.unit.fusion.codegen.graphs.small_dots import small_dots
from tests.unit.fusion.codegen.interpreted.philox_graphs import random_number_errors
from tests.unit.fusion.codegen.interpreted.sequence_layouts import random_graph as queries
from tools.interpreters.triton_interpreter import prepare

from benchmarks.harness.result_file import save
from nostall.fusion.codegen.autotune.candidates import with_eager_loads, with_evict_first
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.runtime.stitched_graph import StitchedGraph, stitch
from nostall.fusion.codegen.tiling import legality
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan, PackedPlan
from nostall.fusion.codegen.tiling.plan_space import plans
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.fusion.graph import builder
from nostall.fusion.graph.builder import stored_value
from nostall.fusion.graph.graph import Graph
from nostall.fusion.recompute.kernels import default_kernels

ON_GPU = torch.cuda.is_available()
FLOATS = ("float32", "float16")
VARYING, SIZES = 17, (17, 40)
"""Size that marks the dynamic dimension, and the sizes at which such graphs run.

Smaller sizes are not possible: slices of the generated graphs would be out of bounds.
"""
MAX_INTERPRETED_PROGRAMS = 64
"""Maximum programs of one kernel in the interpreter, if a legal plan has that few."""


def draw_plan(schedule: Schedule, generator: random.Random) -> PlannedKernel:
    """Draw a legal plan; its scheme is drawn first, so that rare schemes are tested often."""
    legal = plans(schedule).legal_plans
    if not ON_GPU:
        small_plans = [
            p for p in legal if schedule.row_count / p.rows * p.splits <= MAX_INTERPRETED_PROGRAMS
        ]
        legal = tuple(small_plans) or legal
    schemes: dict[tuple[str, bool], list[KernelPlan]] = {}
    for plan in legal:
        schemes.setdefault((plan.scheme, len(plan.chunks) > 1), []).append(plan)
    kernel = PlannedKernel(schedule, generator.choice(schemes[generator.choice(sorted(schemes))]))
    for make_variant in (with_eager_loads, with_evict_first):
        variant = make_variant(kernel)
        kernel = variant if variant is not None and generator.random() < 0.5 else kernel
    return kernel


def check_graph(sample: RandomGraph, folder: Path, seen: Counter[str]) -> list[str]:
    """Failures of one graph; counts schemes, kernels and refused operators in ``seen``."""
    generator = random.Random(sample.seed)

    def choose(schedule: Schedule) -> PlannedKernel:
        kernel = draw_plan(schedule, generator)
        plan = kernel.plan
        seen[f"{plan.scheme}, chunks" if len(plan.chunks) > 1 else plan.scheme] += 1
        return kernel

    graph = sample.graph
    kernels = default_kernels(graph) if sample.seed % 2 else None
    if kernels is None:
        stitched = stitch(graph, choice=choose, folder=folder)
    else:
        stitched = stitch(kernels.graph, kernels.groups, choice=choose, folder=folder)
        seen["graphs with values computed again"] += kernels.graph is not graph
    seen["graphs with NaN and Inf"] += sample.seed % 3 == 0
    seen["graphs with a size that varies"] += graph.varying is not None
    loaded = [step for step in stitched.steps if not isinstance(step, int)]
    seen["kernels"] += len(loaded)
    seen["packed kernels"] += sum(isinstance(k.program.plan, PackedPlan) for k in loaded)
    wrong = []
    for reason, count in stitched.illegal_reasons.items():
        if graph.varying is None:
            wrong.append(f"not stitched: {reason}")
        seen["operators left to PyTorch for a size that varies"] += count
    for size in (None,) if graph.varying is None else SIZES:
        wrong += check_size(stitched, size, sample.seed)
    return wrong


def check_size(stitched: StitchedGraph, size: int | None, seed: int) -> list[str]:
    """Failures of a graph's kernels with the dynamic size ``size``; None for static graphs."""
    graph = stitched.graph
    sized = Graph(tuple(node.resized(graph.varying, size) for node in graph), graph.outputs)
    inputs = random_inputs(sized, seed, "cuda" if ON_GPU else "cpu")
    try:
        outputs = with_guard_bands(stitched)(*inputs, size=size)
        if ON_GPU:
            torch.cuda.synchronize()
        return find_value_errors(replace(stitched, graph=sized), inputs, outputs)
    except OutOfBoundsWrite as stray:
        return [str(stray)]
    except Exception as error:  # any failure to compile or run a kernel is a result
        return [f"{type(error).__name__}: {error}"]


def draw_graphs(
    count: int, seed_number: int, floats: tuple[str, ...], check: Callable[[RandomGraph], None]
) -> str:
    """Call ``check`` for ``count`` graphs of the hypothesis generator; returns their digest.

    The digest is of the graphs as drawn: the builder rounds constants of 16-bit floats afterwards.
    """
    _draw(count, seed_number, floats, check)
    digest = hashlib.sha256()
    with mock.patch.object(builder, "stored_value", _as_drawn):
        _draw(
            count,
            seed_number,
            floats,
            lambda made: digest.update(f"{made.graph} {made.seed}\n".encode()),
        )
    return digest.hexdigest()


def _as_drawn(value: float, dtype: str) -> float:
    """A constant that the builder does not round to a 16-bit float."""
    return value if dtype in ("float16", "bfloat16") else stored_value(value, dtype)


def _draw(
    count: int, seed_number: int, floats: tuple[str, ...], use: Callable[[RandomGraph], None]
) -> None:
    """Call ``use`` for each graph."""
    plain, varying = operator_graphs(floats), operator_graphs(floats, varying=VARYING)
    turned = st.integers(0, 2**16).map(lambda number: RandomGraph(queries(number, floats), number))

    @seed(seed_number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.one_of(plain, plain, varying, small_dots(floats), turned))
    def run_one(made: RandomGraph) -> None:
        use(made)

    # Hypothesis also draws constants that it finds in the source of imported modules of the
    # project, so the graphs would change with any of them.
    with mock.patch.object(providers, "_get_local_constants", Constants):
        run_one()


def check_graphs(
    count: int, seed_number: int, folder: Path, floats: tuple[str, ...] = FLOATS
) -> dict[str, Any]:
    """Check ``count`` graphs, on a GPU also in bf16; returns the record for the result file."""
    seen: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    start = time.monotonic()

    def check(sample: RandomGraph) -> None:
        seen["graphs"] += 1
        in_bfloat16 = sample.as_bfloat16 if ON_GPU else None
        seen["graphs once more in bf16"] += in_bfloat16 is not None
        for variant in (sample, in_bfloat16):
            if variant is not None and (wrong := check_graph(variant, folder, seen)):
                failures.append({"graph": str(variant.graph), "seed": variant.seed, "wrong": wrong})
        if seen["graphs"] % 50 == 0:
            print(f"{seen['graphs']} graphs, {len(failures)} wrong", file=sys.stderr, flush=True)

    digest = draw_graphs(count, seed_number, floats, check)
    return {
        "how": "compiled" if ON_GPU else "Triton's interpreter",
        "gpu": torch.cuda.get_device_name() if ON_GPU else None,
        "torch": torch.__version__,
        "floats": floats,
        "digest of the graphs drawn": digest,
        "seed": seed_number,
        "seconds": round(time.monotonic() - start, 1),
        "seen": dict(sorted(seen.items())),
        "wrong": failures,
    }


def check_dropout(folder: Path) -> list[str]:
    """Failures of dropout's masks in both passes, for equal seeds, and in CUDA graph replays."""
    # A lazy import: it imports Triton, which reads TRITON_INTERPRET then.
    from nostall.fusion.fuse import stitch_function

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x * 2, 0.25)

    fused = stitch_function(function, folder=folder)
    x = torch.ones(64, 1000, device="cuda" if ON_GPU else "cpu", requires_grad=True)
    torch.manual_seed(1)
    first, second = fused(x), fused(x)
    torch.manual_seed(1)
    repeated = fused(x)
    (gradient,) = torch.autograd.grad(first.sum(), x)
    kept_share = float((first > 0).float().mean())
    failures = {
        "no kernel was generated": fused.graphs[0].kernels < 1,
        "another mask for the same seed": not torch.equal(first, repeated),
        "the same mask twice": torch.equal(first, second),
        "another mask in the backward pass": not torch.allclose(first, gradient),
        f"{kept_share:.1%} of the elements are kept, not 75%": abs(kept_share - 0.75)
        > 0.011,  # six standard deviations
    }
    if ON_GPU:
        with torch.no_grad():
            fused(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = fused(x)
            masks = []
            for _ in range(3):
                graph.replay()
                masks.append((output > 0).clone())
        is_fresh = not (torch.equal(masks[0], masks[1]) or torch.equal(masks[1], masks[2]))
        failures["a replay of the CUDA graph repeats a mask"] = not is_fresh
    return [text for text, wrong in failures.items() if wrong]


def check_random_numbers(folder: Path) -> list[str]:
    """Random numbers of kernels of all schemes that differ in any bit from the reference."""
    results = random_number_errors(folder, "cuda" if ON_GPU else "cpu")
    return [f"{name}: {text}" for name, wrong in results for text in wrong]


def check_fp8(folder: Path) -> list[str]:
    """Differences between compiled casts to fp8 and PyTorch's.

    The values are all of fp16 and those around the largest fp8 numbers.  Triton's interpreter does
    not cast to fp8 correctly.
    """
    # Lazy imports: they import Triton, which reads TRITON_INTERPRET then.
    from torch.fx.experimental.proxy_tensor import make_fx

    from nostall.fusion.capture import capture

    all_fp16 = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16).float()
    largest = torch.cat([torch.linspace(440, 470, 3001), torch.linspace(57000, 62000, 3001)])
    x = torch.cat([all_fp16, largest, -largest]).cuda()
    failures = []
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        expected = x.to(getattr(torch, dtype))
        traced = make_fx(partial(torch.Tensor.to, dtype=expected.dtype), tracing_mode="fake")(x)
        graph = capture(traced).graph
        (output,) = stitch(graph, folder=folder)(x)
        is_nan = expected.float().isnan()
        is_equal = output.view(torch.uint8) == expected.view(torch.uint8)
        is_wrong = ~(is_equal | is_nan & output.float().isnan())
        if bool(is_wrong.any()):
            index = int(is_wrong.nonzero()[0])
            count = int(is_wrong.sum())
            failures.append(
                f"{dtype}: {count} values, {x[index]} is {output[index]}, "
                f"PyTorch: {expected[index]}"
            )
    return failures


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--graphs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--floats", default=",".join(FLOATS), help="float dtypes of inputs")
    parser.add_argument("--out", type=Path)


def main(options: argparse.Namespace) -> None:
    if not ON_GPU:
        os.environ["TRITON_INTERPRET"] = "1"  # must be set before Triton is imported
        prepare()
    legality.EVICT_FIRST_BYTES = 0  # allow evict-first stores of all outputs
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        floats = tuple(options.floats.split(","))
        record = check_graphs(options.graphs, options.seed, Path(folder), floats)
        parts = {
            "wrong with dropout": check_dropout,
            "wrong numbers": check_random_numbers,
            "wrong with fp8": check_fp8,
        }
        record |= dict.fromkeys(parts)  # None until a check has run
        for name, check in parts.items():
            if options.out:
                save(options.out, **record)
            if check is not check_fp8 or ON_GPU:
                record[name] = check(Path(folder))
    if options.out:
        save(options.out, **record)
    seen = record["seen"]
    print(
        f"{seen['graphs']} graphs, {seen['kernels']} kernels, {len(record['wrong'])} wrong "
        f"({record['how']}, {record['seconds']} s); "
        f"dropout: {', '.join(record['wrong with dropout']) or 'right'}; "
        f"random numbers: {', '.join(record['wrong numbers']) or 'right'}; "
        f"fp8: {', '.join(record['wrong with fp8']) or 'right' if ON_GPU else 'needs a GPU'}"
    )
    failure_keys = ("wrong", "wrong with dropout", "wrong numbers", "wrong with fp8")
    sys.exit(any(record[key] for key in failure_keys))
