"""What a change does to results: it is tried on copies, beside the original.

The original is also run with parameters and inputs moved by one rounding.  A change is *within
rounding* if no result is further from the original's than twice the furthest of these, plus some
roundings of the result itself: sums in another order.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

SHIFT = 0.02
"""Relative change of the parameters before the second runs, so that a cached result is wrong."""
MOVED = 3
"""Originals that are moved by one rounding."""
SMALL, SUMMED = 1e-5, 128
"""Roundings of a sum in float32: eager mode sums batch statistics in float64 on CPUs, Inductor does
not.  The bound is 1.5e-5, a thirtieth of TF32's rounding; narrower types are summed in float32."""
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


class Outcome(NamedTuple):
    """Results of one run of a module's forward and backward pass."""

    form: Any
    """Types, shapes and devices of the outputs, and which gradients there are."""
    values: list[Any]
    """Outputs, gradients and buffers."""
    outputs: list[Any]
    """The outputs themselves."""
    drew: bool
    """Whether the run drew random numbers."""


def clone(value: Any) -> Any:
    """Arguments with their own tensors, also in objects that hold some, such as caches of keys."""

    def copied(tensor: Any) -> Any:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    return _map(
        value, copied, lambda found: found if _state(found) is None else copy.deepcopy(found)
    )


def current_autocast() -> tuple[str, Any] | None:
    """Device and dtype of the autocast that is on; None if none is."""
    torch = sys.modules["torch"]
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return device, torch.get_autocast_dtype(device)
    return None


def check_module(root: Any, calls: Sequence[Call], make: Make) -> Finding:
    """Try the version that ``make`` gives on a copy of ``root`` and calls of the program."""
    usable = [call for call in calls if call.training == root.training]
    if not usable:
        return Finding(CLASSES[0], "no call of it was seen that a copy could repeat")
    if any(type(m).__name__ == "SyncBatchNorm" for m in root.modules()):
        return Finding(CLASSES[0], "SyncBatchNorm talks to other ranks, so no copy can be tried")
    try:
        return _Bench(root).check(usable, make)
    except Exception as error:  # any error of a user's __deepcopy__, the compiler or its code
        return Finding(CLASSES[0], f"a changed copy fails, so nothing is proven: {_line(error)}")


class _Bench:
    """A copy of a module, and runs of it from the same state."""

    def __init__(self, root: Any) -> None:
        self.torch = sys.modules["torch"]
        self.module = copy.deepcopy(root)
        tensors = [*self.module.parameters(), *self.module.buffers()]
        self.state = [(tensor, tensor.detach().clone()) for tensor in tensors]
        self.shift = 0.0

    def check(self, calls: Sequence[Call], make: Make) -> Finding:
        drew = any(self.run(self.module._call_impl, call).drew for call in calls)
        version = make(self.module, drew)
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
            moved = [self.run(self.module._call_impl, call, eps, n + 1) for n in range(MOVED)]
            excess, distance = _compare(original, changed, moved, eps)
            if excess:
                return Finding(CLASSES[3], excess)
            largest = max(largest, distance)
            worst = CLASSES[1] if distance else worst
            kept += [(o, o.detach().clone()) for o in changed.outputs]
        if any(not self.torch.equal(o, was) for o, was in kept if not o.isnan().any()):
            return Finding(CLASSES[0], "a later call overwrites the outputs of an earlier one")
        if drew:
            reason = self._random(calls[0], make(self.module, False))
            return Finding(CLASSES[2], reason, "the same numbers drawn: within rounding")
        return Finding(worst, detail=f"at most {largest:.2f} of the allowed distance")

    def _random(self, call: Call, version: Any) -> str:
        """Why the random numbers of ``version`` are no such ones; empty if they are."""
        spreads = []
        for target in (self.module._call_impl, version):
            one, two = (self.run(target, call, seed=seed).outputs for seed in (11, 12))
            pairs = list(zip(one, two, strict=True))
            spreads.append(sum(_norm(a.detach() - b.detach()) for a, b in pairs if _is_float(a)))
        original, changed = spreads
        if 0.5 * original <= changed <= 2 * original:
            return ""
        return f"two seeds differ by {changed:.2e}, those of the original by {original:.2e}"

    def run(
        self, target: Any, call: Call, moved: float = 0.0, number: int = 0, seed: int = 7
    ) -> Outcome:
        """Forward and backward pass from the copied state; ``moved``: by one rounding."""
        torch, module = self.torch, self.module
        generator = torch.Generator().manual_seed(1000 + number)
        with torch.no_grad():
            for tensor, value in self.state:
                other = self._move(value, self.shift, torch.Generator().manual_seed(5))
                tensor.copy_(self._move(other, moved, generator))
                tensor.grad = None
        args, kwargs = clone((call.args, call.kwargs))
        if moved:
            for tensor in _tensors((args, kwargs)):
                if _is_float(tensor):
                    tensor.data = self._move(tensor.data, moved, generator)
        with ExitStack() as stack:
            devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
            stack.enter_context(torch.random.fork_rng(devices))
            torch.manual_seed(seed)
            before = _random_state(torch)
            stack.enter_context(torch.set_grad_enabled(call.grad))
            if call.autocast is not None:
                stack.enter_context(torch.autocast(call.autocast[0], dtype=call.autocast[1]))
            result = target(*args, **kwargs)
            outputs = _tensors(result)
            drew = _random_state(torch) != before
            self._backward(outputs)
        inputs = [t for t in _tensors((args, kwargs)) if t.requires_grad]
        leaves = [*module.parameters(), *inputs]
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        form = (
            _opened(
                result, lambda t: (type(t), tuple(t.shape), t.dtype, t.device, t.requires_grad)
            ),
            tuple(leaf.grad is not None for leaf in leaves),
        )
        values = [*outputs, *gradients, *module.buffers()]
        return Outcome(form, [v.detach().to("cpu", copy=True) for v in values], outputs, drew)

    def _backward(self, outputs: Sequence[Any]) -> None:
        """Gradients of a fixed random sum of all outputs."""
        torch = self.torch
        generator = torch.Generator().manual_seed(3)
        parts = [
            (o.float() * torch.randn(o.shape, generator=generator).to(o.device)).sum()
            for o in outputs
            if o.requires_grad and _is_float(o)
        ]
        if parts:
            sum(parts[1:], parts[0]).backward()

    def _move(self, value: Any, eps: float, generator: Any) -> Any:
        if not eps or not _is_float(value):
            return value
        steps = self.torch.randint(-1, 2, value.shape, generator=generator).to(value)
        return value * (1 + eps * steps)

    def _rounding(self, call: Call) -> float:
        """One rounding of the type that the module computes in."""
        dtypes = {p.dtype for p in self.module.parameters() if _is_float(p)}
        dtypes |= {call.autocast[1]} if call.autocast else set()
        return max(float(self.torch.finfo(d).eps) for d in dtypes or {self.torch.float32})


def _flipped(call: Call) -> Call:
    """The call with other floats: a cached result is then wrong.  Whole numbers may be offsets."""

    def flip(tensor: Any) -> Any:
        return tensor.detach().flip(0) if tensor.dim() and _is_float(tensor) else tensor

    args, kwargs = _map((call.args, call.kwargs), flip)
    return call._replace(args=args, kwargs=kwargs)


def check_optimizer(optimizer: Any, change: Callable[[Any], None]) -> Finding:
    """Step copies of ``optimizer`` with and without ``change``, and compare the parameters."""
    torch = sys.modules["torch"]

    def step(is_changed: bool, moved: float = 0.0, number: int = 0) -> Outcome:
        generator = torch.Generator().manual_seed(number)
        twin = copy.deepcopy(optimizer)
        parameters = []
        pairs = zip(optimizer.param_groups, twin.param_groups, strict=True)
        for group, twins in pairs:
            for parameter, other in zip(group["params"], twins["params"], strict=True):
                if parameter.grad is not None:
                    steps = torch.randint(-1, 2, parameter.shape, generator=generator)
                    factor = 1 + moved * steps.to(parameter)
                    other.grad = parameter.grad.detach().clone() * factor
                    other.data = other.data * factor
                parameters.append(other)
        if is_changed:
            change(twin)
        twin.step()
        state = [v for s in twin.state.values() for v in s.values() if torch.is_tensor(v)]
        return Outcome((), [p.detach() for p in parameters] + state, [], False)

    try:
        if not any(p.grad is not None for g in optimizer.param_groups for p in g["params"]):
            return Finding(CLASSES[0], "its gradients are gone after the step, so it is unproven")
        original, changed = step(False), step(True)
        eps = max(float(torch.finfo(p.dtype).eps) for p in original.values if _is_float(p))
        moved = [step(False, eps, n + 1) for n in range(MOVED)]
        excess, distance = _compare(original, changed, moved, eps)
    except Exception as error:  # any error: the change stays off
        return Finding(CLASSES[0], f"the changed optimiser fails: {_line(error)}")
    if excess:
        return Finding(CLASSES[3], excess)
    detail = f"at most {distance:.2f} of the allowed distance"
    return Finding(CLASSES[1] if distance else CLASSES[0], detail=detail)


def _different_form(original: Outcome, changed: Outcome) -> str:
    """How the form of the outputs or gradients differs; empty if it does not."""
    if original.form[0] != changed.form[0]:
        return (
            f"outputs are {str(changed.form[0])[:90]}, of the original {str(original.form[0])[:90]}"
        )
    if original.form[1] != changed.form[1]:
        lacking = sum(a and not b for a, b in zip(original.form[1], changed.form[1], strict=True))
        return f"{lacking} gradients are missing, or there are others than the original's"
    return ""


def _compare(
    original: Outcome, changed: Outcome, moved: Sequence[Outcome], eps: float
) -> tuple[str, float]:
    """How a result is out of the band (empty if none is); the largest share of what is allowed."""
    floor = SUMMED * eps if eps < SMALL else 4 * eps
    pooled = sum(_norm(v) for v in original.values if _is_float(v))
    largest = 0.0
    for at, (a, b) in enumerate(zip(original.values, changed.values, strict=True)):
        b = b.to(a.device)
        if not _is_float(a):
            if not bool((a == b).all()):
                return f"result {at}, whole numbers of shape {tuple(a.shape)}, differs", 0.0
            continue
        if a.isnan().any() or b.isnan().any():
            if not bool((a.isnan() == b.isnan()).all()):
                return f"result {at} of shape {tuple(a.shape)} has other NaN", 0.0
            a, b = a.nan_to_num(), b.nan_to_num()
        distance, size = _norm(a - b), _norm(a)
        band = max(_norm(a - m.values[at].to(a).nan_to_num()) for m in moved)
        allowed = 2 * band + floor * size + eps * pooled / len(original.values)
        if distance > allowed:
            return (
                f"result {at} of shape {tuple(a.shape)} is off by {distance / (size or 1):.1e} of "
                f"its norm; one rounding of parameters moves it by {band / (size or 1):.1e}"
            ), 0.0
        largest = max(largest, distance / (allowed or 1.0))
    return "", largest


def _map(
    value: Any, function: Callable[[Any], Any], other: Callable[[Any], Any] = lambda found: found
) -> Any:
    """Nested values with each tensor replaced, and ``other`` for what is no list or mapping."""
    torch = sys.modules["torch"]
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) in (list, tuple):
        return type(value)(_map(item, function, other) for item in value)
    if callable(getattr(value, "keys", None)) and hasattr(value, "__getitem__"):
        items = {key: _map(value[key], function, other) for key in value}
        return items if type(value) is dict else _like(value, items)
    return other(value)


def _opened(value: Any, function: Callable[[Any], Any]) -> Any:
    """As :func:`_map`, with the attributes of objects in the place of the objects."""

    def other(found: Any) -> Any:
        state = _state(found)
        return found if state is None else (type(found), _opened(state, function))

    return _map(value, function, other)


def _state(value: Any) -> dict[str, Any] | None:
    """The attributes of an object that may hold tensors; None for modules, functions and types."""
    if callable(value):
        return None
    return getattr(value, "__dict__", None)


def _like(value: Any, items: dict[Any, Any]) -> Any:
    """A mapping of the same type, such as the outputs of transformers; a dict if that fails."""
    try:
        return type(value)(**items)
    except Exception:  # any error of a user's class
        return items


def _tensors(value: Any) -> list[Any]:
    found: list[Any] = []

    def note(tensor: Any) -> Any:
        found.append(tensor)
        return tensor

    _opened(value, note)
    return found


def _is_float(tensor: Any) -> bool:
    return bool(tensor.is_floating_point())


def _norm(tensor: Any) -> float:
    return float(tensor.detach().double().norm())


def _random_state(torch: Any) -> bytes:
    state = torch.get_rng_state().numpy().tobytes()
    if torch.cuda.is_initialized():
        state += torch.cuda.get_rng_state().numpy().tobytes()
    return bytes(state)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
