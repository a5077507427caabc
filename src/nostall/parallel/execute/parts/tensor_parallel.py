"""Tensor parallelism by PyTorch's ``parallelize_module``, compared with the whole module once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from nostall.parallel.errors import BadPlan
from nostall.parallel.execute.parts.part import LOSS, first_difference
from nostall.parallel.module.job import Job, to_device
from nostall.parallel.sharding.engine_file import Style

SAMPLES = 2
"""Samples of the comparison."""
_STYLES: Mapping[Style, ParallelStyle] = {
    "colwise": ColwiseParallel(),
    "rowwise": RowwiseParallel(),
    "words": RowwiseParallel(input_layouts=Replicate()),
}
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Relative errors of the loss and the norms of gradients by the coarsest type; 0.05 for others."""

_VIEWS = ("View", "Reshape", "Squeeze")
"""Parts of the names of backward nodes that change no number."""


def parallelize(job: Job, styles: Mapping[str, Style], device: torch.device) -> bool:
    """Cut layers of a job's module over all ranks, in place; all else is on each rank.

    All parameters become DTensors.  Returns whether logits are cut by classes: the loss and its
    backward pass then run in :func:`loss_context`.  They are whole if the loss takes no cut ones.

    Raises :class:`BadPlan` if a style names no layer of its kind, or if the module then computes
    another loss or other gradients: a fixed number of heads in a view, for example, fits no part of
    the heads.
    """
    module, parts = job.module, dict(job.module.named_modules())
    for name, style in styles.items():
        kind = nn.Embedding if style == "words" else nn.Linear
        if not isinstance(parts.get(name), kind):
            raise BadPlan(
                f"the plan cuts {name}, which is no {kind.__name__} of the module; plan again from "
                "it"
            )
    expected = _loss_and_norms(job, device)
    before = {
        name: (id(p), p.requires_grad)
        for name, p in module.named_parameters(remove_duplicate=False)
    }
    mesh = DeviceMesh(device.type, torch.arange(dist.get_world_size()))
    heads = [parts[name] for name, own in styles.items() if own == "classes"]
    for name, part in parts.items():
        if name not in styles:
            _hold(part, mesh, Replicate())
    by_name = {name: _STYLES[own] for name, own in styles.items() if own != "classes"}
    parallelize_module(module, mesh, by_name)
    hooks = [hook for head in heads for hook in _hold(head, mesh, Shard(0), returns_whole=False)]
    _tie(module, before)
    failure = _difference(job, device, expected, are_logits_cut=bool(heads))
    if not failure:
        return bool(heads)
    for hook in hooks:
        hook.remove()
    for head in heads:
        for name, parameter in list(head.named_parameters(recurse=False)):
            head.register_parameter(name, nn.Parameter(_as_local(parameter.detach())))
        _hold(head, mesh, Replicate())
    _tie(module, before)
    failure = _difference(job, device, expected) if heads else failure
    if failure:
        raise BadPlan(_refusal(failure))
    return False


@contextmanager
def loss_context(are_logits_cut: bool) -> Iterator[None]:
    """Where a loss and its backward pass run; within it, cross-entropy takes cut logits."""
    if not are_logits_cut:
        yield
        return
    context = loss_parallel()
    context.__enter__()
    try:
        yield
    finally:  # PyTorch's own leaves its operators in place after an error
        context.__exit__(None, None, None)


def place_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Cut gradients as their parameters are cut: that of an embedding's words is a sum over ranks
    that was not computed yet, so that a norm of its local part would be wrong."""
    for parameter in parameters:
        gradient = parameter.grad
        if not (isinstance(parameter, DTensor) and isinstance(gradient, DTensor)):
            continue
        if gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def _difference(
    job: Job, device: torch.device, expected: Mapping[str, float], *, are_logits_cut: bool = False
) -> str:
    """Where the loss or a gradient differs from the whole module's; empty if none does."""
    try:
        with loss_context(are_logits_cut):
            found = _loss_and_norms(job, device, are_logits_cut=are_logits_cut)
    except Exception as error:  # of the user's module, which may check a width itself
        text = " ".join(str(error).split("\n", 1)[0][:200].split())
        job.module.zero_grad()
        return f"{type(error).__name__}: {text}".rstrip(": ")
    tolerance = _tolerance(job.module)
    if name := first_difference(found, expected, tolerance):
        return f"{name} is {found.get(name, 0.0):.6g} and not {expected[name]:.6g}"
    return ""


def _hold(
    part: nn.Module, mesh: DeviceMesh, placement: Placement, *, returns_whole: bool = True
) -> list[RemovableHandle]:
    """Make a module's own parameters DTensors; a leaf then computes with these, and returns local
    tensors as before, or else what is cut.  Returns the hooks."""
    own = dict(part.named_parameters(recurse=False))
    for name, parameter in own.items():
        held = distribute_tensor(parameter.detach(), mesh, [placement])
        part.register_parameter(name, nn.Parameter(held, parameter.requires_grad))
    if not own or any(True for _ in part.children()):
        return []

    def given(_: nn.Module, inputs: Any, named: Any) -> Any:
        return tree_map(lambda leaf: _as_replica(leaf, mesh), (inputs, named))

    def returned(_: nn.Module, inputs: Any, output: Any) -> Any:
        return tree_map(_as_local, output)

    hooks = [part.register_forward_pre_hook(given, with_kwargs=True)]
    return [*hooks, part.register_forward_hook(returned)] if returns_whole else hooks


def _as_replica(leaf: Any, mesh: DeviceMesh) -> Any:
    is_local = isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor)
    return DTensor.from_local(leaf, mesh, [Replicate()], run_check=False) if is_local else leaf


def _as_local(leaf: Any) -> Any:
    return leaf.full_tensor() if isinstance(leaf, DTensor) else leaf


def _tie(module: nn.Module, before: Mapping[str, tuple[int, bool]]) -> None:
    """Let names that had one parameter have one again, and frozen parameters be frozen: PyTorch's
    styles may make them trainable."""
    first: dict[int, nn.Parameter] = {}
    for name, (identity, is_trained) in before.items():
        holder, _, own = name.rpartition(".")
        part = module.get_submodule(holder)
        found = first.setdefault(identity, part.get_parameter(own))
        part.register_parameter(own, found.requires_grad_(is_trained))


def _loss_and_norms(
    job: Job, device: torch.device, *, are_logits_cut: bool = False
) -> dict[str, float]:
    """Loss of a few samples, and the norm of each gradient; every rank computes all of it.

    Raises :class:`BadPlan` for cut logits if PyTorch's gradient of them is wrong: it takes the
    log-softmax to be that of a cross-entropy, which a norm does not always show.
    """
    with torch.enable_grad():
        loss = job.run(*to_device(job.example_batch(SAMPLES), device))
        if are_logits_cut and not _is_cross_entropy(loss):
            raise BadPlan("the loss reads a log-softmax beside its cross-entropy")
        loss.backward()
    found = {LOSS: float(_as_local(loss.detach()))}
    for name, parameter in job.module.named_parameters():
        if parameter.grad is not None:
            whole = _as_local(parameter.grad)
            found[f"the norm of the gradient of {name}"] = float(whole.double().norm())
            parameter.grad = None
    return found


def _is_cross_entropy(loss: torch.Tensor) -> bool:
    """Whether each log-softmax behind a loss goes into a likelihood of classes, and nothing else
    goes there."""
    seen: set[tuple[Any, bool]] = set()
    left: list[tuple[Any, bool]] = [(loss.grad_fn, False)]
    while left:
        node, is_likelihood = found = left.pop()
        if node is None or found in seen:
            continue
        seen.add(found)
        kind = node.name()
        if is_likelihood and any(view in kind for view in _VIEWS):
            pass
        elif is_likelihood != kind.startswith("LogSoftmaxBackward"):
            return False
        else:
            is_likelihood = kind.startswith("NllLoss")
        left += [(after, is_likelihood) for after, _ in node.next_functions]
    return True


def _tolerance(module: nn.Module) -> float:
    dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
    return max((_TOLERANCES.get(dtype, 0.05) for dtype in dtypes), default=0.05)


def _refusal(found: str) -> str:
    return (
        f"tensor parallelism changes what the module computes ({found}); write its forward pass "
        "for any number of heads (view(..., -1, head)), with parameters in modules without "
        "submodules, or plan with --planner sharding"
    )
