"""Which graph is this?  A name that other processes give the same graph, and why some get none."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.node import Node, map_aggregate
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from nostall.attach.torch_compile.options import Settings
from nostall.attach.torch_compile.store.kernel_store import code_version


def unfit(module: GraphModule, inputs: Sequence[Any]) -> str | None:
    """Why a graph stays with Inductor as a whole, or None."""
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    if any(isinstance(value, (torch.SymFloat, torch.SymBool)) for value in inputs):
        return "a number known at run time only"
    names = symbols(inputs)
    if any(name.startswith("u") for name in names):
        return "data-dependent shape"
    if len(names) > 1:
        return "several dynamic dimensions"
    if any(is_traceable_wrapper_subclass(x) for x in tensors):
        return "a tensor subclass"
    targets = [str(node.target) for graph in _graphs(module) for node in graph.graph.nodes]
    if any("c10d" in target or "all_reduce" in target for target in targets):
        return "collective operations inside the graph"
    devices = {x.device for x in tensors}
    if len(devices) > 1:
        return "tensors on several devices"
    if not devices:
        return "no tensor to begin with"
    if next(iter(devices)).type != "cuda" and not triton.knobs.runtime.interpret:
        return "not on a GPU"
    return None


def graph_key(
    module: GraphModule,
    inputs: Sequence[Any],
    settings: Settings,
    patches: Mapping[str, Any],
) -> str:
    """sha256 of everything that a choice between two versions of this graph depends on."""
    here = device_of(inputs)
    lines = [
        code_version(),
        torch.__version__,
        triton.__version__,
        device_name(here),
        f"{settings.extent} {settings.rest} {settings.race} {settings.keep}",
        f"{torch.is_grad_enabled()}",
        *(f"{name}={_said(value)}" for name, value in sorted(patches.items())),
        *(_input(value) for value in inputs),
        *_text(module, here),
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def device_of(inputs: Sequence[Any]) -> torch.device:
    """Where the inputs are; that is the processor where no tensor is among them."""
    return next((x.device for x in inputs if isinstance(x, Tensor)), torch.device("cpu"))


def device_name(device: torch.device) -> str:
    """The GPU that this is, or that there is none."""
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else "no GPU"


def symbols(inputs: Sequence[Any]) -> set[str]:
    """PyTorch's names of the sizes that are known at run time only."""
    sizes = [value for value in inputs if isinstance(value, torch.SymInt)]
    for value in inputs:
        if isinstance(value, Tensor):
            every = (*value.shape, *value.stride())
            sizes += [size for size in every if isinstance(size, torch.SymInt)]
    return {str(symbol) for size in sizes for symbol in size.node.expr.free_symbols}


def _input(value: Any) -> str:
    told = _told(value)
    for symbol in symbols([value]):
        # PyTorch's name changes with where a size comes from.
        told = re.sub(rf"\b{symbol}\b", "n", told)
    return told


def _told(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    kind = f"{tuple(value.shape)} {value.stride()} {value.dtype} {value.requires_grad}"
    return f"{kind} {isinstance(value, torch.nn.Parameter)}"


def _said(value: Any) -> str:
    return getattr(value, "__qualname__", None) or (
        repr(value)
        if isinstance(value, (str, int, float, bool, list, tuple))
        else type(value).__name__
    )


def _graphs(module: GraphModule) -> Iterator[GraphModule]:
    for one in module.modules():
        if isinstance(one, GraphModule):
            yield one


def _text(module: GraphModule, here: torch.device | None) -> Iterator[str]:
    """The graphs with their nodes numbered: names are Dynamo's own and may change.  The device of
    the inputs, ``here``, goes without its number: each rank of a job has another one."""
    for graph in _graphs(module):
        number = {node: at for at, node in enumerate(graph.graph.nodes)}

        def told(value: Any, number: Mapping[Node, int] = number) -> Any:
            if isinstance(value, Node):
                return f"%{number[value]}"
            is_here = isinstance(value, torch.device) and value == here
            return "here" if is_here else _plain(value)

        for node in graph.graph.nodes:
            target = node.target if isinstance(node.target, str) else _function(node.target)
            what = "" if node.op == "placeholder" else target
            given = map_aggregate((node.args, node.kwargs), told)
            yield f"{node.op} {what} {given}"


def _function(target: Any) -> str:
    module, found = getattr(target, "__module__", ""), getattr(target, "__qualname__", None)
    return f"{module}.{found}" if found else str(target)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, int, float, bool, slice)):
        return value
    text = str(value)
    return type(value).__name__ if " at 0x" in text else text
