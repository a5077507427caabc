"""Programs as FX graphs of ATen operators, taken apart far enough to be fused.

Tensors are fake while tracing: nothing is computed, and a model may be larger than memory.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from functorch.compile import aot_function, make_boxed_func, min_cut_rematerialization_partition
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.func import functional_call
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from nostall.core.errors import NostallError, one_line
from nostall.fusion.errors import BadCapture

_aten = torch.ops.aten
_TAKEN_APART = [
    _aten._log_softmax,
    _aten._log_softmax_backward_data,
    _aten._softmax,
    _aten._softmax_backward_data,
    _aten.clamp_max,
    _aten.clamp_min,
    _aten.elu,
    _aten.gelu,
    _aten.gelu_backward,
    _aten.hardsigmoid,
    _aten.hardswish,
    _aten.hardtanh,
    _aten.leaky_relu,
    _aten.mse_loss,
    _aten.mse_loss_backward,
    _aten.native_batch_norm,
    _aten.native_batch_norm_backward,
    _aten._native_batch_norm_legit,
    _aten._native_batch_norm_legit_functional,
    _aten._native_batch_norm_legit_no_training,
    _aten.native_dropout,
    _aten.native_dropout_backward,
    _aten.native_group_norm,
    _aten.native_group_norm_backward,
    _aten.native_layer_norm,
    _aten.native_layer_norm_backward,
    _aten.sigmoid_backward,
    _aten.silu,
    _aten.silu_backward,
    _aten.softplus,
    _aten.softplus_backward,
    _aten.tanh_backward,
    _aten.threshold_backward,
]
"""Core ATen keeps these whole; their parts are what fuses with their neighbours."""


def decompositions() -> dict[Any, Callable[..., Any]]:
    """PyTorch's own decompositions, without those that would break up what cuBLAS does better."""
    return dict(_table())


@functools.cache
def _table() -> dict[Any, Callable[..., Any]]:
    # PyTorch looks through all of its operators for it: 0.17 s.
    table = {**core_aten_decompositions(), **get_decompositions(_TAKEN_APART)}
    for name in ("addmm", "baddbmm", "_to_copy"):
        for overload in getattr(_aten, name).overloads():
            table.pop(getattr(getattr(_aten, name), overload), None)
    return table


def inference_graph(module: torch.nn.Module, *inputs: torch.Tensor) -> GraphModule:
    """The forward pass without gradients.

    Inputs and parameters may be fake tensors (made under ``FakeTensorMode``).  Raises
    :class:`BadCapture` with what PyTorch has to say where the module cannot be traced.
    """
    with torch.no_grad():
        (graph,) = _traced(module, inputs)
    return graph


def training_graphs(
    module: torch.nn.Module, *inputs: torch.Tensor
) -> tuple[GraphModule, GraphModule]:
    """The forward and the backward pass of a module, as AOTAutograd cuts them (what is cheap to
    recompute is computed again).  Parameters and floating inputs that require gradients get them.
    Raises :class:`BadCapture`."""
    graphs = _traced(module, inputs)
    if len(graphs) != 2:
        raise BadCapture(
            "the module has no backward pass; it returns no real tensor that depends on a "
            "parameter or an input that requires gradients; use inference_graph "
            "(`nostall fuse` without --backward)"
        )
    forward, backward = graphs
    return forward, backward


def _traced(module: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> list[GraphModule]:
    graphs: list[GraphModule] = []

    def keep(graph: GraphModule, _: Sequence[Any]) -> Any:
        _free_random_numbers(graph)
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    def call(state: dict[str, torch.Tensor], *given: torch.Tensor) -> Any:
        return functional_call(module, state, given)

    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    try:
        with warnings.catch_warnings(), _fake_mode((*state.values(), *inputs)) as faked:
            warnings.simplefilter("ignore")
            compiled = aot_function(
                call,
                fw_compiler=keep,
                bw_compiler=keep,
                partition_fn=min_cut_rematerialization_partition,
                decompositions=decompositions(),
            )
            flat = dict(zip(state, faked, strict=False))
            result = compiled(flat, *faked[len(state) :])
            sums = [leaf.sum() for leaf in tree_leaves(result) if _differentiable(leaf)]
            if sums:
                torch.autograd.backward(sums)
    except NostallError:
        raise
    except Exception as error:  # whatever PyTorch has to say about the user's code
        raise BadCapture(
            f"PyTorch cannot trace {type(module).__name__}: {one_line(error)}; "
            "make its forward pass traceable (no branches on values of tensors)"
        ) from error
    return graphs


def _differentiable(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad and not leaf.is_complex()


@contextmanager
def _fake_mode(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The mode of the tensors that are fake already, or a new one, and all of them in it."""
    modes = [tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor)]
    mode = modes[0] if modes else FakeTensorMode()
    with mode:
        yield [t if isinstance(t, FakeTensor) else mode.from_tensor(t) for t in tensors]


def _free_random_numbers(module: GraphModule) -> None:
    """Random tensors read others only for their shape; without that they are borders to nothing."""
    for node in module.graph.find_nodes(op="call_function", target=_aten.rand_like.default):
        value = node.meta["val"]
        if not value.is_contiguous():
            continue  # the plain call would lay it out otherwise
        with module.graph.inserting_before(node):
            given = {"dtype": value.dtype, "device": value.device}
            plain = module.graph.call_function(_aten.rand.default, (list(value.shape),), given)
        plain.meta.update(node.meta)
        node.replace_all_uses_with(plain)
        module.graph.erase_node(node)
    module.recompile()
