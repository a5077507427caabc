"""Loading and tracing of the target of ``nostall fuse``: a function or module in a Python file.

Models and inputs are built and traced with fake tensors: nothing is computed, and a model may be
larger than memory. Needs PyTorch. A target ``path.py:name`` is one of

- a function of tensors,
- a module, or a class of modules,
- a function without parameters that returns a module, or a pair (module, inputs).
"""

from __future__ import annotations

import inspect
import shlex
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
from nostall.core.text.suggest import did_you_mean, listed
from nostall.fusion.capture import CapturedGraph, capture, inference_graph, training_graphs
from nostall.fusion.errors import BadCapture
from nostall.tuning.fusing.inputs import NumberInput, parse_inputs, parse_target
from nostall.tuning.sources.kernel_file import import_file, root_cause

INPUTS = "inputs"
"""Name of the function in the user's file that returns the inputs by default."""


@dataclass(frozen=True)
class FusionRequest:
    """Target, inputs and options of ``nostall fuse``."""

    target: str
    """``path.py:name``"""
    inputs: str | None = None
    """A text for :func:`~nostall.tuning.fusing.inputs.parse_inputs`, or the name of a function of
    the file that returns the inputs: a tuple of arguments or a dict of named arguments."""
    dtype: str | None = None
    """PyTorch's name of the dtype to convert floating-point inputs and parameters to, if any."""
    backward: bool = False
    """Whether to trace the backward pass, too. Gradients are those of the parameters and of the
    inputs that require gradients in the file, or of all floating-point inputs if none does."""


@dataclass(frozen=True, eq=False)
class TracedTarget:
    """A target after tracing and capture."""

    name: str
    inputs: tuple[str, ...]
    """The inputs as text, such as ``float16[4096, 5000]``."""
    device: str
    passes: Mapping[str, CapturedGraph]
    """The captured graph of ``inference``, or of ``forward`` and ``backward``."""


def trace_target(request: FusionRequest) -> TracedTarget:
    """Import the file, build the function or module that the request names, and trace it.

    Raises :class:`BadInput` if the file, the name or the inputs are invalid, or if PyTorch cannot
    trace the function.
    """
    path, name = parse_target(request.target)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    with (
        import_file(Path(path).absolute()) as file,
        _errors_name_target(request.target),
        _untouched_by_compile(),
    ):
        function, inputs = _load_function(file, path, name, mode)
        if request.inputs is not None or inputs is None:
            inputs = _load_inputs(file, path, request.inputs, mode)
        args, kwargs = _to_arguments(inputs)
        _check_signature(function, args, kwargs, request.target)
        convert = _Converter(mode, device, request.dtype)
        as_it_is = _Converter(mode, device, None)
        if isinstance(function, nn.Module):
            _convert_module(function, convert)
            _register_tensors(function, as_it_is)
        leaves, structure = tree_flatten((args, kwargs))
        leaves = [convert(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if request.backward:
            _require_gradients(tensors)

        def traced(constants: Mapping[str, Tensor]) -> dict[str, CapturedGraph]:
            module = _module_of_tensors(name, function, leaves, structure, file, constants)
            if not request.backward:
                return {"inference": capture(inference_graph(module, *tensors))}
            forward, backward = training_graphs(module, *tensors)
            return {"forward": capture(forward), "backward": capture(backward)}

        own = _tensors_of(file)
        try:
            passes = traced({key: as_it_is(value) for key, value in own.items()})
        except BadCapture as error:
            if not own:
                raise
            vars(file).update(own)
            try:
                passes = traced({})  # a function that reads values of these tensors
            except BadCapture:
                raise error from None
    return TracedTarget(name, tuple(map(_input_text, leaves)), device.type, passes)


@contextmanager
def _untouched_by_compile() -> Iterator[None]:
    """Call functions that the file compiles by ``torch.compile`` as they are written."""
    nested = torch._dynamo.config.patch(error_on_nested_fx_trace=False)
    with torch.compiler.set_stance("force_eager"), nested:
        yield


@contextmanager
def _errors_name_target(target: str) -> Iterator[None]:
    """Put the target's name in front of nostall's errors that do not contain it."""
    try:
        yield
    except NostallError as error:
        text = str(error)
        raise type(error)(text if target in text else f"{target}: {text}") from error


def _load_function(file: ModuleType, path: str, name: str, mode: FakeTensorMode) -> tuple[Any, Any]:
    """The function or module that ``name`` refers to, and its inputs if it comes with some."""
    named = getattr(file, name, None)
    if not callable(named):
        candidates = [
            key
            for key, value in vars(file).items()
            if callable(value) and getattr(value, "__module__", "") == file.__name__
        ]
        raise BadInput(
            f"{path} has no function {name!r}; it has: {listed(candidates)}"
            f"{did_you_mean(name, candidates)}"
        )
    if type(named).__module__.partition(".")[0] == "triton":
        raise BadInput(
            f"{path}:{name} is a Triton kernel, and fuse takes a PyTorch function of tensors; "
            f"`{shlex.join(['nostall', 'tune', f'{path}:{name}'])}` searches a kernel of your own"
        )
    function = named
    if isinstance(named, type) or (not isinstance(named, nn.Module) and _has_no_parameters(named)):
        with mode:
            function = _call_user_code(named, f"{path}:{name}")
    inputs = None
    if isinstance(function, tuple) and len(function) == 2 and isinstance(function[0], nn.Module):
        function, inputs = function
    if function is not named and not isinstance(function, nn.Module):
        raise BadInput(
            f"{path}:{name} takes no parameters and returned a {type(function).__name__}; allowed "
            "is a function of tensors, or one that returns a module, or (module, inputs)"
        )
    return function, inputs


def _has_no_parameters(function: Callable[..., Any]) -> bool:
    try:
        return not inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _call_user_code(function: Callable[[], Any], label: str) -> Any:
    """Call a function of the user's file; raises :class:`BadInput` if it fails."""
    try:
        return function()
    except Exception as error:  # the user's code may raise anything
        raise BadInput(
            f"{label} failed: {type(error).__name__}: {root_cause(error)}; correct it (it runs "
            "with fake tensors, which have shapes and no values)"
        ) from error


def _load_inputs(file: ModuleType, path: str, text: str | None, mode: FakeTensorMode) -> Any:
    """The inputs from a function of the user's file, or from a text that describes them."""
    name = text or INPUTS
    function = getattr(file, name, None) if name.isidentifier() else None
    if callable(function):
        with mode:
            return _call_user_code(function, f"{path}:{name}")
    if text is None:
        raise BadInput(
            f"{path} defines no inputs; give --inputs 4096x5000:f16,5000:f16, or "
            f"write a function {INPUTS}() that returns them"
        )
    with mode:
        return tuple(
            item.value
            if isinstance(item, NumberInput)
            else torch.empty(item.shape, dtype=getattr(torch, item.dtype))
            for item in parse_inputs(text)
        )


def _to_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs as positional and named arguments."""
    if isinstance(inputs, Mapping):
        return (), {str(key): value for key, value in inputs.items()}
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


def _check_signature(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], label: str
) -> None:
    """Raise :class:`BadInput` if the number or the names of the inputs are wrong."""
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        named = (f"{key}: {_input_text(value)}" for key, value in kwargs.items())
        inputs = ", ".join([*map(_input_text, args), *named])
        raise BadInput(
            f"{label} takes {signature}, and the inputs are ({inputs}): {error}; give other inputs "
            "with --inputs"
        ) from error


class _Converter:
    """Converts tensors to fake tensors on a device, floating-point ones to the requested dtype."""

    def __init__(self, mode: FakeTensorMode, device: torch.device, dtype: str | None) -> None:
        self.mode, self.device = mode, device
        self.dtype = None if dtype is None else getattr(torch, dtype)

    def __call__(self, tensor: Tensor) -> Tensor:
        fake = tensor if isinstance(tensor, FakeTensor) else self.mode.from_tensor(tensor)
        dtype = self.dtype if fake.is_floating_point() and self.dtype else fake.dtype
        with self.mode:
            converted: Tensor = fake.detach().to(self.device, dtype)
            return converted.requires_grad_(tensor.requires_grad)


def _tensors_of(owner: Any) -> dict[str, Tensor]:
    """Tensors that are plain attributes; AOTAutograd traces only those that are inputs."""
    return {key: value for key, value in vars(owner).items() if isinstance(value, Tensor)}


def _register_tensors(module: nn.Module, convert: _Converter) -> None:
    """Make tensors that are plain attributes of a module, or of its parts, buffers."""
    for submodule in module.modules():
        for key, tensor in _tensors_of(submodule).items():
            delattr(submodule, key)
            submodule.register_buffer(key, convert(tensor))


def _convert_module(module: nn.Module, convert: _Converter) -> None:
    """Convert the parameters and buffers of a module in place; shared tensors stay shared.

    ``Module.to`` cannot do this, because it cannot swap real tensors for fake ones.
    """
    converted: dict[int, Tensor] = {}

    def convert_once(tensor: Tensor) -> Tensor:
        if id(tensor) not in converted:
            new = convert(tensor)
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new.detach(), requires_grad=tensor.requires_grad)
            converted[id(tensor)] = new
        return converted[id(tensor)]

    for submodule in module.modules():
        for tensors in (submodule._parameters, submodule._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = convert_once(tensor)


def _require_gradients(tensors: Sequence[Tensor]) -> None:
    """Make all floating-point and complex inputs require gradients, unless some already do."""
    if not any(tensor.requires_grad for tensor in tensors):
        for tensor in tensors:
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.requires_grad_()


def _module_of_tensors(
    name: str,
    function: Any,
    leaves: Sequence[Any],
    structure: Any,
    file: ModuleType,
    constants: Mapping[str, Tensor],
) -> nn.Module:
    """A module that takes only the tensors; it passes other arguments to the function as they are.

    Its class has the target's name, which PyTorch's error messages contain. ``constants``: tensors
    of the file by name; they are buffers of the module, and the function reads what it traces.
    """
    is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]

    def forward(self: Any, *tensors: Tensor) -> Any:
        remaining = iter(tensors)
        filled = [
            next(remaining) if replaced else leaf
            for replaced, leaf in zip(is_tensor, leaves, strict=True)
        ]
        args, kwargs = tree_unflatten(filled, structure)
        vars(file).update((key, getattr(self, f"file_{key}")) for key in constants)
        return self.function(*args, **kwargs)

    module: nn.Module = type(name, (nn.Module,), {"forward": forward})()
    module.function = function
    for key, tensor in constants.items():
        module.register_buffer(f"file_{key}", tensor)
    return module


def _input_text(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)[:40]
