"""Changes of a program's configuration that can be switched on and off between two steps."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

from nostall.attach.program.changing.captured import CapturedOptimizer, CapturedSteps, can_capture
from nostall.attach.program.changing.generation import StaticCache
from nostall.attach.program.changing.losses import CompiledLoss, Losses
from nostall.attach.program.changing.settings import (
    Attention,
    ExpandableSegments,
    MatmulPrecision,
    attention_order,
)
from nostall.attach.program.kernels import Kernels, NativeKernels
from nostall.attach.program.roots import RefusedOutput, Switch
from nostall.attach.program.shadow import (
    Call,
    Finding,
    check_module,
    check_optimizer,
    map_tensors,
    raise_version_limit,
)

GRAPHS, MARKED = "reduce-overhead", "reduce-overhead, marked steps"
"""The mode of ``torch.compile`` with CUDA graphs; the same for several calls with gradients."""
MOST_MARKED = 16
"""Calls of modules since a mark from which they run as they were: their graphs would be many."""
RECORDED = 3
"""Calls after which a CUDA graph is replayed: one warms up, one records."""

CAPTURED = "captured"
"""The value of an optimiser whose steps are replayed CUDA graphs."""
MUCH_IMAGES = 0.1
"""Share of a module's parameters that its convolutions hold, from which their layout matters."""
FUSED = ("Adam", "AdamW", "SGD")
"""Optimisers whose state is the same with ``fused``, but for the device of its step counters."""
FOREACH = (*FUSED, "Adagrad", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adadelta", "ASGD")


class Compile:
    """``module.compile(backend=...)`` of every root, or ``mode="reduce-overhead"``.

    Gradients lie in the memory of CUDA graphs.  Where several calls of a step add theirs up, graphs
    may overwrite them only from one step of the program to the next, which ``marker`` marks: the
    optimiser that steps last.
    """

    def __init__(self, switches: Sequence[Switch], value: str, marker: Any = None) -> None:
        self.switches, self.backend = switches, value
        self.graphs, self.is_marked = value in (GRAPHS, MARKED), value == MARKED
        self.marker, self._since = marker, 0
        self._hook: Any = None
        if self.graphs:
            self.backend = "inductor"
        self._compiled: dict[Any, list[Any]] = {}
        """By layout and attention: Dynamo takes both for unchanged, and would run one's code with
        the other."""
        self._reports = 0

    def missing(self) -> str:
        """Why nothing would be changed; empty if something would."""
        if self.is_marked and self.marker is None:
            return "no step of an optimiser ends the steps, which several calls with gradients need"
        return "" if self.switches else "no call of a module can be switched"

    def check(self, calls: Mapping[int, Sequence[Call]]) -> Finding:
        if reason := self.missing():
            return Finding("bit-equal", reason)
        worst = Finding("within rounding")  # equal bits in one step do not promise them in others
        for switch in self.switches:
            root = switch.root
            if type(root).__name__ == "DistributedDataParallel":
                root = root.module  # a copy of the wrapper would talk to the other ranks
            warm = RECORDED if self.graphs else 0
            raise_version_limit()
            seen = calls.get(switch.number, ())
            step = self._mark if self.is_marked else None
            finding = check_module(root, seen, self._version, warm=warm, step=step)
            if not finding.refusal and not compiled_graphs():
                finding = finding._replace(refusal="torch.compile finds nothing to compile in it")
            if finding.refusal:
                return finding._replace(refusal=f"{type(root).__name__}: {finding.refusal}")
            worst = max(worst, finding, key=Finding.rank)
        return worst

    def _version(self, module: Any, same_random: bool, own_code: bool = False) -> Any:
        torch = sys.modules["torch"]
        options = {"fallback_random": True} if same_random else {}
        if self.graphs:  # what mode="reduce-overhead" sets
            options["triton.cudagraphs"] = True
        call = module._call_impl
        if is_in_torch(module):

            def call(*args: Any, **kwargs: Any) -> Any:  # Dynamo skips a call in PyTorch's files
                return module._call_impl(*args, **kwargs)

        if own_code:
            call = _own_code(call)
        version = torch.compile(call, backend=self.backend, options=options or None)
        version = _with_own_outputs(version) if self.graphs else version
        return self._within_step(module, version) if self.is_marked else version

    def _within_step(self, module: Any, version: Any) -> Any:
        """A function that runs ``version`` in calls with gradients, ``module`` in all others."""
        is_grad_enabled = sys.modules["torch"].is_grad_enabled

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._since >= MOST_MARKED or not is_grad_enabled():
                return module._call_impl(*args, **kwargs)
            self._since += 1
            return version(*args, **kwargs)

        return call

    def _mark(self, *_: Any) -> None:
        """A step begins: the memory of graphs of the one before may be used again."""
        self._since = 0
        sys.modules["torch"].compiler.cudagraph_mark_step_begin()

    def on(self) -> None:
        if self.is_marked and self._hook is None:
            self._hook = self.marker.register_step_post_hook(self._mark)
            self._mark()  # without a mark so far, graphs guess where a step begins
        raise_version_limit()  # for `nostall apply`, too: modules of one class share a code
        if not self._compiled:
            self._reports = len(_nostall_reports())
        images = [next(filter(is_image, s.root.parameters()), None) for s in self.switches]
        state = *(i is not None and i.is_contiguous() for i in images), *attention_order()
        if state not in self._compiled:
            own = bool(self._compiled)
            self._compiled[state] = [self._version(s.root, False, own) for s in self.switches]
        for switch, version in zip(self.switches, self._compiled[state], strict=True):
            switch.target = version

    def off(self) -> None:
        for switch in self.switches:
            switch.target = None
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def is_settled(self) -> bool:
        """Whether the back end nostall has selected the versions of all graphs."""
        if self.backend != "nostall":
            return True
        return all(report.reason for report in _nostall_reports()[self._reports :])


def _own_code(call: Any) -> Any:
    """A function that makes ``call``, with code of its own: Dynamo keeps its versions by code."""

    def made(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return FunctionType(made.__code__.replace(), made.__globals__, closure=made.__closure__)


def is_image(tensor: Any) -> bool:
    """Whether the two layouts of a tensor of four dimensions differ."""
    other = sys.modules["torch"].channels_last
    return tensor.dim() == 4 and not (
        tensor.is_contiguous() and tensor.is_contiguous(memory_format=other)
    )


def is_in_torch(module: Any) -> bool:
    """Whether ``module`` is of PyTorch's own classes: its method ``compile`` does nothing then."""
    return type(module).__module__.startswith("torch.nn.modules.")


def compiled_graphs() -> int:
    """Graphs that Dynamo has compiled so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo else 0


def _nostall_reports() -> Sequence[Any]:
    backend = sys.modules.get("nostall.attach.torch_compile.backend")
    return backend.nostall.reports if backend else ()


def _with_own_outputs(version: Any) -> Any:
    """``version`` with copied outputs, because the next replay of a CUDA graph overwrites them."""

    def refuse(value: Any) -> Any:
        if not callable(value) and getattr(value, "__dict__", None):
            kind = type(value).__name__
            raise RefusedOutput(f"an output is a {kind}, whose tensors the next replay overwrites")
        return value

    def call(*args: Any, **kwargs: Any) -> Any:
        return map_tensors(version(*args, **kwargs), lambda tensor: tensor.clone(), refuse)

    return call


class OptimizerFlag:
    """``fused=True`` or ``foreach=True`` of the optimisers."""

    def __init__(self, optimizers: Sequence[Any], flag: str) -> None:
        self.flag = flag
        self.optimizers = [o for o in optimizers if can_set(o, flag)]
        self._counters: dict[int, tuple[Any, Any]] = {}
        """Parameters by identity, and their counters of steps on the device."""

    def missing(self) -> str:
        """Why nothing would be changed; empty if something would."""
        return "" if self.optimizers else f"no optimiser takes {self.flag}=True"

    def check(self, calls: Mapping[int, Sequence[Call]]) -> Finding:
        worst = Finding("within rounding" if self.flag == "fused" else "bit-equal")
        for optimizer in self.optimizers:
            finding = check_optimizer(optimizer, lambda copy: self.set(copy, True))
            if finding.refusal:
                return finding
            worst = max(worst, finding, key=Finding.rank)
        return worst

    def on(self) -> None:
        for optimizer in self.optimizers:
            self.set(optimizer, True)
            self._keep_counters(optimizer)

    def off(self) -> None:
        for optimizer in self.optimizers:
            self.set(optimizer, None)

    def _keep_counters(self, optimizer: Any) -> None:
        """Keep the counters where they were when it was on before: recorded graphs read them."""
        for parameter, state in optimizer.state.items():
            counter = state.get("step")
            if self.flag == "fused" and counter is not None:
                _, kept = self._counters.setdefault(id(parameter), (parameter, counter))
                state["step"] = kept if kept is counter else kept.copy_(counter)

    def set(self, optimizer: Any, value: bool | None) -> None:
        """Set the flag of an optimiser, or take it back (None)."""
        for group in optimizer.param_groups:
            group[self.flag] = value
        if self.flag != "fused":
            return
        torch = sys.modules["torch"]
        # As the constructor: a GradScaler then lets the kernel unscale and skip on the device.
        if value:
            optimizer._step_supports_amp_scaling = True
        else:
            optimizer.__dict__.pop("_step_supports_amp_scaling", None)
        is_double = torch.get_default_dtype() == torch.float64 and not value
        dtype = torch.float64 if is_double else torch.float32
        for parameter, state in optimizer.state.items():
            if "step" in state:  # fused kernels read it on the parameter's device
                state["step"] = state["step"].to(parameter.device if value else "cpu", dtype)


class ChannelsLast:
    """``module.to(memory_format=torch.channels_last)`` of roots with convolutions of images.

    The tensors keep their identity: their data moves between two stores, each with one layout.
    Outputs in the other layout are copied to the first one, which the program may rely on.
    """

    def __init__(self, switches: Sequence[Switch], optimizers: Sequence[Any]) -> None:
        self.switches = [switch for switch in switches if has_images(switch.root)]
        self.optimizers = optimizers
        self._stores: list[tuple[Any, Any]] | None = None
        """Tensors, and the data that each of them does not use."""
        self._is_on = False
        self._hooks: list[Any] = []
        self._to_first = _ToFirstLayout()

    def missing(self) -> str:
        """Why nothing would be changed, or something else with it; empty otherwise."""
        if not self.switches:
            return "no module has convolutions of images in PyTorch's first layout"
        return self._alias()

    def _alias(self) -> str:
        """A tensor that a program may reach by other memory than its own; empty without one."""
        owned = {id(t): t for s in self.switches for t in (*s.root.parameters(), *s.root.buffers())}
        pointers = Counter(t.data_ptr() for t in owned.values())
        tensors = self._tensors()
        for tensor in [*tensors, *(t.grad for t in tensors if t.grad is not None)]:
            kind = f"a tensor of shape {tuple(tensor.shape)}"
            size = tensor.numel() * tensor.element_size()
            if tensor._is_view() or tensor.untyped_storage().nbytes() != size:
                return f"{kind} is part of other memory, which would keep the first layout"
            if pointers[tensor.data_ptr()] > 1:
                return f"{kind} has the memory of another one"
            if not tensor.is_cuda and tensor.is_shared():  # of CUDA it is always true
                return f"{kind} is in memory that processes share"
        return ""

    def check(self, calls: Mapping[int, Sequence[Call]]) -> Finding:
        worst = Finding("within rounding")
        if reason := self._alias():
            return worst._replace(refusal=reason)
        for switch in self.switches:
            name = type(switch.root).__name__
            if name == "DistributedDataParallel":
                return Finding(worst.result_class, f"{name} keeps gradients in the first layout")
            seen = calls.get(switch.number, ())
            # Dropout numbers elements in the order of memory, so that none has the same number.
            finding = check_module(switch.root, seen, self._version, drops=False)
            if finding.refusal:
                return finding._replace(refusal=f"{name}: {finding.refusal}")
            worst = max(worst, finding, key=Finding.rank)
        return worst

    def _version(self, module: Any, _: bool) -> Any:
        """A call of ``module`` with parameters of the other layout; its own stay as they are."""
        torch = sys.modules["torch"]

        def call(*args: Any, **kwargs: Any) -> Any:
            other = {
                name: parameter.to(memory_format=torch.channels_last)
                for name, parameter in module.named_parameters()
                if parameter.dim() == 4
            }
            result = torch.func.functional_call(module, other, args, kwargs)
            return self._to_first(module, args, result)

        return call

    def on(self) -> None:
        if self._stores is None:
            torch = sys.modules["torch"]
            self._stores = [
                (tensor, torch.empty_like(tensor, memory_format=torch.channels_last))
                for tensor in self._tensors()
            ]
        if not self._is_on:
            self._swap()
            self._hooks = [s.root.register_forward_hook(self._to_first) for s in self.switches]

    def off(self) -> None:
        if self._is_on:
            self._swap()
        while self._hooks:
            self._hooks.pop().remove()

    def _tensors(self) -> list[Any]:
        """Parameters and buffers of four dimensions, and what optimisers keep of these."""
        torch = sys.modules["torch"]
        roots = [switch.root for switch in self.switches]
        tensors = [t for r in roots for t in (*r.parameters(), *r.buffers()) if t.dim() == 4]
        chosen = {id(tensor): tensor for tensor in tensors}
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                if id(parameter) in chosen:
                    values = [v for v in state.values() if torch.is_tensor(v)]
                    tensors += [v for v in values if v.shape == parameter.shape]
        return list({id(tensor): tensor for tensor in tensors}.values())

    def _swap(self) -> None:
        torch = sys.modules["torch"]
        assert self._stores is not None
        with torch.no_grad():
            for at, (tensor, other) in enumerate(self._stores):
                data = tensor.data
                tensor.data = other.copy_(data)
                self._stores[at] = tensor, data
                if (gradient := tensor.grad) is not None:  # the program may keep it, too
                    gradient.data = torch.empty_like(tensor).copy_(gradient)
        for held in (m._parameters for s in self.switches for m in s.root.modules()):
            for name, parameter in held.items():  # Dynamo looks at tensors of changed dictionaries
                held[name] = None
                held[name] = parameter
        self._is_on = not self._is_on


class _ToFirstLayout:
    """A forward hook that gives images in channels-last layout PyTorch's first one.

    It is part of the module's state, which a program may copy or save as a whole.
    """

    def __init__(self) -> None:
        self._torch = sys.modules["torch"]

    def __call__(self, module: Any, args: Any, output: Any) -> Any:
        changed = False

        def contiguous(tensor: Any) -> Any:
            nonlocal changed
            if tensor.dim() != 4 or tensor.is_contiguous():
                return tensor
            if not tensor.is_contiguous(memory_format=self._torch.channels_last):
                return tensor
            changed = True
            return tensor.contiguous()

        mapped = map_tensors(output, contiguous)
        return mapped if changed else output

    def __deepcopy__(self, memo: Any) -> _ToFirstLayout:
        return self

    def __reduce__(self) -> Any:
        # Where a saved module is read, nostall may lack: a hook that gives None changes nothing.
        return getattr, (contextlib.nullcontext(), "__exit__")


def has_images(root: Any) -> bool:
    """Whether convolutions of images are much of ``root``, with weights in PyTorch's first layout.

    The embedding of a transformer's patches is not: another layout would compile all anew.
    """
    torch = sys.modules["torch"]
    kinds = torch.nn.Conv2d, torch.nn.ConvTranspose2d
    weights = [m.weight for m in root.modules() if isinstance(m, kinds)]
    size = sum(p.numel() for p in root.parameters())
    return sum(w.numel() for w in weights) >= MUCH_IMAGES * size and any(
        w.dim() == 4 and not w.is_contiguous(memory_format=torch.channels_last) for w in weights
    )


def optimizer_changes(optimizers: Sequence[Any]) -> list[str]:
    """Settings of optimisers (``captured``, ``fused``, ``foreach``), in the order to try them."""
    captured = [CAPTURED] if any(map(can_capture, optimizers)) else []
    return captured + [f for f in ("fused", "foreach") if any(can_set(o, f) for o in optimizers)]


def can_set(optimizer: Any, flag: str) -> bool:
    """Whether ``flag`` is unset in an optimiser of PyTorch that can take it at any step."""
    torch = sys.modules["torch"]
    names = FUSED if flag == "fused" else FOREACH
    if type(optimizer) not in [getattr(torch.optim, name) for name in names]:
        return False
    unset = all(
        group.get(flag) is None and not any(map(group.get, ("capturable", "differentiable")))
        for group in optimizer.param_groups
    )
    other = all(not any(map(g.get, ("fused", "foreach"))) for g in optimizer.param_groups)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    plain = all(
        p.is_floating_point()
        and p.device.type in ("cpu", "cuda")
        and (p.grad is None or not p.grad.is_sparse)
        and type(p) in (torch.Tensor, torch.nn.Parameter)
        for p in parameters
    )
    # On GPUs foreach is PyTorch's own choice.
    is_default = flag == "foreach" and any(p.device.type == "cuda" for p in parameters)
    return bool(parameters) and unset and other and plain and not is_default


Change = (
    Compile | OptimizerFlag | CapturedOptimizer | ChannelsLast | MatmulPrecision | StaticCache
    | NativeKernels | CompiledLoss | Attention | ExpandableSegments
)  # fmt: skip
"""Each has ``check``, which tries it on copies, ``on`` and ``off``, which can be repeated, and
``missing``, for programs that a bundle was not measured on."""


def make_change(
    description: Mapping[str, str],
    switches: Sequence[Switch],
    optimizers: Sequence[Any],
    kernels: Kernels | None = None,
    marker: Any = None,
    losses: Losses | None = None,
) -> Change:
    """The change that a description names: its ``kind`` and ``value``.

    ``marker``: the optimiser whose step ends a step of the program.

    Raises :class:`ValueError` for a kind that this version does not know.
    """
    kind, value = description["kind"], description["value"]
    if kind == "native" and kernels is not None:
        return NativeKernels(kernels)
    if kind == "loss" and losses is not None:
        return CompiledLoss(losses)
    if kind == "matmul_precision":
        return MatmulPrecision(value)
    if kind == "attention":
        return Attention(switches, value)
    if kind == "allocator":
        return ExpandableSegments()
    if kind == "compile":
        return Compile(switches, value, marker)
    if kind == "optimizer" and value == CAPTURED:
        captured = [CapturedSteps(o) for o in optimizers if can_capture(o)]
        return CapturedOptimizer(captured, OptimizerFlag([c.optimizer for c in captured], "fused"))
    if kind == "optimizer":
        return OptimizerFlag(optimizers, value)
    if kind == "memory_format":
        return ChannelsLast(switches, optimizers)
    if kind == "generation":
        return StaticCache(switches, value)
    known = "compile, optimizer, memory_format, generation, attention and allocator"
    raise ValueError(f"the change {kind!r} is unknown; this nostall knows {known}")
