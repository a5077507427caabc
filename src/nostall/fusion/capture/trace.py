"""Tracing of PyTorch modules to FX graphs of ATen calls, decomposed far enough for fusion.

Tracing uses fake tensors: nothing is computed, and a model may be larger than memory.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from functorch.compile import aot_function, make_boxed_func, min_cut_rematerialization_partition
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx import GraphModule
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_leaves

from nostall.core.errors import NostallError, one_line
from nostall.fusion.errors import BadCapture

_aten = torch.ops.aten
_DECOMPOSED = (
    "_log_softmax _log_softmax_backward_data _softmax _softmax_backward_data clamp_max "
    "clamp_min elu gelu gelu_backward hardsigmoid hardswish hardtanh leaky_relu "
    "linalg_vector_norm dist permute_copy unbind_copy view_copy mse_loss mse_loss_backward "
    "native_batch_norm native_batch_norm_backward _native_batch_norm_legit "
    "_native_batch_norm_legit_functional _native_batch_norm_legit_no_training native_dropout "
    "native_dropout_backward native_group_norm native_group_norm_backward native_layer_norm "
    "native_layer_norm_backward sigmoid_backward silu silu_backward softplus "
    "softplus_backward tanh_backward threshold_backward"
)
"""Operators that core ATen does not decompose; their parts can fuse with neighbouring operators."""


def decompositions() -> dict[Any, Callable[..., Any]]:
    """PyTorch's decompositions by operator, except those of casts and those that Inductor excludes.

    ``addmm`` and ``baddbmm`` stay whole because cuBLAS computes them faster than their parts.
    Inductor excludes what it computes itself, and decompositions that hold for inference only, such
    as that of attention on the CPU, whose log-sum-exp the backward pass cannot use.
    """
    return dict(_table())


@functools.cache
def _table() -> dict[Any, Callable[..., Any]]:
    # Cached because PyTorch scans all of its operators for it, which takes 0.17 s.
    table = {
        **core_aten_decompositions(),
        **get_decompositions(getattr(_aten, name) for name in _DECOMPOSED.split()),
    }
    for operator in (_aten.addmm, _aten.baddbmm, _aten._to_copy, *_excluded_by_inductor()):
        for overload in _overloads(operator):
            table.pop(overload, None)
    return table


def _excluded_by_inductor() -> list[Any]:
    """Operators and overloads that Inductor removes from PyTorch's table and does not decompose."""
    from torch._inductor import decomposition

    return [
        overload
        for operator in decomposition.decomps_to_exclude
        for overload in _overloads(operator)
        if overload not in decomposition.decompositions
    ]


def _overloads(operator: Any) -> list[Any]:
    """All overloads of an operator; an overload alone is the only one."""
    if isinstance(operator, torch._ops.OpOverload):
        return [operator]
    return [getattr(operator, name) for name in operator.overloads()]


def inference_graph(module: torch.nn.Module, *inputs: torch.Tensor) -> GraphModule:
    """Trace the forward pass without gradients.

    Inputs and parameters may be fake tensors (made under ``FakeTensorMode``). Raises
    :class:`BadCapture` with PyTorch's message if the module cannot be traced.
    """
    with torch.no_grad():
        (graph,) = _trace(module, inputs)
    return graph


def training_graphs(
    module: torch.nn.Module, *inputs: torch.Tensor
) -> tuple[GraphModule, GraphModule]:
    """Trace the forward and the backward pass of a module, as AOTAutograd partitions them.

    AOTAutograd's min-cut partitioner lets the backward pass recompute cheap values. The backward
    pass computes gradients of the parameters and floating-point inputs that require them. Raises
    :class:`BadCapture` if the module cannot be traced or has no backward pass.
    """
    graphs = _trace(module, inputs)
    if len(graphs) != 2:
        raise BadCapture(
            "the module has no backward pass: it returns no real tensor that depends on a "
            "parameter or an input that requires gradients; use inference_graph "
            "(`nostall fuse` without --backward)"
        )
    forward, backward = graphs
    return forward, backward


def _trace(module: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> list[GraphModule]:
    """The graphs that AOTAutograd passes to its compilers: one, or forward and backward."""
    graphs: list[GraphModule] = []

    def compiler(graph: GraphModule, _: Sequence[Any]) -> Any:
        _detach_random_ops(graph)
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    def call(state: dict[str, torch.Tensor], *arguments: torch.Tensor) -> Any:
        # functional_call leaves the call's tensors in a submodule with two names.
        with _reparametrize_module(module, state, tie_weights=True, stack_weights=True):
            return module(*arguments)

    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    try:
        values = (*state.values(), *inputs)
        with warnings.catch_warnings(), _without_logs(), _fake_mode(values) as fake:
            warnings.simplefilter("ignore")
            compiled = aot_function(
                call,
                fw_compiler=compiler,
                bw_compiler=compiler,
                partition_fn=min_cut_rematerialization_partition,
                decompositions=decompositions(),
            )
            fake_state = dict(zip(state, fake, strict=False))
            result = compiled(fake_state, *fake[len(state) :])
            sums = [leaf.sum() for leaf in tree_leaves(result) if _is_differentiable(leaf)]
            if sums:
                torch.autograd.backward(sums)
    except NostallError:
        raise
    except Exception as error:  # tracing runs the user's code, which may raise anything
        raise BadCapture(
            f"PyTorch cannot trace {type(module).__name__}: {one_line(error)}; "
            f"{_advice(error, inputs)}"
        ) from error
    return graphs


_DATA_DEPENDENT = ("datadependent", "data-dependent", "dynamicoutputshape")
"""Parts of the names and texts of errors of code that reads values of tensors."""


def _advice(error: Exception, inputs: Sequence[torch.Tensor]) -> str:
    """What to do; an operator that fails on fake tensors fails on real ones, too."""
    text = f"{type(error).__name__} {error}".lower()
    if any(part in text for part in _DATA_DEPENDENT):
        return "make its forward pass traceable (no branches on values of tensors)"
    if "convert all tensors to faketensors" in text:
        return "pass tensors that it makes elsewhere as inputs, or make them buffers of a module"
    shapes = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in inputs)
    return f"the inputs are ({shapes}): give inputs that fit each other, or correct the function"


@contextmanager
def _without_logs() -> Iterator[None]:
    """Turn off the log in which PyTorch repeats an operator's error with its traceback."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was_disabled


def _is_differentiable(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad and not leaf.is_complex()


@contextmanager
def _fake_mode(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Enter the tensors' fake mode, or a new one if none is fake; yields all as fake tensors."""
    modes = [tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor)]
    mode = modes[0] if modes else FakeTensorMode()
    with mode:
        yield [t if isinstance(t, FakeTensor) else mode.from_tensor(t) for t in tensors]


def _detach_random_ops(module: GraphModule) -> None:
    """Replace ``rand_like(x)`` by ``rand(shape of x)``, which does not depend on ``x``.

    ``rand_like`` reads only the shape of its operand. As an opaque node that reads ``x`` it would
    force a region boundary between ``x`` and its readers.
    """
    for node in module.graph.find_nodes(op="call_function", target=_aten.rand_like.default):
        value = node.meta["val"]
        if not value.is_contiguous():
            continue  # rand would give row-major strides, rand_like keeps those of its operand
        with module.graph.inserting_before(node):
            options = {"dtype": value.dtype, "device": value.device}
            rand = module.graph.call_function(_aten.rand.default, (list(value.shape),), options)
        rand.meta.update(node.meta)
        node.replace_all_uses_with(rand)
        module.graph.erase_node(node)
    module.recompile()
