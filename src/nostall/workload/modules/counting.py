"""Counting under PyTorch's dispatcher; imported only where PyTorch is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from nostall.core.errors import BadJob
from nostall.workload.modules.features import Operator

_LOOKUPS = ("aten.embedding.default", "aten._embedding_bag.default")


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
        self.rows: dict[str, list[float]] = {}
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
        row = self.rows.setdefault(name, [0, 0.0, 0.0])
        formula = flop_registry.get(func._overloadpacket)
        row[0] += 1
        if formula is not None:
            row[1] += float(formula(*args, **(kwargs or {}), out_val=out))
        if name in _LOOKUPS:
            # A look-up reads the rows it asks for, not the table.
            table, indices = args[0], args[1]
            rows = float(indices.numel() * table.shape[1] * table.element_size())
            self.touched += rows
            row[2] += rows + _bytes(indices) + _bytes(out)
        else:
            row[2] += _bytes((args, kwargs)) + _bytes(out)
        return out

    def result(self) -> Counted:
        operators = [Operator(n, int(c), f, s) for n, (c, f, s) in self.rows.items()]
        return Counted(
            flops=sum(o.flops for o in operators),
            product_bytes=sum(o.size for o in operators if o.flops),
            memory_bytes=sum(o.size for o in operators if not o.flops),
            touched_bytes=self.touched,
            operators=tuple(sorted(operators, key=lambda o: (-o.flops, -o.size))),
        )


_NOTHING = ("aten.empty", "aten.detach", "aten.sym_", "prim.", "aten.alias", "aten.lift")


def _writes(func: Any, out: Any) -> bool:
    """Whether the operator moves data: neither an allocation nor an alias."""
    return not str(func).startswith(_NOTHING) and bool(tree_leaves(out))


def _bytes(values: Any) -> float:
    """Bytes of the distinct tensors among ``values``."""
    tensors = {id(v): v for v in tree_leaves(values) if isinstance(v, torch.Tensor)}
    return float(sum(t.numel() * t.element_size() for t in tensors.values()))
