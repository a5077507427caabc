"""Counting under PyTorch's dispatcher; imported only where PyTorch is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

from nostall.core.errors import BadJob
from nostall.workload.jobs.operators import Operator
from nostall.workload.modules.classes import kind_of_operator

_LOOKUPS = ("aten.embedding.default", "aten._embedding_bag.default")
_PICKS = ("aten.gather.", "aten.index_select.", "aten.index.", "aten.nll_loss_forward.")
_ON_PROCESSORS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
}
"""Attention as it is called for a module on the processor; PyTorch's counter does not know it."""


@dataclass(slots=True)
class Counted:
    """Sums over the operators of a step."""

    flops: float
    product_bytes: float
    memory_bytes: float
    touched_bytes: float
    operators: tuple[Operator, ...]


def count_step(
    module: torch.nn.Module,
    batch: Sequence[Any] | Mapping[str, Any],
    loss: Callable[[Any], torch.Tensor] | None,
    training: bool,
) -> Counted:
    """Run one step on fake tensors and count what the dispatcher sees."""
    counter = _Counter()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = {name: _faked(mode, p) for name, p in module.named_parameters()}
    fake |= {name: _faked(mode, b) for name, b in module.named_buffers()}
    inputs = tree_map(lambda v: _faked(mode, v) if isinstance(v, torch.Tensor) else v, batch)
    args, named = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    try:
        with mode, counter, torch.set_grad_enabled(training):
            output = torch.func.functional_call(module, fake, args, named)
            if training:
                _scalar(output, loss).backward()
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BadJob(
            f"a step of {type(module).__name__} cannot be traced without data: {first}; give a "
            "batch that its forward takes, and a loss= where its output is no tensor"
        ) from error
    return counter.result()


def count_call(function: Callable[[], Any]) -> Counted:
    """Count what the dispatcher sees of one call, on the tensors that ``function`` holds."""
    counter = _Counter()
    with counter:
        function()
    return counter.result()


def _faked(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    found = mode.from_tensor(tensor.detach())
    return found.requires_grad_(tensor.requires_grad)


def _scalar(output: Any, loss: Callable[[Any], torch.Tensor] | None) -> torch.Tensor:
    if loss is not None:
        return loss(output)
    plain = isinstance(output, torch.Tensor | Mapping | Sequence)
    values = output if plain else vars(output)  # outputs as dataclasses
    leaves = [
        v
        for v in tree_leaves(values)
        if isinstance(v, torch.Tensor) and v.is_floating_point() and v.requires_grad
    ]
    if not leaves:
        raise ValueError("its output holds no tensor with a gradient")
    return torch.stack([leaf.sum() for leaf in leaves]).sum()


class _Counter(TorchDispatchMode):  # type: ignore[misc]
    """Adds up FLOP and bytes; views move nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[tuple[str, float, float], int] = {}
        self.touched = 0.0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.is_view or not _writes(func, out):
            return out
        name = str(func)
        if name in _LOOKUPS:
            # A look-up reads the rows it asks for, not the table.
            table, indices = args[0], args[1]
            rows = float(indices.numel() * table.shape[1] * table.element_size())
            self.touched += rows
            size = rows + _bytes(indices) + _bytes(out)
        elif name.startswith(_PICKS):
            # Of what they pick from they read as much as they give.
            size = _bytes(args[1:]) + 2 * _bytes(out)
        else:
            size = _bytes((args, kwargs)) + _bytes(out)
        key = (name, _flops(func, args, kwargs or {}, out), size)
        self.calls[key] = self.calls.get(key, 0) + 1
        return out

    def result(self) -> Counted:
        operators = [
            Operator(kind_of_operator(name, flops), name, calls, calls * flops, calls * size)
            for (name, flops, size), calls in self.calls.items()
        ]
        return Counted(
            flops=sum(o.flops for o in operators if o.kind.computes),
            product_bytes=sum(o.size for o in operators if o.kind.computes),
            memory_bytes=sum(o.size for o in operators if not o.kind.computes),
            touched_bytes=self.touched,
            operators=tuple(sorted(operators, key=lambda o: (-o.flops, -o.size))),
        )


_NOTHING = (
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


def _writes(func: Any, out: Any) -> bool:
    """Whether the operator moves data: neither an allocation nor an alias."""
    return not str(func).startswith(_NOTHING) and bool(tree_leaves(out))


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    formula = flop_registry.get(func._overloadpacket)
    formula = formula or _ON_PROCESSORS.get(func._overloadpacket)
    if formula is None:
        return 0.0
    counted = float(formula(*args, **kwargs, out_val=out))
    return counted / 2 if _causal(func, args, kwargs) else counted


def _causal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an attention's kernels skip the half that its mask hides."""
    for at, argument in enumerate(func._schema.arguments):
        if argument.name == "is_causal":
            return bool(args[at] if at < len(args) else kwargs.get("is_causal", False))
    return False


def _bytes(values: Any) -> float:
    """Bytes of the distinct tensors among ``values``."""
    tensors = {id(v): v for v in tree_leaves(values) if isinstance(v, torch.Tensor)}
    return float(sum(t.numel() * t.element_size() for t in tensors.values()))
