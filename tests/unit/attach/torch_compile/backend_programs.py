"""Programs that run with ``torch.compile(backend="nostall")`` in Triton's interpreter.

``python -m tests.unit.attach.torch_compile.backend_programs FOLDER`` runs them in processes one
after the other, and writes the results of each process to FOLDER as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._inductor.compile_fx
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from nostall.attach.torch_compile.backend import Backend
from nostall.attach.torch_compile.measure import plan_tuning
from nostall.attach.torch_compile.rewrite import matching
from nostall.attach.torch_compile.rewrite.direct_call import FUNCTION_NAME
from nostall.attach.torch_compile.runtime.custom_op import STITCHED_OP, record_calls
from nostall.attach.torch_compile.selection import precompile
from nostall.attach.torch_compile.store.kernel_store import KernelStore
from nostall.attach.torch_compile.workers.codegen_job import CodegenResult
from nostall.attach.torch_compile.workers.worker import (
    CODEGEN_WORKER,
    FIRST_INDUCTOR_WORKER,
    INDUCTOR_WORKERS,
    JobResult,
)
from nostall.core.measurement import Kind
from nostall.fusion.testing.triton_interpreter import prepare
from nostall.gpu.clock import RecordedClock, Run, Samples

FASTER = RecordedClock({"*": [[2.0] * 12, [1.0] * 12, [2.0] * 12]})


class SecondIsFastest:
    """A clock by which the second of several runs is always the fastest; nothing runs."""

    name = "recorded"
    kind: Kind = "measured"
    asked = 0

    def samples(self, graph: str, runs: Sequence[Run], seconds: float) -> Samples:
        self.asked += 1
        return [[1.0 if i == 1 else 2.0] * 12 for i in range(len(runs))]


class SlowAtCalls(SecondIsFastest):
    """The same, but runs everything, and the second run takes ``slow_s`` at these calls."""

    def __init__(self, *calls: int, slow_s: float = 1.0) -> None:
        self.calls, self.slow_s = calls, slow_s

    def samples(self, graph: str, runs: Sequence[Run], seconds: float) -> Samples:
        for run in runs:
            run()
        fast = super().samples(graph, runs, seconds)
        slow = [[1.0] * 12, [self.slow_s] * 12, [1.0] * 12]
        return slow if self.asked in self.calls else fast


STITCHED = {"nostall.choose": "stitched"}
OPERATOR_CALL = f"torch.ops.{STITCHED_OP}"
EAGER = {"nostall.fallback": "eager"}
MAX_CALLS = 6000
COMPARE_KERNELS = {"nostall.tuned_plans": 0, "nostall.seconds": 60.0}


class Feed(nn.Module):
    """Norm, matrix product, residual and softmax; Inductor needs no C++ compiler for the rest."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.up(self.norm(x))).softmax(-1)


class BatchNormSoftmax(nn.Module):
    """A batch norm, which mutates its buffers, and a softmax."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.batch(x).softmax(-1)


def make(name: str) -> tuple[nn.Module, Tensor]:
    """A model and its input; the same numbers at each call."""
    torch.manual_seed(0)
    models = {
        "wide": lambda: Feed(24),
        "narrow": lambda: Feed(12),
        "norms": lambda: BatchNormSoftmax(12),
    }
    x = torch.randn(6, 24 if name == "wide" else 12)
    model = models[name]()
    return model.requires_grad_(name != "narrow"), x.requires_grad_(name != "narrow")


def results(function: Callable[..., Tensor], module: nn.Module, x: Tensor) -> list[Tensor]:
    """The result, all gradients, and the module's buffers after a training step."""
    torch.manual_seed(1)
    module.zero_grad()
    x.grad = None
    y = function(x)
    if not x.requires_grad:
        return [y.detach()]
    (y * torch.linspace(0, 1, y.numel()).view(y.shape)).sum().backward()
    gradients = [p.grad.clone() for p in (x, *module.parameters()) if p.grad is not None]
    return [y.detach(), *gradients, *(b.clone() for b in module.buffers())]


def max_difference(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def digest(values: list[Tensor]) -> str:
    data = b"".join(value.contiguous().numpy().tobytes() for value in values)
    return hashlib.sha256(data).hexdigest()


def run_by_entry_point(name: str) -> dict[str, Any]:
    """A stitched model by the name of the backend; Inductor compiles the rest."""
    from torch._dynamo.utils import counters

    before = dict(counters["aot_autograd"])
    module, x = make(name)
    with record_calls() as called:
        # Inductor's own patterns take seconds to load.
        options = {**STITCHED, "pattern_matcher": False}
        function = torch.compile(module, backend="nostall", options=options)
        found, codes = run_and_get_code(lambda: results(function, module, x))
    plain, y = make(name)
    hits = "autograd_cache_hit"
    return {
        "kernels": sorted(called),
        "direct calls": sum(code.count(f" = {FUNCTION_NAME}(") for code in codes),
        "operator calls": sum(code.count(f" = {OPERATOR_CALL}(") for code in codes),
        "digest": digest(found),
        "difference": max_difference(found, results(plain, plain, y)),
        "hits": counters["aot_autograd"][hits] - before.get(hits, 0),
    }


def train(model: str, kernel_clock: SecondIsFastest, options: dict[str, Any]) -> dict[str, Any]:
    """A training loop until the selection; the candidate wins if the graphs are compared."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()  # graphs of earlier loops would count as recompilations
    graph_hits = counters["inductor"]["fxgraph_cache_hit"]
    autograd_hits = counters["aot_autograd"]["autograd_cache_hit"]
    backend = Backend(FASTER, kernel_clock)
    module, x = make(model)
    function = torch.compile(module, backend=backend, options={**EAGER, **options})
    found, states, called, calls_after = [], [], [], 0
    started: list[bool] = []
    while calls_after < 2 and len(states) < MAX_CALLS:
        with record_calls() as kernels:
            found.append(results(function, module, x))
        started.append(FIRST_INDUCTOR_WORKER.is_running and CODEGEN_WORKER.is_running)
        (report,) = backend.reports
        states.append(report.state)
        called.append(len(kernels) > 0)
        calls_after += bool(report.reason)
        time.sleep(0.01)  # for the background tasks
    plain, y = make(model)
    expected = [results(plain, plain, y) for _ in found]
    return {
        "states": states,
        "called": called,
        "started": started,
        "difference": max(max_difference(a, b) for a, b in zip(found, expected, strict=True)),
        "from store": report.from_store,
        "reason": report.reason,
        "ratio": report.comparison.ratio if report.comparison else None,
        "seconds": sorted(report.seconds),
        "asked": kernel_clock.asked,
        "plans": sorted(KernelStore().load_kernel(name)[0].plan for name in kernels),
        "kernels": sorted(kernels),
        "kept in inductor": report.kept_in_inductor,
        "local only": report.local_only_reason,
        "explained": report.explain(),
        "digest": digest(found[-1]),
        "graph hits": counters["inductor"]["fxgraph_cache_hit"] - graph_hits,
        "autograd hits": counters["aot_autograd"]["autograd_cache_hit"] - autograd_hits,
    }


def with_workers() -> dict[str, Any]:
    """Training with workers, without them, and with one that dies, each twice with its own caches.

    Also returns the jobs and failures of the workers, and whether a worker still runs at the end.
    """
    options = {**COMPARE_KERNELS, "nostall.fallback": "inductor", "pattern_matcher": False}
    folders = [os.environ["NOSTALL_HOME"], os.environ["TORCHINDUCTOR_CACHE_DIR"]]
    result: dict[str, Any] = {}
    run_codegen = CODEGEN_WORKER.run
    target, limits = (
        precompile.compile_target,
        (
            precompile.REGIONS_PER_WORKER,
            precompile.MAX_COMPILERS,
        ),
    )
    precompile.compile_target = lambda device: "nothing is compiled in an interpreter"
    precompile.REGIONS_PER_WORKER, precompile.MAX_COMPILERS = 1, 8
    jobs: list[str] = []
    failures = {"first": list[str](), "others": list[str]()}
    run_first, *run_others = (worker.run for worker in INDUCTOR_WORKERS)

    def run_recorded(name: str, run: Callable[[Any], Any], job: Any) -> Any:
        answer = run(job)
        failures[name].append(answer.failure)
        return answer

    def run_codegen_recorded(job: Any) -> Any:
        answer = run_codegen(job)
        jobs.append(f"{type(job).__name__}: {answer.failure}")
        return answer

    def fail(job: Any) -> Any:
        return JobResult("no luck")

    def die(job: Any) -> Any:
        return JobResult(value=CodegenResult(process_died=True))

    CODEGEN_WORKER.run = die  # type: ignore[method-assign]
    for worker, run in zip(INDUCTOR_WORKERS[1:], run_others, strict=True):
        worker.run = partial(run_recorded, "others", run)  # type: ignore[method-assign]
    result["died"] = train("wide", SlowAtCalls(), options)
    for name, first, codegen in (
        ("workers", partial(run_recorded, "first", run_first), run_codegen_recorded),
        ("alone", fail, fail),
    ):
        FIRST_INDUCTOR_WORKER.run = first  # type: ignore[method-assign]
        CODEGEN_WORKER.run = codegen  # type: ignore[method-assign]
        os.environ["NOSTALL_HOME"], os.environ["TORCHINDUCTOR_CACHE_DIR"] = (
            f"{folder}-{name}" for folder in folders
        )
        for run_name in (name, f"{name}, again"):
            result[run_name] = train("wide", SlowAtCalls(), options)
        precompile.REGIONS_PER_WORKER, precompile.MAX_COMPILERS = limits[0], 1
    CODEGEN_WORKER.run = run_codegen  # type: ignore[method-assign]
    for worker, run in zip(INDUCTOR_WORKERS, (run_first, *run_others), strict=True):
        worker.run = run  # type: ignore[method-assign]
    precompile.compile_target = target
    precompile.REGIONS_PER_WORKER, precompile.MAX_COMPILERS = limits
    os.environ["NOSTALL_HOME"], os.environ["TORCHINDUCTOR_CACHE_DIR"] = folders
    running = any(worker.is_running for worker in (*INDUCTOR_WORKERS, CODEGEN_WORKER))
    return {**result, "running": running, "jobs": jobs, "failures": failures}


def with_kernel_comparisons() -> dict[str, Any]:
    """Training where all kernels are faster than Inductor's, all but one, none, or all are slower.

    Each case has its own store and runs twice.
    """
    result = {}
    home = os.environ["NOSTALL_HOME"]
    clocks = {
        "all": SlowAtCalls(),
        "some": SlowAtCalls(2),
        "equal": SlowAtCalls(*range(99)),
        "none": SlowAtCalls(*range(99), slow_s=2.0),
    }
    for name, clock in clocks.items():
        os.environ["NOSTALL_HOME"] = f"{home}-{name}"
        for run in ("first", "again"):
            result[f"{name}, {run}"] = train("wide", clock, COMPARE_KERNELS)
    os.environ["NOSTALL_HOME"] = home
    return result


def with_tuning() -> dict[str, Any]:
    """Training with tuned plans, once more with the stored selection, and with short kernels."""
    clock = SecondIsFastest()
    # The tensors of these tests are small.
    shortest, plan_tuning.MIN_TUNED_S = plan_tuning.MIN_TUNED_S, 0.0
    result: dict[str, Any] = {run: train("norms", clock, {}) for run in ("first", "again")}
    plan_tuning.MIN_TUNED_S = shortest
    tunings = [*(KernelStore().folder / "races").glob("*.json")]
    records = [json.loads(path.read_text()) for path in tunings]
    result["fastest plans"] = [record["plans"][record["winner"]] for record in records]
    result["winners"] = [record["winner"] for record in records]
    home = os.environ["NOSTALL_HOME"]
    os.environ["NOSTALL_HOME"] = f"{home}-short"
    result["short"] = train("norms", SecondIsFastest(), {})
    result["short tunings"] = len([*(KernelStore().folder / "races").glob("*.json")])
    os.environ["NOSTALL_HOME"] = home
    return result


def unusual_programs() -> dict[str, Any]:
    """Programs of which little or nothing can be stitched."""

    def breaks(x: Tensor) -> Tensor:
        y = x.softmax(-1)
        torch._dynamo.graph_break()
        return (y - y.mean(-1, keepdim=True)).exp()

    def in_place(x: Tensor) -> Tensor:
        y = x.softmax(-1)
        z = y[0]
        z.add_(1)
        return y.sum(-1) + x.add_(z).sum(-1)

    def complex_numbers(x: Tensor) -> Tensor:
        return torch.view_as_complex(x.view(-1, 2)).abs() + x.view(-1, 2).softmax(-1).sum(-1)

    def data_dependent(x: Tensor) -> Tensor:
        return x[x > 0].sort().values.cumsum(0)

    def batch_norm(x: Tensor) -> Tensor:
        mean, variance = torch.zeros(12), torch.ones(12)
        return torch.nn.functional.batch_norm(x, mean, variance).softmax(-1)

    result = {}
    for function in (breaks, in_place, complex_numbers, data_dependent, batch_norm):
        backend = Backend()
        compiled = torch.compile(function, backend=backend, options={**EAGER, **STITCHED})
        torch.manual_seed(0)
        x = torch.randn(6, 12)
        with (
            torch.inference_mode() if function is breaks else torch.no_grad(),
            record_calls() as kernels,
        ):
            found, expected = compiled(x.clone()), function(x.clone())
        result[function.__name__] = {
            "difference": float((found - expected).abs().max()),
            "strides": [found.stride(), expected.stride()],
            "kernels": len(kernels),
            "not fused": sorted({why for r in backend.reports for why, _ in r.not_fused}),
            "graphs": len(backend.reports),
        }
    return result


def dynamic_sizes() -> dict[str, Any]:
    """Programs with a dynamic batch size, beside eager PyTorch, and one with two dynamic sizes.

    Ways: prepared at the second call, with its stored selection, prepared in the background, and
    inside Inductor's code.  At 17 rows a tensor has more elements than kernels can count.
    """
    from torch._dynamo.utils import counters

    at_once = {**EAGER, "nostall.background": False}
    ways = {
        "eager": ("wide", at_once, (6, 7, 16, 6, 17)),
        "again": ("wide", at_once, (6, 7, 16, 17)),
        "background": ("wide", {**EAGER, "nostall.fuse": "all"}, (6, *[7, 8] * 300, 16, 17)),
        # Without gradients Inductor needs no C++ compiler for the rest.
        "inductor": ("narrow", {**STITCHED, "pattern_matcher": False}, (6, 7, 16, 6)),
    }
    result: dict[str, Any] = {}
    matching.MAX_ELEMENTS = 16 * 24
    for name, (model, options, sizes) in ways.items():
        torch._dynamo.reset()
        backend = Backend(FASTER)
        module, x = make(model)
        compiled = torch.compile(module, backend=backend, options=options)
        before = counters["stats"]["unique_graphs"]
        differences, states, called = [], [], []
        for rows in sizes:
            if name == "background" and rows < 16 and "stitched" in states:
                continue
            time.sleep(0.01 if name == "background" else 0.0)
            batch = torch.randn(rows, x.shape[1]).requires_grad_(x.requires_grad)
            torch._dynamo.mark_dynamic(batch, 0)
            with record_calls() as kernels:
                found = results(compiled, module, batch)
            differences.append(max_difference(found, results(module, module, batch)))
            states.append(backend.reports[-1].state)
            called.append(len(kernels))
        result[name] = {
            "difference": max(differences),
            "compiled": counters["stats"]["unique_graphs"] - before,
            "states": states,
            "called": called,
        }
    backend = Backend()
    compiled = torch.compile(
        lambda x: x.softmax(-1), backend=backend, dynamic=True, options={**EAGER, **STITCHED}
    )
    differences = [
        float((compiled(x) - x.softmax(-1)).abs().max()) for x in map(torch.ones, ((3, 4), (5, 6)))
    ]
    not_fused = [list(r.not_fused) for r in backend.reports]
    return {**result, "two": {"difference": max(differences), "not fused": not_fused}}


def saved_for_backward(backend: str, options: dict[str, Any] | None) -> list[str]:
    """Layouts of the tensors that a compiled forward pass saves for the backward pass."""
    torch._dynamo.reset()
    module, x = make("wide")
    saved: list[str] = []

    def pack(value: Tensor) -> Tensor:
        saved.append(f"{tuple(value.shape)} {value.stride()} {value.dtype}")
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        torch.compile(module, backend=backend, options=options)(x)
    return sorted(saved)


def run_everything(models: tuple[str, ...]) -> dict[str, Any]:
    return {
        "entry point": {name: run_by_entry_point(name) for name in models},
        "tuning": with_tuning(),
        "comparisons": with_kernel_comparisons(),
        "workers": with_workers(),
        "unusual": unusual_programs(),
        "dynamic": dynamic_sizes(),
        "saved": {
            "stitched": saved_for_backward("nostall", {**STITCHED, **EAGER}),
            "plain": saved_for_backward("aot_eager_decomp_partition", None),
        },
    }


def run_models(models: tuple[str, ...]) -> dict[str, Any]:
    return {"entry point": {name: run_by_entry_point(name) for name in models}}


def run_models_elsewhere(models: tuple[str, ...]) -> dict[str, Any]:
    """The models with other store and cache folders, as on another machine."""
    folder = Path(sys.argv[1]) / "elsewhere"
    os.environ["NOSTALL_HOME"] = str(folder / "home")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    return run_models(models)


def run_ranks(models: tuple[str, ...]) -> dict[str, Any]:
    """Two ranks of one job at the same time, each with its own store.

    On rank 0 the second plan is the fastest; rank 1 never uses its clock.
    """
    folder = Path(sys.argv[1]) / "job"
    folder.mkdir()
    plan_tuning.MIN_TUNED_S = 0.0

    def run(rank: int) -> dict[str, Any]:
        os.environ["NOSTALL_HOME"] = str(folder / f"home {rank}")
        rendezvous = f"file://{folder / 'rendezvous'}"
        torch.distributed.init_process_group("gloo", rendezvous, rank=rank, world_size=2)
        found = {"alone": train(models[0], SecondIsFastest(), {}), "ddp": train_ddp(rank)}
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        return found

    children = [fork(partial(run, rank), folder / f"{rank}.json") for rank in range(2)]
    for child in children:
        wait_for(child)
    return {f"rank {rank}": json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)}


def train_ddp(rank: int) -> dict[str, Any]:
    """A DistributedDataParallel model, whose graphs PyTorch splits, beside eager PyTorch.

    Runs until all graphs have a selection on both ranks.
    """
    from torch.nn.parallel import DistributedDataParallel

    distributed: Any = torch.distributed
    distributed._DEFAULT_FIRST_BUCKET_BYTES = 1500
    torch._dynamo.reset()
    backend, models = Backend(FASTER, SecondIsFastest()), []
    for _ in range(2):
        torch.manual_seed(0)
        module = DistributedDataParallel(nn.Sequential(Feed(24), Feed(24)), bucket_cap_mb=0.002)
        models.append((module, torch.optim.SGD(module.parameters(), 0.1)))
    options = {**EAGER, "nostall.tuned_plans": 0}
    compiled = torch.compile(models[0][0], backend=backend, options=options)
    pending, outputs = torch.ones(1), list[Tensor]()
    while pending and len(outputs) < MAX_CALLS:
        x = torch.randn(6, 24, generator=torch.Generator().manual_seed(len(outputs) + rank))
        with record_calls() as kernels:
            for function, optimizer in (compiled, models[0][1]), models[1]:
                optimizer.zero_grad()
                y = function(x)
                (y * torch.linspace(0, 1, 24)).sum().backward()
                optimizer.step()
                outputs.append(y.detach())
        pending = torch.tensor(float(not all(report.reason for report in backend.reports)))
        torch.distributed.all_reduce(pending)
        time.sleep(0.01)  # for the background tasks
    parameters = zip(*(list(module.parameters()) for module, _ in models), strict=True)
    differences = [max_difference([a], [b]) for a, b in parameters]
    return {
        "graphs": [[report.state, report.reason] for report in backend.reports],
        "kernels": sorted(kernels),
        "difference": max(max_difference(outputs[::2], outputs[1::2]), *differences),
    }


# Each runs in a process that is forked before anything is traced, so that no process knows what
# another one has compiled, and PyTorch is imported once.
PROCESSES: dict[str, Callable[[], dict[str, Any]]] = {
    "cold": lambda: run_everything(("wide", "narrow")),
    "warm": lambda: run_models(("narrow", "wide")),
    "cold elsewhere": lambda: run_models_elsewhere(("narrow", "wide")),
    "warm elsewhere": lambda: run_models_elsewhere(("wide", "narrow")),
    "ranks": lambda: run_ranks(("wide",)),
}


def fork(work: Callable[[], dict[str, Any]], file: Path) -> int:
    """Fork a process that writes its result to a file; returns its id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        file.write_text(json.dumps(work()))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def wait_for(child: int) -> None:
    """Wait for a process; exits if it failed."""
    _, status = os.waitpid(child, 0)
    if status:
        sys.exit("a process failed")


def main() -> None:
    prepare()
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    for name, work in PROCESSES.items():
        wait_for(fork(work, folder / f"{name}.json"))


if __name__ == "__main__":
    main()
