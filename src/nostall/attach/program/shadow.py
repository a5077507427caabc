"""What a change does to results: it is tried on copies, beside the original.

The original is also run with parameters and inputs moved by one rounding.  A change is *within
rounding* if no result is further from the original's than twice the furthest of these, plus some
roundings of the result itself: sums in another order.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import importlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from nostall.attach.program.distances import (
    Outcome,
    compare,
    finite,
    is_equal,
    is_float,
    norm,
)

SHIFT = 0.02
"""Relative change of the parameters before the second runs, so that a cached result is wrong."""
MOVED = 3
"""Originals that are moved by one rounding."""
TF32 = 2.0**-10
"""One rounding of TF32, in which GPUs compute convolutions of float32 unless told otherwise."""
ROOM = 8
"""Results stay on the GPU if this many times their size is free: five runs are compared."""
CHUNK = 1 << 27
"""Elements of parameters whose optimiser steps are compared at a time."""
MASK, MASK_SHARE = 1e8, 0.99
"""Size and share of a type's largest number from which negative numbers are masks.  They are not
moved: they would overflow, and scores of rows that hold nothing else would no longer be equal."""
VERSIONS = 64
"""Versions of one code that Dynamo may compile while changes are tried."""
_limits: list[int] = []
"""Dynamo's own limit while it is raised."""
CLASSES = ("bit-equal", "within rounding", "other random numbers", "changes numbers")
"""What a change does to results, from nothing to most."""
Make = Callable[[Any, bool], Any]
"""The changed version of a module's call; with True it draws the original's random numbers."""


class Call(NamedTuple):
    """A call of a module as the program made it."""

    args: Any
    kwargs: Any
    training: bool
    grad: bool
    autocast: tuple[str, Any] | None
    """Device and dtype of ``torch.autocast``."""


class Finding(NamedTuple):
    """What a change does to results, or why it is refused."""

    result_class: str
    refusal: str = ""
    detail: str = ""

    def rank(self) -> int:
        """Place of the class in :data:`CLASSES`."""
        return CLASSES.index(self.result_class)


def clone(value: Any) -> Any:
    """Arguments with their own tensors, also in objects that hold some, such as caches of keys."""

    def copied(tensor: Any) -> Any:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    return map_tensors(
        value, copied, lambda found: found if _state(found) is None else copy.deepcopy(found)
    )


def current_autocast() -> tuple[str, Any] | None:
    """Device and dtype of the autocast that is on; None if none is."""
    torch = sys.modules["torch"]
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return device, torch.get_autocast_dtype(device)
    return None


def check_module(
    root: Any,
    calls: Sequence[Call],
    make: Make,
    *,
    warm: int = 0,
    drops: bool = True,
    step: Callable[[], None] | None = None,
) -> Finding:
    """Try the version that ``make`` gives on a copy of ``root`` and calls of the program.

    ``warm``: runs of each call before those that are compared, for versions that record first.
    ``drops``: whether the version can draw the original's random numbers; else values are compared
    without dropout, and then only how much two seeds differ.
    ``step``: called where a step of the program begins; gradients of two calls in a step are then
    compared, too, which are added up.
    """
    usable = [call for call in calls if call.training == root.training]
    if not usable:
        return Finding(CLASSES[0], "no call of it was seen that a copy could repeat")
    if any(type(m).__name__ == "SyncBatchNorm" for m in root.modules()):
        return Finding(CLASSES[0], "SyncBatchNorm talks to other ranks, so no copy can be tried")
    try:
        return _Bench(root, step).check(usable, make, warm, drops)
    except Exception as error:  # any error of a user's __deepcopy__, the compiler or its code
        return Finding(CLASSES[0], f"a changed copy fails, so nothing is proven: {line_of(error)}")
    finally:
        gc.collect()  # a copy and its versions refer to each other, and fill the GPU's memory


class _Bench:
    """A copy of a module, and runs of it from the same state."""

    def __init__(self, root: Any, step: Callable[[], None] | None = None) -> None:
        self.torch, self.step = sys.modules["torch"], step
        self.module = copy.deepcopy(root)
        tensors = [*self.module.parameters(), *self.module.buffers()]
        self.state = [(tensor, tensor.detach().clone()) for tensor in tensors]
        self.shift = 0.0

    def check(self, calls: Sequence[Call], make: Make, warm: int, drops: bool) -> Finding:
        dropouts = [] if drops else self._dropouts()
        draws = any(self.run(self.module._call_impl, call).drew for call in calls)
        for dropout, _ in dropouts:
            dropout.p = 0.0
        found = self._compared(calls, make, warm)
        for dropout, share in dropouts:
            dropout.p = share
        if draws and not found.refusal:
            reason = self._random(calls[0], make(self.module, False))
            return Finding(CLASSES[2], reason, "the same numbers drawn: within rounding")
        return found

    def _dropouts(self) -> list[tuple[Any, float]]:
        kind = self.torch.nn.modules.dropout._DropoutNd
        return [(m, m.p) for m in self.module.modules() if isinstance(m, kind)]

    def _compared(self, calls: Sequence[Call], make: Make, warm: int) -> Finding:
        """Results of the version beside those of the original."""
        originals = [self.run(self.module._call_impl, call) for call in calls]
        if not all(original.outputs for original in originals):
            return Finding(CLASSES[0], "its outputs are objects in which no tensors are found")
        drew = any(original.drew for original in originals)
        del originals
        version = make(self.module, drew)
        for call in [*calls] * warm:
            self.run(version, call)
        worst, largest = CLASSES[0], 0.0
        kept: list[tuple[Any, Any]] = []
        for call, shift in [(c, 0.0) for c in calls] + [(_flipped(c), SHIFT) for c in calls]:
            self.shift = shift
            # The changed version first: free memory then holds no results that it could reuse.
            changed = self.run(version, call)
            original = self.run(self.module._call_impl, call)
            if reason := _different_form(original, changed):
                return Finding(CLASSES[0], reason)
            if changed.drew and not original.drew:
                return Finding(CLASSES[0], "it draws random numbers and the original does not")
            eps = self._rounding(call)
            own = self.module._call_impl
            moved = [self.run(own, call, moved=eps, number=n + 1) for n in range(MOVED)]
            excess, distance = compare(original, changed, moved, eps)
            if excess:
                return Finding(CLASSES[3], excess)
            largest = max(largest, distance)
            worst = CLASSES[1] if distance else worst
            kept += zip(changed.outputs, _copies(changed.outputs), strict=True)
        if self.step is not None and (reason := self._added_up(calls, version)):
            return Finding(CLASSES[3], f"two calls in a step: {reason}")
        if not all(is_equal(o, w.to(o.device)) for o, w in kept):
            return Finding(CLASSES[0], "a later call overwrites the outputs of an earlier one")
        return Finding(worst, detail=f"at most {largest:.2f} of the allowed distance")

    def _added_up(self, calls: Sequence[Call], version: Any) -> str:
        """How the gradients of two calls in one step differ; empty if they do not."""
        pair = [calls[0], _flipped(calls[-1])]
        for _ in range(3):  # warm up, record, replay: the second call is another graph
            changed = self.run(version, *pair)
        original = self.run(self.module._call_impl, *pair)
        eps = self._rounding(pair[0])
        moved = [self.run(self.module._call_impl, *pair, moved=eps, number=n) for n in (1, 2, 3)]
        return _different_form(original, changed) or compare(original, changed, moved, eps)[0]

    def _random(self, call: Call, version: Any) -> str:
        """Why the random numbers of ``version`` are no such ones; empty if they are."""
        spreads = []
        for target in (self.module._call_impl, version):
            one, two = (self.run(target, call, seed=seed).outputs for seed in (11, 12))
            pairs = list(zip(one, two, strict=True))
            spreads.append(
                sum(norm(finite(a.detach() - b.detach())) for a, b in pairs if is_float(a))
            )
        original, changed = spreads
        if 0.5 * original <= changed <= 2 * original:
            return ""
        return f"two seeds differ by {changed:.2e}, those of the original by {original:.2e}"

    def run(
        self, target: Any, *calls: Call, moved: float = 0.0, number: int = 0, seed: int = 7
    ) -> Outcome:
        """Forward and backward passes from the copied state; ``moved``: by one rounding.

        The gradients of several calls add up; the outputs are those of the last one.
        """
        torch, module = self.torch, self.module
        if self.step is not None:
            self.step()
        shifting, moving = Generators(5), Generators(1000 + number)
        given_buffers: dict[int, tuple[Any, Any]] = {}
        with torch.no_grad():
            for tensor, value in self.state:
                shifted = shifting.moved(value, self.shift)
                tensor.copy_(started := moving.moved(shifted, moved))
                tensor.grad = None
                if moved and not isinstance(tensor, torch.nn.Parameter):
                    given_buffers[id(tensor)] = started, shifted
        given = [clone((call.args, call.kwargs)) for call in calls]
        inputs = _tensors(given)
        if moved:
            for tensor in inputs:
                if is_float(tensor):
                    tensor.data = moving.moved(tensor.data, moved)
        with ExitStack() as stack:
            devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
            stack.enter_context(torch.random.fork_rng(devices))
            torch.manual_seed(seed)
            before = _random_state(torch)
            for call, (args, kwargs) in zip(calls, given, strict=True):
                result = self._forward(target, call, args, kwargs)
                drew = _random_state(torch) != before
                self._backward(outputs := _tensors(result))
        leaves = [*module.parameters(), *(t for t in inputs if t.requires_grad)]
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        buffers = []
        for buffer in module.buffers():  # one that the pass does not write is no moved result
            started, shifted = given_buffers.get(id(buffer), (None, None))
            is_left = started is not None and torch.equal(buffer, started)
            buffers.append(shifted if is_left else buffer)
        form = (
            _opened(result, _tensor_form),
            tuple(x.grad is not None for x in leaves),
        )
        return Outcome(form, _copies([*outputs, *gradients, *buffers]), outputs, drew)

    def _forward(self, target: Any, call: Call, args: Any, kwargs: Any) -> Any:
        """The result of a call in its modes of gradients and autocast."""
        torch = self.torch
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(call.grad))
            if call.autocast is not None:
                stack.enter_context(torch.autocast(call.autocast[0], dtype=call.autocast[1]))
            return target(*args, **kwargs)

    def _backward(self, outputs: Sequence[Any]) -> None:
        """Gradients of a fixed random sum of all outputs."""
        torch = self.torch
        generators = Generators(3)
        parts = [
            (
                o.float() * torch.randn(o.shape, generator=generators[o.device], device=o.device)
            ).sum()
            for o in outputs
            if o.requires_grad and is_float(o)
        ]
        if parts:
            sum(parts[1:], parts[0]).backward()

    def _rounding(self, call: Call) -> float:
        """One rounding of the type that the module computes in."""
        torch = self.torch
        dtypes = {p.dtype for p in self.module.parameters() if is_float(p)}
        dtypes |= {call.autocast[1]} if call.autocast else set()
        eps = max(float(torch.finfo(dtype).eps) for dtype in dtypes or {torch.float32})
        tensors = [*self.module.parameters(), *_tensors((call.args, call.kwargs))]
        if any(tensor.is_cuda for tensor in tensors) and _uses_tf32(torch, self.module):
            eps = max(eps, TF32)
        return eps


class Generators(defaultdict[Any, Any]):
    """One generator of random numbers a device, all with one seed: the host's are slow to move."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def __missing__(self, device: Any) -> Any:
        self[device] = sys.modules["torch"].Generator(device).manual_seed(self.seed)
        return self[device]

    def moved(self, value: Any, eps: float) -> Any:
        """``value`` with each element multiplied by 1 - eps, 1 or 1 + eps."""
        if not eps or not is_float(value):
            return value
        torch = sys.modules["torch"]
        steps = torch.randint(-1, 2, value.shape, generator=self[value.device], device=value.device)
        is_mask = value < -min(MASK, MASK_SHARE * torch.finfo(value.dtype).max)
        return torch.where(is_mask, value, value * (1 + eps * steps.to(value.dtype)))


def _uses_tf32(torch: Any, module: Any) -> bool:
    """Whether GPUs compute products or convolutions of ``module`` in float32 as TF32."""
    if torch.backends.cuda.matmul.fp32_precision == "tf32":
        return True
    convolutions = torch.nn.modules.conv._ConvNd
    if not any(isinstance(m, convolutions) for m in module.modules()):
        return False
    return bool(torch.backends.cudnn.conv.fp32_precision == "tf32")


def _copies(values: Sequence[Any]) -> list[Any]:
    """Copies of results: on their GPU where there is room, else in host memory."""
    torch = sys.modules["torch"]
    size = sum(v.numel() * v.element_size() for v in values if v.is_cuda)
    if size:
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        if torch.cuda.mem_get_info()[0] + cached < ROOM * size:
            return [v.detach().to("cpu", copy=True) for v in values]
    return [v.detach().clone() for v in values]


def _flipped(call: Call) -> Call:
    """The call with other floats: a cached result is then wrong.  Whole numbers may be offsets."""

    def flip(tensor: Any) -> Any:
        return tensor.detach().flip(0) if tensor.dim() and is_float(tensor) else tensor

    args, kwargs = map_tensors((call.args, call.kwargs), flip)
    return call._replace(args=args, kwargs=kwargs)


def raise_version_limit() -> None:
    """Let Dynamo compile one code for the modules, copies and back ends of all attempts.

    It else runs a code in eager mode from its ninth version on.
    """
    config = _dynamo_config()
    if not _limits:
        _limits.append(config.recompile_limit)
        config.recompile_limit = max(config.recompile_limit, VERSIONS)


def restore_version_limit() -> None:
    """Take :func:`raise_version_limit` back."""
    while _limits:
        _dynamo_config().recompile_limit = _limits.pop()


def _dynamo_config() -> Any:
    return importlib.import_module("torch._dynamo.config")


def check_optimizer(optimizer: Any, change: Callable[[Any], None]) -> Finding:
    """Step copies of ``optimizer`` with and without ``change``, and compare the parameters.

    Each parameter is stepped by itself in the optimisers that can be changed, so that they are
    compared in chunks, which bounds the memory that the copies need.
    """
    torch = sys.modules["torch"]
    worst, largest = CLASSES[0], 0.0
    try:
        chunks = list(_chunks(optimizer))
        if not chunks:
            return Finding(CLASSES[0], "its gradients are gone after the step, so it is unproven")
        for chunk in chunks:
            eps = max(float(torch.finfo(p.dtype).eps) for p in chunk if is_float(p))
            original, changed = _stepped(optimizer, chunk), _stepped(optimizer, chunk, change)
            moved = [_stepped(optimizer, chunk, None, eps, n + 1) for n in range(MOVED)]
            excess, distance = compare(original, changed, moved, eps)
            if excess:
                return Finding(CLASSES[3], excess)
            largest, worst = max(largest, distance), CLASSES[1] if distance else worst
    except Exception as error:  # any error: the change stays off
        return Finding(CLASSES[0], f"the changed optimiser fails: {line_of(error)}")
    return Finding(worst, detail=f"at most {largest:.2f} of the allowed distance")


def _chunks(optimizer: Any) -> Iterator[list[Any]]:
    """The parameters with a gradient, in lists of :data:`CHUNK` elements or one parameter."""
    chunk: list[Any] = []
    for parameter in (p for g in optimizer.param_groups for p in g["params"] if p.grad is not None):
        if chunk and sum(p.numel() for p in chunk) + parameter.numel() > CHUNK:
            yield chunk
            chunk = []
        chunk.append(parameter)
    if chunk:
        yield chunk


def _stepped(
    optimizer: Any,
    chunk: Sequence[Any],
    change: Callable[[Any], None] | None = None,
    moved: float = 0.0,
    number: int = 0,
) -> Outcome:
    """The parameters of ``chunk`` and their state after a step of a copy of ``optimizer``."""
    torch = sys.modules["torch"]
    generators = Generators(number)
    chosen = {id(p) for p in chunk}
    groups = [
        {**group, "params": [p for p in group["params"] if id(p) in chosen]}
        for group in optimizer.param_groups
    ]
    state = {p: values for p, values in optimizer.state.items() if id(p) in chosen}
    memo: dict[int, Any] = {}
    twin: Any = object.__new__(type(optimizer))
    twin.__setstate__(copy.deepcopy({
        "defaults": optimizer.defaults, "state": defaultdict(dict, state),
        "param_groups": [group for group in groups if group["params"]],
    }, memo))  # fmt: skip
    copies = [memo[id(parameter)] for parameter in chunk]
    for parameter, twins in zip(chunk, copies, strict=True):
        factor = generators.moved(torch.ones_like(parameter), moved)
        twins.grad = parameter.grad.detach() * factor
        twins.data = twins.data * factor
    if change is not None:
        change(twin)
    twin.step()
    left = [v for values in twin.state.values() for v in values.values() if torch.is_tensor(v)]
    return Outcome((), [p.detach() for p in copies] + left, [], False)


def _different_form(original: Outcome, changed: Outcome) -> str:
    """How the form of the outputs or gradients differs; empty if it does not."""
    if original.form[0] != changed.form[0]:
        one, other = str(changed.form[0]), str(original.form[0])
        pairs = enumerate(zip(one, other, strict=False))
        at = next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
        at = max(0, at - 50) if at > 80 else 0  # the part that differs
        more = "..." if at else ""
        return f"outputs are {more}{one[at : at + 90]}, of the original {more}{other[at : at + 90]}"
    if original.form[1] != changed.form[1]:
        lacking = sum(a and not b for a, b in zip(original.form[1], changed.form[1], strict=True))
        return f"{lacking} gradients are missing, or there are others than the original's"
    return ""


def map_tensors(
    value: Any, function: Callable[[Any], Any], leaf: Callable[[Any], Any] = lambda value: value
) -> Any:
    """Nested values with each tensor and each other object replaced."""
    torch = sys.modules["torch"]
    if isinstance(value, torch.Tensor):
        return function(value)
    kind = type(value)
    if kind in (list, tuple):
        return kind(map_tensors(item, function, leaf) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*(map_tensors(item, function, leaf) for item in value))
    if hasattr(value, "keys") and hasattr(value, "__getitem__"):
        items = {key: map_tensors(value[key], function, leaf) for key in value}
        return items if kind is dict else _like(value, items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = copy.copy(value)
        for field in dataclasses.fields(value):
            mapped = map_tensors(getattr(value, field.name), function, leaf)
            object.__setattr__(changed, field.name, mapped)
        return changed
    return leaf(value)


def _tensor_form(tensor: Any) -> tuple[Any, ...]:
    """What a program sees of an output but its values; views need to know the layout."""
    where = tensor.device, tensor.is_contiguous()
    return type(tensor), tuple(tensor.shape), tensor.dtype, where, tensor.requires_grad


def _leaf_form(value: Any) -> Any:
    """Plain values are compared, of others the type."""
    return value if value is None or type(value) in (bool, int, float, str) else type(value)


def _opened(value: Any, function: Callable[[Any], Any], seen: frozenset[int] = frozenset()) -> Any:
    """As :func:`map_tensors`, with the attributes of objects in the place of the objects."""

    def leaf(found: Any) -> Any:
        state = _state(found)
        if state is None or id(found) in seen:
            return _leaf_form(found)
        return type(found), _opened(state, function, seen | {id(found)})

    return map_tensors(value, function, leaf)


def _state(value: Any) -> dict[str, Any] | None:
    """The attributes of an object that may hold tensors; None for modules, functions and types."""
    if callable(value):
        return None
    return getattr(value, "__dict__", None)


def _like(value: Any, items: dict[Any, Any]) -> Any:
    """A mapping of the same type, such as the outputs of transformers; a dict if that fails.

    Of subclasses of dict, attributes and what makes missing items stay, too.
    """
    try:
        if not isinstance(value, dict):
            return type(value)(**items)
        copied = copy.copy(value)
        for key, item in items.items():
            copied[key] = item
        return copied
    except Exception:  # any error of a user's class
        return items


def _tensors(value: Any) -> list[Any]:
    found: list[Any] = []

    def note(tensor: Any) -> Any:
        found.append(tensor)
        return tensor

    _opened(value, note)
    return found


def _random_state(torch: Any) -> bytes:
    state = torch.get_rng_state().numpy().tobytes()
    if torch.cuda.is_initialized():
        state += torch.cuda.get_rng_state().numpy().tobytes()
    return bytes(state)


def line_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
