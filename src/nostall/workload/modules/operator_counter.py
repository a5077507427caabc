"""FLOP and byte counter for the operators that PyTorch dispatches; imports PyTorch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

from nostall.core.errors import BadJob
from nostall.workload.jobs.record import Operator, OperatorKind

_BY_NAME = (
    (OperatorKind.ATTENTION, r"attention"),
    (OperatorKind.CONVOLUTION, r"conv"),
    (OperatorKind.EMBEDDING, r"embedding|index_select|\bgather|index_put|scatter"),
    (OperatorKind.NORMALISATION, r"norm(?!al)|softmax"),
    (
        OperatorKind.REDUCTION,
        r"\.(?:sum|mean|amax|amin|max|min|argmax|var|std|prod|any|all|cumsum|logsumexp)\b|"
        r"var_mean|pool|nll_loss|linalg_vector",
    ),
)
_PATTERNS = tuple((kind, re.compile(pattern)) for kind, pattern in _BY_NAME)


def operator_kind(name: str, flops: float) -> OperatorKind:
    """The kind of the operator ``aten.name.overload``.

    An unrecognised operator is a matrix product if PyTorch's FLOP counter has a formula for it
    (``flops`` > 0), else elementwise.
    """
    for kind, pattern in _PATTERNS:
        if pattern.search(name):
            return kind
    return OperatorKind.PRODUCT if flops else OperatorKind.ELEMENTWISE


_EMBEDDINGS = ("aten.embedding.default", "aten._embedding_bag.default")
_GATHERS = ("aten.gather.", "aten.index_select.", "aten.index.", "aten.nll_loss_forward.")
_CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
}
"""FLOP formulas of the attention operators for CPU tensors, which PyTorch's counter lacks."""


@dataclass(slots=True)
class OperatorCounts:
    """Sums over the operators of a step or a call."""

    flops: float
    """FLOP of compute-bound operators."""
    product_bytes: float
    """Bytes of compute-bound operators."""
    memory_bytes: float
    """Bytes of all other operators."""
    touched_bytes: float
    """Bytes of the embedding rows that are looked up, with repetition."""
    operators: tuple[Operator, ...]


def count_step(
    module: torch.nn.Module,
    batch: Sequence[Any] | Mapping[str, Any],
    loss: Callable[[Any], torch.Tensor] | None,
    training: bool,
) -> OperatorCounts:
    """Run one step on fake tensors and count its operators.

    Raises :class:`~nostall.core.errors.BadJob` if the step fails.
    """
    counter = OperatorCounter()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    state = {name: _to_fake(mode, p) for name, p in module.named_parameters()}
    state |= {name: _to_fake(mode, b) for name, b in module.named_buffers()}
    inputs = tree_map(lambda v: _to_fake(mode, v) if isinstance(v, torch.Tensor) else v, batch)
    args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    try:
        with mode, counter, torch.set_grad_enabled(training):
            # functional_call leaves the call's tensors in a submodule with two names.
            with _reparametrize_module(module, state, tie_weights=True, stack_weights=True):
                output = module(*args, **kwargs)
            if training:
                _scalar_loss(output, loss).backward()
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise BadJob(
            f"a step of {type(module).__name__} cannot be traced on fake tensors: {lines[0]}; give "
            "a batch that its forward method takes, and loss= if its output is not a tensor"
        ) from error
    return counter.counts()


def _to_fake(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    fake = mode.from_tensor(tensor.detach())
    return fake.requires_grad_(tensor.requires_grad)


def _scalar_loss(output: Any, loss: Callable[[Any], torch.Tensor] | None) -> torch.Tensor:
    """``loss`` of the output, or the sum of all its tensors that have a gradient."""
    if loss is not None:
        return loss(output)
    is_tree = isinstance(output, torch.Tensor | Mapping | Sequence)
    values = output if is_tree else vars(output)  # an output can be a dataclass
    leaves = [
        v
        for v in tree_leaves(values)
        if isinstance(v, torch.Tensor) and v.is_floating_point() and v.requires_grad
    ]
    if not leaves:
        raise ValueError("its output has no tensor with a gradient")
    return torch.stack([leaf.sum() for leaf in leaves]).sum()


class OperatorCounter(TorchDispatchMode):  # type: ignore[misc]
    """Adds up FLOP and bytes of dispatched operators; views and allocations count nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[tuple[str, float, float], int] = {}
        """Number of calls by (name, FLOP per call, bytes per call)."""
        self.touched_bytes = 0.0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.is_view or not _moves_data(func, out):
            return out
        name = str(func)
        if name in _EMBEDDINGS:
            # A look-up reads the rows that the indices select, not the whole table.
            table, indices = args[0], args[1]
            rows = float(indices.numel() * table.shape[1] * table.element_size())
            self.touched_bytes += rows
            size = rows + _tensor_bytes(indices) + _tensor_bytes(out)
        elif name.startswith(_GATHERS):
            # A gather reads as many bytes of its source as it writes.
            size = _tensor_bytes(args[1:]) + 2 * _tensor_bytes(out)
        else:
            size = _tensor_bytes((args, kwargs)) + _tensor_bytes(out)
        key = (name, _flops(func, args, kwargs or {}, out), size)
        self.calls[key] = self.calls.get(key, 0) + 1
        return out

    def counts(self) -> OperatorCounts:
        operators = [
            Operator(operator_kind(name, flops), name, calls, calls * flops, calls * size)
            for (name, flops, size), calls in self.calls.items()
        ]
        return OperatorCounts(
            flops=sum(o.flops for o in operators if o.kind.is_compute_bound),
            product_bytes=sum(o.bytes_moved for o in operators if o.kind.is_compute_bound),
            memory_bytes=sum(o.bytes_moved for o in operators if not o.kind.is_compute_bound),
            touched_bytes=self.touched_bytes,
            operators=tuple(sorted(operators, key=lambda o: (-o.flops, -o.bytes_moved))),
        )


_ALLOCATIONS_AND_ALIASES = (
    "aten.empty",
    "aten.new_empty",
    "aten.detach",
    "aten.sym_",
    "prim.",
    "aten.alias",
    "aten.lift",
    "aten._unsafe_view",
    "aten._reshape_alias",
    "aten.as_strided_",
)


def _moves_data(func: Any, out: Any) -> bool:
    return not str(func).startswith(_ALLOCATIONS_AND_ALIASES) and bool(tree_leaves(out))


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    """FLOP of one call; 0 if there is no formula."""
    formula = flop_registry.get(func._overloadpacket)
    formula = formula or _CPU_ATTENTION.get(func._overloadpacket)
    if formula is None:
        return 0.0
    flops = float(formula(*args, **kwargs, out_val=out))
    # Causal attention kernels skip the masked half, PyTorch's formula does not.
    return flops / 2 if _is_causal(func, args, kwargs) else flops


def _is_causal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "is_causal":
            value = args[position] if position < len(args) else kwargs.get("is_causal", False)
            return bool(value)
    return False


def _tensor_bytes(values: Any) -> float:
    """Bytes of the distinct tensors in a tree of values."""
    tensors = {id(v): v for v in tree_leaves(values) if isinstance(v, torch.Tensor)}
    return float(sum(t.numel() * t.element_size() for t in tensors.values()))
