"""Steps of an optimiser as replayed CUDA graphs, while all that they read and write stays in place.

The host then launches one graph in the place of the optimiser's Python code and kernels.  A step is
replayed only if parameters, gradients and state are at the addresses, and the options of the groups
have the values, that were recorded; any other step runs as it was.
"""

from __future__ import annotations

import functools
import gc
import inspect
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import chain
from types import MethodType
from typing import Any

from nostall.attach.program.shadow import Call, Finding, check_optimizer, line_of

RATE_IN_MEMORY = ("Adam", "AdamW")
"""Optimisers whose kernels read the learning rate from the device, so that it may change."""
KINDS = (*RATE_IN_MEMORY, "SGD", "Adagrad")
MOST_GRAPHS = 8
"""Graphs of one optimiser; gradients of a program in a steady state are at the same addresses."""
MOST_MISSES = 64
"""Steps at new addresses after which no step is recorded any more."""
SETTLING_STEPS = 20
"""Steps after which an optimiser without a graph counts as warm."""
_OWN = "nostall."
Record = Callable[[Any, Callable[[], None]], Callable[[], None]]
"""Device and function; gives what repeats the function's work on the device."""


def can_capture(optimizer: Any) -> bool:
    """Whether steps of ``optimizer``, one of PyTorch's own, can be recorded as a CUDA graph."""
    torch = sys.modules["torch"]
    if type(optimizer) not in [getattr(torch.optim, name) for name in KINDS]:
        return False
    groups = optimizer.param_groups
    parameters = [p for group in groups for p in group["params"]]
    return (
        not any(group.get(flag) for group in groups for flag in ("capturable", "differentiable"))
        and all(isinstance(g["lr"], float | int) and not g.get("lr_decay") for g in groups)
        and len({p.device for p in parameters}) == 1
        and all(
            p.is_cuda
            and p.is_floating_point()
            and type(p) in (torch.Tensor, torch.nn.Parameter)
            and (p.grad is None or not p.grad.is_sparse)
            for p in parameters
        )
        and not foreign_hooks(optimizer)
    )


def foreign_hooks(optimizer: Any) -> bool:
    """Whether the program has hooks of steps, which may change arguments."""
    module = sys.modules["torch.optim.optimizer"]
    hooks = chain(
        module._global_optimizer_pre_hooks.values(), module._global_optimizer_post_hooks.values(),
        optimizer._optimizer_step_pre_hooks.values(), optimizer._optimizer_step_post_hooks.values(),
    )  # fmt: skip
    return any(not (getattr(hook, "__module__", None) or "").startswith(_OWN) for hook in hooks)


def record_graph(device: Any, function: Callable[[], None]) -> Callable[[], None]:
    """The work of ``function`` as a CUDA graph; it is recorded, not done."""
    torch = sys.modules["torch"]
    graph, was_collecting = torch.cuda.CUDAGraph(), gc.isenabled()
    torch.cuda.synchronize(device)
    gc.disable()  # it could destroy another graph meanwhile, which ends the recording
    try:
        # Not `torch.cuda.graph`, which empties the caches that gradients are allocated from.
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
            # Threads of data loaders pin memory meanwhile, which only this mode permits.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                function()
            finally:
                graph.capture_end()
    finally:
        if was_collecting:
            gc.enable()
    replay: Callable[[], None] = graph.replay
    return replay


class CapturedSteps:
    """The method ``step`` of one optimiser, with the graphs that were recorded of it."""

    def __init__(self, optimizer: Any, record: Record = record_graph) -> None:
        self.optimizer, self.record = optimizer, record
        self.is_on = False
        self.steps = 0
        """Steps of the optimiser since :meth:`on`."""
        self.failure = ""
        """Why no step is recorded any more; empty while there is no reason."""
        self.graphs: dict[Hashable, Callable[[], None]] = {}
        self._last: Hashable = None
        self._misses = 0
        self._before: Any = None
        """The method of the instance that was there before, such as that of a scheduler."""
        self._rates: list[Any] = []
        self._filled: list[float] = []
        """Learning rates on the device, and their values."""
        self._has_rates = type(optimizer).__name__ in RATE_IN_MEMORY
        self._plain = inspect.unwrap(type(optimizer).step, stop=lambda f: not hasattr(f, "hooked"))

    def on(self) -> None:
        """Put the method in the place of the optimiser's."""
        self.is_on, self.steps, self._misses = True, 0, 0
        if self._is_placed():
            return
        self._before = self.optimizer.__dict__.get("step")
        steps = self

        def step(self: Any, closure: Any = None) -> Any:
            return steps.made(closure)

        if getattr(self._before, "_wrapped_by_lr_sched", False):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        step._nostall = self  # type: ignore[attr-defined]
        self.optimizer.step = MethodType(step, self.optimizer)

    def off(self) -> None:
        """Take the method out; where the program has wrapped it since, it makes plain steps."""
        if self._is_placed():
            del self.optimizer.__dict__["step"]
            if self._before is not None:
                self.optimizer.step = self._before
        self.is_on = False

    def _is_placed(self) -> bool:
        return getattr(self.optimizer.__dict__.get("step"), "_nostall", None) is self

    def is_settled(self) -> bool:
        """Whether a graph is replayed, or none is to be waited for."""
        return bool(self.graphs or self.failure) or self.steps >= SETTLING_STEPS

    def made(self, closure: Any = None) -> Any:
        """Make one step."""
        self.steps += 1
        replay = self._replay() if self.is_on and closure is None and not self.failure else None
        if replay is None:
            original = self._before or MethodType(type(self.optimizer).step, self.optimizer)
            return original() if closure is None else original(closure)
        module, optimizer = sys.modules["torch.optim.optimizer"], self.optimizer
        for hook in module._global_optimizer_pre_hooks.values():
            hook(optimizer, (), {})
        replay()
        optimizer._opt_called = True  # what a scheduler of the learning rate asks for
        own = optimizer._optimizer_step_post_hooks.values()
        for hook in chain(own, module._global_optimizer_post_hooks.values()):
            hook(optimizer, (), {})
        return None

    def _replay(self) -> Callable[[], None] | None:
        """What makes this step; None if it is to run as it was."""
        try:
            key = self._key()
            if key is None:
                return None
            if key not in self.graphs:
                if key != self._last:  # only what comes again is recorded
                    self._last, self._misses = key, self._misses + 1
                    if self._misses > MOST_MISSES:
                        self.failure = (
                            "its gradients are at other addresses, or its options have other "
                            "values, in each step"
                        )
                    return None
                if len(self.graphs) == MOST_GRAPHS:
                    self.graphs.pop(next(iter(self.graphs)))
                self.graphs[key] = self.recorded()
            self._fill_rates()
        except Exception as error:  # any error: the step runs as it was
            self.failure = line_of(error)
            return None
        return self.graphs[key]

    def _key(self) -> Hashable | None:
        """Addresses and options that a graph of this step depends on; None: it is not recorded."""
        optimizer, tensor = self.optimizer, sys.modules["torch"].Tensor
        if any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf")):
            raise RuntimeError("a GradScaler unscales in its steps, which are not recorded")
        if foreign_hooks(optimizer) or _is_capturing():
            return None
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        used = [p for p in parameters if p.grad is not None]
        gradients = [p.grad for p in used]
        state = optimizer.state
        kept = [v for p in used for v in state.get(p, {}).values() if isinstance(v, tensor)]
        left_out = ("params", "lr") if self._has_rates else ("params",)
        options = tuple(
            (name, value)
            for group in optimizer.param_groups
            for name, value in group.items()
            if name not in left_out
        )
        return (
            tuple(map(tensor.data_ptr, used)), tuple(map(tensor.data_ptr, gradients)),
            tuple(map(tensor.stride, gradients)), tuple(map(tensor.data_ptr, kept)), options,
        )  # fmt: skip

    def recorded(self) -> Callable[[], None]:
        """Record a step; nothing of it is done on the device."""
        torch, optimizer = sys.modules["torch"], self.optimizer
        groups, state = optimizer.param_groups, optimizer.state
        device = groups[0]["params"][0].device
        used = [p for group in groups for p in group["params"] if p.grad is not None]
        counters = [s["step"] for p in used if "step" in (s := state.get(p, {}))]
        counters = [counter for counter in counters if not counter.is_cuda]
        counted = [counter.clone() for counter in counters]
        if self._has_rates and not self._rates:
            self._filled = [float(group["lr"]) for group in groups]
            self._rates = [torch.tensor(rate, device=device) for rate in self._filled]
        given = [{n: group[n] for n in ("lr", "capturable") if n in group} for group in groups]
        try:
            for at, group in enumerate(groups):
                if self._has_rates:
                    group["lr"] = self._rates[at]
                    group["capturable"] = True
            replay = self.record(device, lambda: self._plain(optimizer))
        finally:
            for group, own in zip(groups, given, strict=True):
                group.update(own)
            for counter, value in zip(counters, counted, strict=True):
                counter.copy_(value)
        if not counters:
            return replay

        def counting() -> None:
            torch._foreach_add_(counters, 1.0)
            replay()

        return counting

    def _fill_rates(self) -> None:
        """Give the device the learning rates of this step."""
        if not self._has_rates:
            return
        for at, group in enumerate(self.optimizer.param_groups):
            if (rate := float(group["lr"])) != self._filled[at]:
                self._rates[at].fill_(rate)
                self._filled[at] = rate


class CapturedOptimizer:
    """Replayed steps of the optimisers, with ``fused=True`` where they can take that."""

    def __init__(
        self, captured: Sequence[CapturedSteps], fused: Any, record: Record = record_graph
    ) -> None:
        """``fused``: the change of ``fused=True`` of the same optimisers."""
        self.captured, self.fused, self._record = captured, fused, record

    def missing(self) -> str:
        """Why nothing would be changed; empty if something would."""
        return "" if self.captured else "no optimiser has steps that can be recorded"

    def check(self, calls: Mapping[int, Sequence[Call]]) -> Finding:
        worst = Finding("bit-equal")
        for captured in self.captured:
            is_fused = any(captured.optimizer is o for o in self.fused.optimizers)
            change = functools.partial(self._record_one, is_fused=is_fused)
            finding = check_optimizer(captured.optimizer, change)
            if finding.refusal:
                return finding
            finding = finding._replace(result_class="within rounding")  # rates are rounded
            worst = max(worst, finding, key=Finding.rank)
        return worst

    def _record_one(self, twin: Any, is_fused: bool) -> None:
        """Let the next step of ``twin``, a copy, be recorded and replayed."""
        if is_fused:
            self.fused.set(twin, True)
        twin.step = lambda: CapturedSteps(twin, self._record).recorded()()

    def is_settled(self) -> bool:
        return all(captured.is_settled() for captured in self.captured)

    def on(self) -> None:
        self.fused.on()
        for captured in self.captured:
            captured.on()

    def off(self) -> None:
        for captured in self.captured:
            captured.off()
        self.fused.off()


def _is_capturing() -> bool:
    torch = sys.modules["torch"]
    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
