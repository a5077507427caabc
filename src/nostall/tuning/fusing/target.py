"""What a user names: a function or a module in a Python file, and its inputs, traced.

Everything is built and traced with fake tensors: nothing is computed, and a model may be larger
than memory.  Needs PyTorch.  ``path.py:name`` is a function of tensors, a module, a class of
modules, or a function without parameters that returns a module, or the pair (module, inputs).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_flatten, tree_unflatten

from nostall.core.errors import BadInput, NostallError
from nostall.fusion.capture import Captured, capture, inference_graph, training_graphs
from nostall.tuning.fusing.inputs import NumberInput, named, parse_inputs
from nostall.tuning.kernel_file import imported, root_cause

INPUTS = "inputs"
"""The function of the user's file that gives the inputs where nothing else is said."""


@dataclass(frozen=True)
class Asked:
    """What is to be fused.

    ``inputs`` is a line for :func:`~nostall.tuning.fusing.inputs.parse_inputs` or the name of a
    function of the file that returns them (a tuple of arguments or a dict of named ones).
    ``dtype`` (PyTorch's name) is what floating inputs and parameters become; None: left as they
    are.  ``backward``: with gradients of parameters and of floating inputs, of all those unless
    the file says of some that they require them.
    """

    target: str
    inputs: str | None = None
    dtype: str | None = None
    backward: bool = False


@dataclass(frozen=True, eq=False)
class Traced:
    """``passes`` by name (inference, or forward and backward); ``inputs`` as people read them."""

    name: str
    inputs: tuple[str, ...]
    device: str
    passes: Mapping[str, Captured]


def traced(asked: Asked) -> Traced:
    """Read the file, build what it names and trace it.

    Raises :class:`BadInput` where the file, the name or the inputs are not what they have to be,
    and where PyTorch cannot trace the program.
    """
    path, name = named(asked.target)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    with imported(Path(path).absolute()) as file, _told(asked.target):
        function, given = _built(file, path, name, mode)
        if asked.inputs is not None or given is None:
            given = _inputs(file, path, asked.inputs, mode)
        args, kwargs = _arguments(given)
        _check_fit(function, args, kwargs, asked.target)
        change = _Change(mode, device, asked.dtype)
        if isinstance(function, nn.Module):
            _replace_tensors(function, change)
        leaves, structure = tree_flatten((args, kwargs))
        leaves = [change(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        call = _call(name, function, leaves, structure)
        if asked.backward:
            _require_gradients(tensors)
            forward, backward = training_graphs(call, *tensors)
            passes = {"forward": capture(forward), "backward": capture(backward)}
        else:
            passes = {"inference": capture(inference_graph(call, *tensors))}
    return Traced(name, tuple(map(_shown, leaves)), device.type, passes)


@contextmanager
def _told(target: str) -> Iterator[None]:
    """Errors of the user's program name it."""
    try:
        yield
    except NostallError as error:
        text = str(error)
        raise type(error)(text if target in text else f"{target}: {text}") from error


def _built(file: ModuleType, path: str, name: str, mode: FakeTensorMode) -> tuple[Any, Any]:
    """The function or module, and its inputs where it brings some."""
    found = getattr(file, name, None)
    if not callable(found):
        own = [
            key
            for key, value in vars(file).items()
            if callable(value) and getattr(value, "__module__", "") == file.__name__
        ]
        raise BadInput(f"{path} has no function {name!r}; it has: {', '.join(own) or '(none)'}")
    made = found
    if isinstance(found, type) or (not isinstance(found, nn.Module) and _takes_nothing(found)):
        with mode:
            made = _user(found, f"{path}:{name}")
    given = None
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        made, given = made
    if made is not found and not isinstance(made, nn.Module):
        raise BadInput(
            f"{path}:{name} takes nothing and returned a {type(made).__name__}; allowed is a "
            "function of tensors, or one that returns a module, or (module, inputs)"
        )
    return made, given


def _takes_nothing(function: Callable[..., Any]) -> bool:
    try:
        return not inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _user(function: Callable[[], Any], what: str) -> Any:
    """What a function of the user's returns; whatever it raises is bad input."""
    try:
        return function()
    except Exception as error:
        raise BadInput(
            f"{what} failed: {type(error).__name__}: {root_cause(error)}; correct it (it runs with "
            "fake tensors, which have shapes and no values)"
        ) from error


def _inputs(file: ModuleType, path: str, text: str | None, mode: FakeTensorMode) -> Any:
    """The inputs by a function of the file, or by a line that says what they are."""
    name = text or INPUTS
    function = getattr(file, name, None) if name.isidentifier() else None
    if callable(function):
        with mode:
            return _user(function, f"{path}:{name}")
    if text is None:
        raise BadInput(
            f"{path} does not say what the inputs are; give --inputs 4096x5000:f16,5000:f16, or "
            f"write a function {INPUTS}() that returns them"
        )
    with mode:
        return tuple(
            each.value
            if isinstance(each, NumberInput)
            else torch.empty(each.shape, dtype=getattr(torch, each.dtype))
            for each in parse_inputs(text)
        )


def _arguments(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(given, Mapping):
        return (), {str(key): value for key, value in given.items()}
    return (tuple(given) if isinstance(given, tuple | list) else (given,)), {}


def _check_fit(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], what: str) -> None:
    """Say before tracing that the number or the names of the inputs are wrong."""
    taken = function.forward if isinstance(function, nn.Module) else function
    try:
        signature = inspect.signature(taken)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        shown = ", ".join([*map(_shown, args), *(f"{k}: {_shown(v)}" for k, v in kwargs.items())])
        raise BadInput(
            f"{what} takes {signature}, and the inputs are ({shown}): {error}; say others with "
            "--inputs"
        ) from error


class _Change:
    """Makes tensors fake, puts floating ones into the dtype that was asked for, all on a device."""

    def __init__(self, mode: FakeTensorMode, device: torch.device, dtype: str | None) -> None:
        self.mode, self.device = mode, device
        self.dtype = None if dtype is None else getattr(torch, dtype)

    def __call__(self, tensor: Tensor) -> Tensor:
        fake = tensor if isinstance(tensor, FakeTensor) else self.mode.from_tensor(tensor)
        dtype = self.dtype if fake.is_floating_point() and self.dtype else fake.dtype
        with self.mode:
            changed: Tensor = fake.detach().to(self.device, dtype)
            return changed.requires_grad_(tensor.requires_grad)


def _replace_tensors(module: nn.Module, change: _Change) -> None:
    """Parameters and buffers, in place; what is shared stays shared.  ``Module.to`` cannot do it:
    fake and real tensors do not swap."""
    known: dict[int, Tensor] = {}

    def changed(tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            made = change(tensor)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made.detach(), requires_grad=tensor.requires_grad)
            known[id(tensor)] = made
        return known[id(tensor)]

    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = changed(tensor)


def _require_gradients(tensors: Sequence[Tensor]) -> None:
    if not any(tensor.requires_grad for tensor in tensors):
        for tensor in tensors:
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.requires_grad_()


def _call(name: str, function: Any, leaves: Sequence[Any], structure: Any) -> nn.Module:
    """A module of the tensors alone; other arguments are what they are."""
    holes = [isinstance(leaf, Tensor) for leaf in leaves]

    def forward(self: Any, *tensors: Tensor) -> Any:
        rest = iter(tensors)
        filled = [next(rest) if hole else leaf for hole, leaf in zip(holes, leaves, strict=True)]
        args, kwargs = tree_unflatten(filled, structure)
        return self.function(*args, **kwargs)

    # PyTorch's messages name the class.
    made: nn.Module = type(name, (nn.Module,), {"forward": forward})()
    made.function = function
    return made


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)[:40]
