"""Keys of graphs: a hash that every process computes alike, and which graphs are unsupported."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import HANDLED_TYPES
from torch.fx.node import Node, map_aggregate
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from nostall.attach.torch_compile.options import Options
from nostall.attach.torch_compile.store.kernel_store import code_version
from nostall.fusion.products.precision import allows_tf32


def unsupported_reason(module: GraphModule, inputs: Sequence[Any]) -> str | None:
    """Why the backend leaves the whole graph to Inductor, or None if it is supported."""
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    if any(isinstance(value, (torch.SymFloat, torch.SymBool)) for value in inputs):
        return "a number known at run time only"
    names = dynamic_symbols(inputs)
    if any(name.startswith("u") for name in names):
        return "data-dependent shape"
    if any(is_traceable_wrapper_subclass(x) or _data_type(x) not in HANDLED_TYPES for x in tensors):
        return "a tensor subclass"
    targets = [str(node.target) for graph in _subgraphs(module) for node in graph.graph.nodes]
    if any("c10d" in target or "all_reduce" in target for target in targets):
        return "collective operations inside the graph"
    devices = {x.device for x in tensors}
    if len(devices) > 1:
        return "tensors on several devices"
    if not devices:
        return "no input is a tensor"
    if next(iter(devices)).type != "cuda" and not triton.knobs.runtime.interpret:
        return "not on a GPU"
    return None


def _data_type(value: Tensor) -> type[Tensor]:
    """Class of a tensor, or of a parameter's data.

    PyTorch calls no operators of others than ``HANDLED_TYPES`` in the first call of a graph.
    """
    return type(value.data if isinstance(value, torch.nn.Parameter) else value)


def graph_key(
    module: GraphModule,
    inputs: Sequence[Any],
    options: Options,
    patches: Mapping[str, Any],
) -> str:
    """sha256 of everything that the choice between two versions of the graph depends on.

    ``patches``: Inductor's configuration as the user changed it.
    """
    device = input_device(inputs)
    lines = [
        code_version(),
        torch.__version__,
        triton.__version__,
        device_name(device),
        f"{options.fuse} {options.fallback} {options.tuned_plans} {options.keep}",
        f"{torch.is_grad_enabled()}",
        # These decide whether products of fp32 have kernels.
        f"{options.products} {_float32_precision()} {options.attention} {options.loss}",
        options.blocks,
        *(f"{name}={_patch_text(value)}" for name, value in sorted(patches.items())),
        *_input_lines(inputs),
        *_node_lines(module, device),
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _float32_precision() -> str:
    """PyTorch's precision of fp32 products.

    The flag of CUDA's products is read itself: PyTorch has no common precision if a program sets
    ``torch.backends.cuda.matmul.fp32_precision``.
    """
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:
        precision = "by backend"
    return f"{precision} {allows_tf32()}"


def input_device(inputs: Sequence[Any]) -> torch.device:
    """Device of the first tensor; the CPU if no input is a tensor."""
    return next((x.device for x in inputs if isinstance(x, Tensor)), torch.device("cpu"))


def device_name(device: torch.device) -> str:
    """Name of the GPU, or ``no GPU`` for any other device."""
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else "no GPU"


def dynamic_symbols(inputs: Sequence[Any]) -> set[str]:
    """Names of PyTorch's symbols for sizes and strides that are known at run time only."""
    sizes: list[Any] = []
    for value in inputs:
        sizes += (*value.shape, *value.stride()) if isinstance(value, Tensor) else (value,)
    symbolic = [size for size in sizes if isinstance(size, torch.SymInt)]
    return {str(symbol) for size in symbolic for symbol in size.node.expr.free_symbols}


def _input_lines(inputs: Sequence[Any]) -> Iterator[str]:
    """One line for each input.  Symbols are numbered by their first place in the text.

    PyTorch's name of a symbol depends on where the size comes from.
    """
    names = dynamic_symbols(inputs)
    numbers: dict[str, str] = {}

    def number(match: re.Match[str]) -> str:
        name = match.group()
        return numbers.setdefault(name, f"n{len(numbers)}") if name in names else name

    for value in inputs:
        yield re.sub(r"\b[a-z]\w*\b", number, _value_text(value))


def _value_text(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    text = f"{tuple(value.shape)} {value.stride()} {value.dtype} {value.requires_grad}"
    return f"{text} {isinstance(value, torch.nn.Parameter)}"


def _patch_text(value: Any) -> str:
    return getattr(value, "__qualname__", None) or (
        repr(value)
        if isinstance(value, (str, int, float, bool, list, tuple))
        else type(value).__name__
    )


def _subgraphs(module: GraphModule) -> Iterator[GraphModule]:
    for child in module.modules():
        if isinstance(child, GraphModule):
            yield child


def _node_lines(module: GraphModule, input_device: torch.device | None) -> Iterator[str]:
    """One line for each node.  Operands are numbers, because Dynamo's node names may change.

    The device of the inputs is written without its index, because each rank has another one.
    """
    for graph in _subgraphs(module):
        numbers = {node: number for number, node in enumerate(graph.graph.nodes)}

        def text(value: Any, numbers: Mapping[Node, int] = numbers) -> Any:
            if isinstance(value, Node):
                return f"%{numbers[value]}"
            is_input_device = isinstance(value, torch.device) and value == input_device
            return "here" if is_input_device else _stable_text(value)

        for node in graph.graph.nodes:
            target = node.target if isinstance(node.target, str) else _target_name(node.target)
            name = "" if node.op == "placeholder" else target
            arguments = map_aggregate((node.args, node.kwargs), text)
            yield f"{node.op} {name} {arguments}"


def _target_name(target: Any) -> str:
    module, name = getattr(target, "__module__", ""), getattr(target, "__qualname__", None)
    return f"{module}.{name}" if name else str(target)


def _stable_text(value: Any) -> Any:
    """The value, or a text that is equal in every process: without memory addresses."""
    if value is None or isinstance(value, (str, int, float, bool, slice)):
        return value
    text = str(value)
    return type(value).__name__ if " at 0x" in text else text
