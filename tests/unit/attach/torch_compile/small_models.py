"""Small models and training loops with ``torch.compile(backend="nostall")``."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._inductor.compile_fx
from torch import Tensor, nn

from nostall.attach.torch_compile.backend import Backend
from nostall.attach.torch_compile.runtime.custom_op import record_calls
from nostall.attach.torch_compile.store.kernel_store import KernelStore
from nostall.attach.torch_compile.workers.worker import CODEGEN_WORKER, FIRST_INDUCTOR_WORKER
from nostall.core.measurement import Kind
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


EAGER = {"nostall.fallback": "eager"}
MAX_CALLS = 6000


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
