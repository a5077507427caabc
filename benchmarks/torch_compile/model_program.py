"""A user's program for ``benchmarks.torch_compile.models``: one model, compiled by one method."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from benchmarks.harness.gpu_lock import gpu_turn
from benchmarks.torch_compile.model_setup import Method, Setup
from benchmarks.torch_compile.model_zoo.parts import Model
from benchmarks.torch_compile.step_timing import peak_bytes, synchronize

if TYPE_CHECKING:
    from nostall.attach.torch_compile.report import GraphReport

_PROGRAMS = itertools.count()


class Program:
    """A model with one method; :meth:`step` is one iteration of a user's loop."""

    def __init__(self, model: Model, method: Method, setup: Setup) -> None:
        torch.manual_seed(0)
        module, inputs = model.make()
        dtype = getattr(torch, setup.dtype)
        self.module: nn.Module = module.to(setup.device, dtype).train(model.train)
        self.inputs = [x.to(setup.device, dtype if x.is_floating_point() else None) for x in inputs]
        if model.varies:
            torch._dynamo.mark_dynamic(self.inputs[0], 0)
        self.train = model.train
        self.reports: list[GraphReport] = []
        self._method, self._setup = method, setup
        self._function = with_own_code(self.module)
        self._wanted: Tensor | None = None
        # Numbers of graphs without a choice that the last step did not call.
        self._idle: frozenset[int] = frozenset()

    def compile(self) -> None:
        """Call torch.compile as a user does, including the imports that this needs."""
        method = self._method
        if method.backend == "inductor":
            self._function = torch.compile(self._function, mode=method.mode)
        elif method.backend == "nostall":
            backend = nostall_backend(self._setup.device)
            self.reports = backend.reports
            # torch.compile accepts either a mode or options.
            mode = torch._inductor.list_mode_options(method.mode) if method.mode else {}
            tuning = {} if self._setup.device == "cuda" else {"nostall.tuned_plans": 0}
            options = {**mode, **tuning, **method.options}
            self._function = torch.compile(self._function, backend=backend, options=options)

    def step(self) -> Any:
        """Run one step; returns the model's result."""
        if self._setup.device == "cuda":
            # With CUDA graphs Inductor must be told that the previous result may be overwritten.
            torch.compiler.cudagraph_mark_step_begin()
        if not self.train:
            with torch.no_grad():
                return self._function(*self.inputs)
        self.module.zero_grad(set_to_none=True)
        result = self._function(*self.inputs)
        if self._wanted is None:
            draw = torch.Generator(result.device).manual_seed(0)
            self._wanted = torch.randn(result.shape, device=result.device, generator=draw)
        # After a norm the gradient of the mean square alone is only rounding error.
        (result.float() - self._wanted).square().mean().backward()
        return result.detach()

    def peak_bytes(self) -> int:
        """Peak memory of a step above :attr:`state_bytes`; gradients are part of it."""
        self.module.zero_grad(set_to_none=True)
        return peak_bytes(self.step)

    @property
    def state_bytes(self) -> int:
        """Memory of parameters, buffers and inputs."""
        tensors = [*self.module.parameters(), *self.module.buffers(), *self.inputs]
        return sum(x.numel() * x.element_size() for x in {id(x): x for x in tensors}.values())

    @property
    def has_chosen(self) -> bool:
        """Whether the backend has chosen a version for every graph that steps still call.

        Dynamo may have compiled a function again for another guard behind the first step.
        """
        return all(report.reason or at in self._idle for at, report in enumerate(self.reports))

    def run_until_chosen(self, seconds: float) -> list[float]:
        """Run steps until the backend has chosen, at most ``seconds``; returns their times."""
        step_seconds, deadline = list[float](), time.perf_counter() + seconds
        while not self.has_chosen and time.perf_counter() < deadline:
            calls = [report.calls for report in self.reports]
            with gpu_turn():
                start = time.perf_counter()
                self.step()
                synchronize(self._setup.device)
            step_seconds.append(time.perf_counter() - start)
            self._idle = frozenset(
                at for at, count in enumerate(calls) if self.reports[at].calls == count
            )
        return step_seconds


def nostall_backend(device: str) -> Any:
    """The backend; on a CPU with recorded times that let stitched versions win.

    Measured times would not, because Triton's interpreter is slow.
    """
    from nostall.attach.torch_compile.backend import Backend

    if device == "cuda":
        return Backend()
    from nostall.gpu.clock import RecordedClock

    faster = RecordedClock({"*": [[2.0] * 12, [1.0] * 12, [2.0] * 12]})
    return Backend(faster, faster)


def with_own_code(module: nn.Module) -> Callable[..., Any]:
    """A function with its own code object that calls the module.

    Dynamo caches compiled code by code object, and a call checks the guards of all entries, so the
    methods must not share one.  The function is in a module whose name is the same in every run,
    because PyTorch's cache keys contain the source of the inputs.
    """
    name = f"{__name__}.program_{next(_PROGRAMS)}"
    sys.modules[name] = scope = ModuleType(name)
    vars(scope)["module"] = module
    exec("def call(*inputs):\n    return module(*inputs)\n", vars(scope))
    call: Callable[..., Any] = vars(scope)["call"]
    return call
