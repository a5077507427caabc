"""Random operator graphs, stitched and compared with fp64: in Triton's interpreter, or on a GPU.

    python -m benchmarks run fusion.random_graphs --graphs 300 [--out FILE] [--seed N] [--floats A,B]

Graphs are drawn with inputs of ``--floats`` (fp32 and fp16), int32 and bool; for one seed they are
the same everywhere, and a digest of all says so.  Where there is a GPU, kernels are compiled, and
every graph with fp16 runs once more in bf16; elsewhere they are interpreted, as drawn.  Every graph
runs with a plan of each kernel that is drawn by chance, every tensor lies between guard bands, a
third of the graphs get NaN, Inf and -0.0.
Half of them run the explorer's kernels, packs among them, the others kernels as large as possible.
In many of the graphs the first size varies: the same kernels run at two sizes.
Then dropout: its mask in both passes, for equal seeds and, on a GPU, in replays of a CUDA graph.
The random numbers themselves have to be the reference's in kernels of every scheme, bit by bit.
On a GPU casts to fp8 too.  Exit code 1 where a graph is wrong or an operator was not stitched.
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

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from tests.unit.fusion.codegen.accuracy import (
    OutOfBoundsWrite,
    find_value_errors,
    random_inputs,
    with_guard_bands,
)
from tests.unit.fusion.codegen.philox_graphs import random_number_errors
from tests.unit.fusion.codegen.random_graphs import RandomGraph, operator_graphs
from tests.unit.fusion.codegen.sequence_layouts import random_graph as queries
from tests.unit.fusion.codegen.small_dots import small_dots

from benchmarks.harness.result_file import save
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.runtime.stitched_graph import StitchedGraph, stitch
from nostall.fusion.codegen.tiling import legality
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan, PackedPlan
from nostall.fusion.codegen.tiling.plan_space import plans
from nostall.fusion.codegen.tiling.plan_variants import with_eager_loads, with_evict_first
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.fusion.evaluate import DeltaEvaluator
from nostall.fusion.explore import explore
from nostall.fusion.graph.graph import Graph
from nostall.fusion.testing.triton_interpreter import prepare

ON_GPU = torch.cuda.is_available()
FLOATS = ("float32", "float16")
VARYING, SIZES = 17, (17, 40)
"""What stands for the size that varies, and the sizes that such graphs run at.  Not less: slices of
the generated graphs stay inside."""
MOST_INTERPRETED = 64
"""Programs of one kernel that the interpreter should run."""


def drawn(of: Schedule, draw: random.Random) -> PlannedKernel:
    """A legal plan: first its scheme by chance, so that rare ones are not rare here."""
    legal = plans(of).legal_plans
    if not ON_GPU:
        few = [p for p in legal if of.row_count / p.rows * p.splits <= MOST_INTERPRETED]
        legal = tuple(few) or legal
    schemes: dict[tuple[str, bool], list[KernelPlan]] = {}
    for plan in legal:
        schemes.setdefault((plan.scheme, len(plan.chunks) > 1), []).append(plan)
    kernel = PlannedKernel(of, draw.choice(schemes[draw.choice(sorted(schemes))]))
    for way in (with_eager_loads, with_evict_first):
        twin = way(kernel)
        kernel = twin if twin is not None and draw.random() < 0.5 else kernel
    return kernel


def one(made: RandomGraph, folder: Path, seen: Counter[str]) -> list[str]:
    """What is wrong with one graph; counts schemes, kernels and refusals."""
    draw = random.Random(made.seed)

    def choice(of: Schedule) -> PlannedKernel:
        kernel = drawn(of, draw)
        plan = kernel.plan
        seen[f"{plan.scheme}, chunks" if len(plan.chunks) > 1 else plan.scheme] += 1
        return kernel

    graph = made.graph
    patterns = explore(DeltaEvaluator(graph)).partition.kernels if made.seed % 2 else None
    stitched = stitch(graph, patterns, choice=choice, folder=folder)
    seen["graphs with NaN and Inf"] += made.seed % 3 == 0
    seen["graphs with a size that varies"] += graph.varying is not None
    kernels = [step for step in stitched.steps if not isinstance(step, int)]
    seen["kernels"] += len(kernels)
    seen["packed kernels"] += sum(isinstance(k.program.plan, PackedPlan) for k in kernels)
    wrong = []
    for reason, count in stitched.illegal_reasons.items():
        if graph.varying is None:
            wrong.append(f"not stitched: {reason}")
        seen["operators left to PyTorch for a size that varies"] += count
    for size in (None,) if graph.varying is None else SIZES:
        wrong += at_size(stitched, size, made.seed)
    return wrong


def at_size(stitched: StitchedGraph, size: int | None, chosen: int) -> list[str]:
    """What is wrong with the kernels of a graph where that varies, at ``size``."""
    graph = stitched.graph
    sized = Graph(tuple(node.resized(graph.varying, size) for node in graph), graph.outputs)
    inputs = random_inputs(sized, chosen, "cuda" if ON_GPU else "cpu")
    try:
        outputs = with_guard_bands(stitched)(*inputs, size=size)
        if ON_GPU:
            torch.cuda.synchronize()
        return find_value_errors(replace(stitched, graph=sized), inputs, outputs)
    except OutOfBoundsWrite as stray:
        return [str(stray)]
    except Exception as error:  # a kernel that cannot be compiled or run is a wrong one
        return [f"{type(error).__name__}: {error}"]


def drawn_graphs(
    graphs: int, chosen: int, floats: tuple[str, ...], check: Callable[[RandomGraph], None]
) -> str:
    """Check ``graphs`` graphs from the hypothesis generator; a digest of all of them."""
    plain, varying = operator_graphs(floats), operator_graphs(floats, varying=VARYING)
    turned = st.integers(0, 2**16).map(lambda number: RandomGraph(queries(number, floats), number))
    text = hashlib.sha256()

    @seed(chosen)
    @settings(
        max_examples=graphs,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.one_of(plain, plain, varying, small_dots(floats), turned))
    def each(made: RandomGraph) -> None:
        text.update(f"{made.graph} {made.seed}\n".encode())
        check(made)

    each()
    return text.hexdigest()


def measured(
    graphs: int, chosen: int, folder: Path, floats: tuple[str, ...] = FLOATS
) -> dict[str, Any]:
    """``graphs`` graphs, as drawn and, on a GPU, in bf16; the record to keep."""
    seen: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    started = time.monotonic()

    def check(made: RandomGraph) -> None:
        seen["graphs"] += 1
        again = made.as_bfloat16 if ON_GPU else None
        seen["graphs once more in bf16"] += again is not None
        for each in (made, again):
            if each is not None and (wrong := one(each, folder, seen)):
                failures.append({"graph": str(each.graph), "seed": each.seed, "wrong": wrong})
        if seen["graphs"] % 50 == 0:
            print(f"{seen['graphs']} graphs, {len(failures)} wrong", file=sys.stderr, flush=True)

    digest = drawn_graphs(graphs, chosen, floats, check)
    return {
        "how": "compiled" if ON_GPU else "Triton's interpreter",
        "gpu": torch.cuda.get_device_name() if ON_GPU else None,
        "torch": torch.__version__,
        "floats": floats,
        "digest of the graphs drawn": digest,
        "seed": chosen,
        "seconds": round(time.monotonic() - started, 1),
        "seen": dict(sorted(seen.items())),
        "wrong": failures,
    }


def dropout(folder: Path) -> list[str]:
    """What is wrong with dropout: the masks of both passes, of equal seeds, of replays."""
    from nostall.fusion.fuse import (
        stitch_function,
    )  # imports Triton, which must know by then that it interprets

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x * 2, 0.25)

    fused = stitch_function(function, folder=folder)
    x = torch.ones(64, 1000, device="cuda" if ON_GPU else "cpu", requires_grad=True)
    torch.manual_seed(1)
    first, second = fused(x), fused(x)
    torch.manual_seed(1)
    again = fused(x)
    (gradient,) = torch.autograd.grad(first.sum(), x)
    kept = float((first > 0).float().mean())
    told = {
        "nothing was stitched": fused.graphs[0].kernels < 1,
        "another mask for the same seed": not torch.equal(first, again),
        "the same mask twice": torch.equal(first, second),
        "another mask in the backward pass": not torch.allclose(first, gradient),
        f"{kept:.1%} are kept, not 75%": abs(kept - 0.75) > 0.011,  # six standard deviations
    }
    if ON_GPU:
        with torch.no_grad():
            fused(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                made = fused(x)
            masks = []
            for _ in range(3):
                graph.replay()
                masks.append((made > 0).clone())
        fresh = not (torch.equal(masks[0], masks[1]) or torch.equal(masks[1], masks[2]))
        told["a replay of the CUDA graph repeats a mask"] = not fresh
    return [text for text, wrong in told.items() if wrong]


def numbers(folder: Path) -> list[str]:
    """Which random numbers of kernels of any scheme differ from the reference's, in one bit."""
    found = random_number_errors(folder, "cuda" if ON_GPU else "cpu")
    return [f"{name}: {text}" for name, wrong in found for text in wrong]


def fp8(folder: Path) -> list[str]:
    """What a compiled cast to fp8 does otherwise than PyTorch's, with all fp16 values and those
    around the largest ones.  Triton's interpreter is no oracle for it."""
    # They import Triton, which has to know before whether it interprets.
    from torch.fx.experimental.proxy_tensor import make_fx

    from nostall.fusion.capture import capture

    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16).float()
    largest = torch.cat([torch.linspace(440, 470, 3001), torch.linspace(57000, 62000, 3001)])
    x = torch.cat([every, largest, -largest]).cuda()
    found = []
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        wanted = x.to(getattr(torch, dtype))
        traced = make_fx(partial(torch.Tensor.to, dtype=wanted.dtype), tracing_mode="fake")(x)
        graph = capture(traced).graph
        (made,) = stitch(graph, folder=folder)(x)
        nan = wanted.float().isnan()
        same = made.view(torch.uint8) == wanted.view(torch.uint8)
        wrong = ~(same | nan & made.float().isnan())
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0])
            count = int(wrong.sum())
            found.append(f"{dtype}: {count} values, {x[at]} is {made[at]}, PyTorch: {wanted[at]}")
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--graphs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--floats", default=",".join(FLOATS), help="dtypes of inputs")
    parser.add_argument("--out", type=Path)


def main(options: argparse.Namespace) -> None:
    if not ON_GPU:
        os.environ["TRITON_INTERPRET"] = "1"  # nothing has imported Triton before this
        prepare()
    legality.EVICT_FIRST_BYTES = 0  # allows evict_first for all outputs
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        floats = tuple(options.floats.split(","))
        record = measured(options.graphs, options.seed, Path(folder), floats)
        parts = {"wrong with dropout": dropout, "wrong numbers": numbers, "wrong with fp8": fp8}
        record |= dict.fromkeys(parts)  # what a time limit cuts off was not run
        for name, check in parts.items():
            if options.out:
                save(options.out, **record)
            if check is not fp8 or ON_GPU:
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
    asked = ("wrong", "wrong with dropout", "wrong numbers", "wrong with fp8")
    sys.exit(any(record[key] for key in asked))
