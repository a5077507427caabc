"""What do kernels of matrix products with their elementwise readers gain over cuBLAS?

    python -m benchmarks run torch_compile.product_kernels --out OUT [--models A,B] [--reducing]
        [--limit 150]

The products are those of the user models (:mod:`.model_zoo.user_models`) in bf16, forward and
backward. Each distinct product is measured in a graph of its own with the operators behind it up to
the next product: cuBLAS with Inductor's kernels, the same again (the null), and the fastest tile
configuration of one kernel. Times are those of CUDA graphs, interleaved; the comparison is repeated
with samples of 20 ms in a loop. Two parts are measured beside them: the products alone by cuBLAS,
and cuBLASLt's own epilogue (``torch._addmm_activation``) where it computes the same. Products that
could save the most bytes come first; OUT is written after each. ``--reducing`` measures products
that a kernel can compute with reductions of their readers, with and without these.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.gpu_lock import gpu_turn
from benchmarks.harness.result_file import save
from benchmarks.torch_compile.model_zoo.user_models import user_models
from benchmarks.torch_compile.product_graphs import Counted, add_cases, post_grad_graphs
from nostall.attach.torch_compile.graph_key import device_name
from nostall.attach.torch_compile.measure.kernel_comparison import graph_device, isolated_state
from nostall.attach.torch_compile.measure.plan_tuning import product_kernels
from nostall.attach.torch_compile.measure.product_comparison import (
    ProductCase,
    check_accuracy,
    comparison_runs,
    fastest_kernel,
    title,
)
from nostall.attach.torch_compile.rewrite.compilers import InductorCompiler
from nostall.attach.torch_compile.rewrite.products import product_record
from nostall.attach.torch_compile.runtime.custom_op import load_op
from nostall.attach.torch_compile.store.kernel_store import KernelStore
from nostall.attach.torch_compile.workers.codegen_job import TargetOnlyDriver
from nostall.core.errors import one_line
from nostall.core.measurement import Comparison
from nostall.fusion.graph.graph import Graph
from nostall.fusion.hardware import hardware_of
from nostall.fusion.products.product_graph import ProductGraph
from nostall.gpu.clock import EventClock, RecordedClock, ReplayClock, Run
from nostall.gpu.synthetic_inputs import synthetic_inputs

SHARES_GPU = True
"""Processes of other benchmarks may run beside this one: each takes turns on the GPU to time."""
ACTIVATION_ERROR = 0.05
"""Largest difference between cuBLASLt's epilogue and the kernel, if they compute the same."""


def main(options: argparse.Namespace) -> None:
    """Measure the products of the selected models."""
    end = time.monotonic() + options.limit
    on_gpu = options.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        sys.exit("no GPU is visible; run this on a machine with a GPU, or use --small --device cpu")
    if not on_gpu:
        from tools.interpreters.triton_interpreter import prepare

        torch.set_float32_matmul_precision("high")  # for dry runs in fp32
        prepare()  # needs TRITON_INTERPRET=1
    # Forked before CUDA is initialized.
    pool = ProcessPoolExecutor(options.processes, get_context("fork")) if on_gpu else None
    if pool is not None:
        list(pool.map(_nothing, range(options.processes)))
    compilations = Compilations(pool)
    cases: dict[str, Counted] = {}
    result: dict[str, Any] = {
        "gpu": device_name(torch.device(options.device)),
        "torch": torch.__version__,
        "products": [],
        "refused": {},
        "failed": {},
    }
    for name, model in user_models(options.small).items():
        wanted = [part for part in options.models.split(",") if part]
        if wanted and not any(part in name for part in wanted):
            continue
        if time.monotonic() > end - options.limit / 2:
            result["failed"][name] = "the time was up"
            continue
        try:
            graphs = post_grad_graphs(model, options.device, getattr(torch, options.dtype))
            result["refused"][name] = add_cases(cases, name, graphs)
        except Exception as error:  # the other models are measured
            result["failed"][name] = one_line(error)
        if not options.reducing:
            compilations.start([each.case for each in cases.values()])
    order = sorted(cases.values(), key=lambda each: -each.bytes_saved)
    if options.reducing:
        order = [each for each in order if not each.case.found.kernel.prologue]
        found = [each.case.found for each in order]
        reducing = {each.products for each in found if each.kernel.reductions}
        order = [each for each in order if each.case.found.products in reducing]
        compilations.start([each.case for each in order])
    result["distinct"] = len(order)
    print(f"{len(order)} distinct products; failed: {result['failed']}", flush=True)
    measure_all(order, compilations, options, result, end)
    if pool is not None:
        pool.shutdown(wait=False, cancel_futures=True)


def _nothing(number: int) -> int:
    time.sleep(0.05)
    return number


def measure_all(
    order: list[Counted],
    compilations: Compilations,
    options: argparse.Namespace,
    result: dict[str, Any],
    end: float,
) -> None:
    """Measure the products until the time is up, the first ones while others are compiled."""
    for each in order:
        if time.monotonic() > end:
            break
        began = time.monotonic()
        record: dict[str, Any] = {"product": title(each.case), "models": each.models}
        record |= {"bytes_saved": each.case.found.bytes_saved}
        try:
            compilations.wait(each.case, end)
            with gpu_turn(), isolated_state(each.case.module):
                measure(each, options, record)
        except Exception as error:  # the other products are measured
            record["failed"] = one_line(error)
        record["seconds"] = round(time.monotonic() - began, 2)
        result["products"].append(record)
        save(options.out, kind="measured", **result)
        print(line(record), flush=True)


class Compilations:
    """Compilations of the kernels of products, which begin while models are still traced."""

    def __init__(self, pool: ProcessPoolExecutor | None) -> None:
        """``pool``: processes that compile; None leaves that to the measurements."""
        self._pool = pool
        self._futures: dict[str, list[Future[str]]] = {}

    def start(self, cases: list[ProductCase]) -> None:
        """Start the compilations of products that are new."""
        if self._pool is None:
            return
        import triton

        target = triton.runtime.driver.active.get_current_target()
        for case in cases:
            key = case.found.kernel.graph.key
            if key not in self._futures:
                hardware = hardware_of(graph_device(case.module))
                kernels = product_kernels(case.found.kernel, KernelStore(), hardware)
                self._futures[key] = [
                    self._pool.submit(compile_kernel, name, target) for _, name, _ in kernels
                ]

    def wait(self, case: ProductCase, end: float) -> None:
        """Wait for the kernels of a product; raises ``TimeoutError`` at ``end`` (monotonic)."""
        for future in self._futures.get(case.found.kernel.graph.key, []):
            future.result(timeout=max(0.1, end - time.monotonic()))


def compile_kernel(name: str, target: Any) -> str:
    """Compile a kernel into Triton's cache, in a process without a GPU; returns the error."""
    import triton

    try:
        triton.runtime.driver.set_active(TargetOnlyDriver(target))
        load_op(name).compile(torch.device("cuda"))
    except Exception as error:  # an exception may not be picklable
        return one_line(error)
    return ""


def measure(each: Counted, options: argparse.Namespace, record: dict[str, Any]) -> None:
    """Measure one product; adds to ``record``."""
    case, seconds = each.case, options.seconds
    clock: Any = ReplayClock() if options.device == "cuda" else RecordedClock({})
    if options.device != "cuda":
        clock = _CpuClock()
    notes: list[str] = []
    end = time.perf_counter() + 60
    kernel, inputs = fastest_kernel(case.found, KernelStore(), clock, "", end, notes.append)
    region = product_record(case.found, kernel, inputs)
    record["configurations"] = notes
    check_accuracy(case.found, region, torch.device(options.device))
    compiler = InductorCompiler({})
    plain, fused = comparison_runs(case, region, compiler)
    beside = parts(case.found.kernel, kernel, torch.device(options.device))
    names = ["inductor", "product", "null", *beside]
    runs = [plain, fused, plain, *beside.values()]
    record["replayed"] = dict(zip(names, clock.samples("", runs, seconds), strict=True))
    loop = EventClock() if options.device == "cuda" else clock
    record["looped"] = dict(zip(names[:3], loop.samples("", runs[:3], seconds), strict=True))


class _CpuClock:
    """Runs everything once and pretends that the last configuration is the fastest (dry runs)."""

    name, kind = "recorded", "modelled"

    def samples(self, graph: str, runs: list[Run], seconds: float) -> list[list[float]]:
        for run in runs:
            run()
        return [[1.0 / (1 + at)] * 12 for at in range(len(runs))]


def parts(product: ProductGraph, kernel: str, device: torch.device) -> dict[str, Run]:
    """The products alone by cuBLAS, the kernel alone, and cuBLASLt's epilogue if it is equal."""
    graph = product.graph
    op = load_op(kernel)
    tensors = synthetic_inputs(op.launcher(None).inputs, device)
    call = op.unchecked_call
    (expected, *others) = call(tensors)
    factors, added = factors_of(product, tensors)
    left = factors[0]

    def products_alone() -> None:
        for right, bias in zip(factors[1:], added, strict=True):
            torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)

    runs: dict[str, Run] = {"kernel alone": lambda: call(tensors), "cublas alone": products_alone}
    bias = added[0]
    uses_tanh = any(graph[i].op == "tanh" for i in product.epilogue)
    if bias is not None and bias.dim() == 1 and not others and (uses_tanh or _is_relu(graph)):
        activation = partial(torch._addmm_activation, bias, left, factors[1], use_gelu=uses_tanh)
        try:
            difference = (activation().float().reshape(-1) - expected.float().reshape(-1)).abs()
            if float(difference.max()) < ACTIVATION_ERROR * float(expected.float().abs().max()):
                runs["cublaslt epilogue"] = activation
        except RuntimeError:
            return runs  # this shape has no such epilogue
    return runs


def _is_relu(graph: Graph) -> bool:
    return any(node.op in ("relu", "maximum") for node in graph)


def factors_of(
    product: ProductGraph, tensors: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """The left operand and the right ones, and the tensor that is added to each product.

    Kernels read these operands first, and each once.
    """
    graph = product.graph
    nodes = list(dict.fromkeys([product.left.index, *(node.index for node in product.rights)]))
    by_node = dict(zip(nodes, tensors, strict=False))
    factors = [by_node[product.left.index], *(by_node[node.index] for node in product.rights)]
    added: list[torch.Tensor | None] = []
    for index in product.dots:
        (reader,) = graph.users[index]
        node = graph[reader]
        other = next((i for i in node.inputs if i != index), None) if node.op == "add" else None
        is_input = other is not None and graph[other].kind == "input"
        added.append(
            synthetic_inputs([_layout(graph, other)], tensors[0].device)[0]
            if is_input and other is not None
            else None
        )
    return factors, added


def _layout(graph: Graph, index: int) -> Any:
    node = graph[index]
    return node.shape, node.strides, getattr(torch, node.dtype)


def compare(samples: dict[str, list[float]]) -> Comparison:
    """The kernel against cuBLAS with Inductor's kernels."""
    return Comparison.from_samples(
        samples["inductor"], samples["product"], samples["null"], kind="measured"
    )


def line(record: dict[str, Any]) -> str:
    """One line of the table that is printed."""
    where = ",".join(f"{name}x{count}" for name, count in record["models"].items())
    if "failed" in record:
        return f"{record['product'][:60]:60} FAILED {record['failed'][:120]} {where}"
    times = {name: 1e6 * statistics.median(row) for name, row in record["replayed"].items()}
    found, looped = compare(record["replayed"]), compare(record["looped"])
    text = " ".join(f"{name} {value:.1f}" for name, value in times.items() if name != "null")
    best = record["configurations"]
    fastest = next((note for note in best if note.endswith(" us")), "").removeprefix("product ")
    return (
        f"{found.ratio:.3f} [{found.low:.3f}, {found.high:.3f}] null [{found.null_low:.3f}, "
        f"{found.null_high:.3f}] loop {looped.ratio:.3f} | {record['product'][:70]} | us: {text} | "
        f"{fastest} | {where}"
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", default="", help="only models whose names contain one of these")
    parser.add_argument("--reducing", action="store_true", help="only products with reductions")
    parser.add_argument("--limit", type=float, default=150, help="seconds for everything")
    parser.add_argument("--seconds", type=float, default=0.3, help="seconds of one comparison")
    parser.add_argument("--processes", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true")
