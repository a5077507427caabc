"""Programs that run with ``torch.compile(backend="nostall")`` in Triton's interpreter.

``python -m tests.unit.attach.torch_compile.backend_programs FOLDER`` runs them in processes one
after the other, and writes the results of each process to FOLDER as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._inductor.compile_fx
from tools.interpreters.triton_interpreter import prepare
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from nostall.attach.torch_compile.backend import Backend
from nostall.attach.torch_compile.measure import plan_tuning
from nostall.attach.torch_compile.rewrite import matching
from nostall.attach.torch_compile.rewrite.direct_call import FUNCTION_NAME
from nostall.attach.torch_compile.runtime.custom_op import STITCHED_OP, record_calls
from tests.unit.attach.torch_compile.small_models import (
    EAGER,
    FASTER,
    MAX_CALLS,
    Feed,
    SecondIsFastest,
    digest,
    make,
    max_difference,
    results,
    train,
)
from tests.unit.attach.torch_compile.training_programs import (
    with_kernel_comparisons,
    with_tuning,
    with_workers,
)

STITCHED = {"nostall.choose": "stitched"}
OPERATOR_CALL = f"torch.ops.{STITCHED_OP}"


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
    """Programs with a dynamic batch size, beside eager PyTorch, and one of which all sizes are.

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
    differences, called = [], []
    for shape in ((3, 4), (5, 2), (2, 100)):
        x = torch.randn(shape)
        with record_calls() as kernels:
            differences.append(float((compiled(x) - x.softmax(-1)).abs().max()))
        called.append(len(kernels))
    graphs = len(backend.reports)
    two = {"difference": max(differences), "kernels": called, "graphs": graphs}
    return {**result, "two": two}


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
