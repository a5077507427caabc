"""Check that the loss of a batch is the mean, or the sum, of the losses of its parts.

Ranks and micro-batches train on parts of a batch.  A loss that divides by a number that depends on
the samples, such as the number of labels that count, has other gradients there.  Class weights,
ignored labels and masks do this.  The example batch may have none of them, so probes put values
into its targets that losses leave out, and :func:`refuse_uneven` looks for these values in later
batches.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from nostall.parallel.errors import BadModel
from nostall.parallel.module.job import SEED, Job, to_device

MIN_TOLERANCE = 1e-4
"""Of types without a larger rounding error: the traced layers call the module's operators."""
SMALLEST = 1e-6
"""Gradients below this share of the largest one, and losses below it, count as rounding errors."""
_TARGETS = 16
"""Samples of the example batch whose targets show how a loss adds up, at most."""
_PROBED = 2
"""Samples of a probe: one with the value, and one without.  Logits of a vocabulary are large."""
_PROBES: tuple[float, ...] = (-100, -1, 0, 1, 255, math.nan)
"""Values by which losses leave labels out; two classes, which may have weights."""
_HINT = (
    "; divide by a constant (reduction='sum'), or plan with --planner sharding, which cuts the "
    "loss itself"
)
Evaluate = Callable[[list[Any], range], torch.Tensor]
"""The loss of some samples from leaves of a batch."""


@dataclass(frozen=True)
class Watched:
    """A value in the targets that changes how much other samples weigh in the loss."""

    leaf: int
    """Number of the tensor among the leaves of (inputs, targets)."""
    value: float
    allowed: int
    """How often each sample of a batch has the value, as in the example batch."""


Found = tuple[tuple[str, ...], tuple[Watched, ...]]
"""Notes, and what to look for in later batches."""


def compare_parts(job: Job, samples: int, device: torch.device, dtype: torch.dtype) -> Found:
    """Raise :class:`BadModel` if the loss is not the mean, or the sum, of those of parts.

    Runs the module, which is on the device, on ``samples`` samples of the example batch, and the
    loss function alone on more of its targets.  ``dtype`` is the type of the computation.  Returns
    a note if the module has statistics of a batch, which some mean to have.
    """
    modes = [(part, part.training) for part in job.module.modules()]
    try:
        with torch.no_grad(), warnings.catch_warnings(), preserved(job.module, device):
            warnings.simplefilter("ignore")  # such as checkpointing's, about missing gradients
            return _Parts(job, samples, device, dtype).compare()
    finally:
        for part, mode in modes:
            part.training = mode


@contextmanager
def preserved(module: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Restore buffers and the states of random number generators."""
    buffers = [
        (part, name, buffer, buffer.clone())
        for part in module.modules()
        for name, buffer in part.named_buffers(recurse=False)
    ]
    state = random.getstate()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(state)
            for part, name, buffer, value in buffers:
                with torch.no_grad():
                    buffer.copy_(value)
                setattr(part, name, buffer)


class _Parts:
    """The comparison of one job's loss with those of parts of its example batch."""

    def __init__(self, job: Job, samples: int, device: torch.device, dtype: torch.dtype) -> None:
        self.job, self.samples, self.device = job, samples, device
        self.allowed = max(MIN_TOLERANCE, 8 * torch.finfo(dtype).eps)
        self.batch = to_device(job.example_batch(samples), device)

    def compare(self) -> Found:
        """See :func:`compare_parts`."""
        output, is_random = self._output()
        count = max(self.samples, min(_TARGETS, self.job.samples))
        leaves = tree_leaves(to_device(self.job.example_batch(count), self.device))
        alone = self._loss_alone(output, count)
        if text := self._difference(alone, leaves, count):
            raise BadModel(f"{text}: class weights and ignored labels do this{_HINT}")
        watched: tuple[Watched, ...] = ()
        is_judged = self._is_judged(output, alone, leaves, count)
        if is_judged:
            leaves = [_on_cpu(leaf) for leaf in tree_leaves(self.job.example_batch(_PROBED))]
            alone = self._loss_alone(tree_map(_on_cpu, output), _PROBED)
            watched = self._watched(alone, leaves, _PROBED, len(tree_leaves(self.batch[0])))
        if is_random:  # dropout: parts draw other numbers than the whole
            self.job.module.eval()
            _, is_random = self._output()
        if is_random or self.samples < 2:
            return (), watched
        leaves, half = tree_leaves(self.batch), (self.samples // 2,)
        if not (text := self._difference(self._loss_of_module, leaves, self.samples, half)):
            if not is_judged and self.device.type == "cpu":
                given = self._loss_of_module, leaves, self.samples, 0, _PROBES[:1]
                watched = self._watched(*given)
            return (), watched
        if is_judged:
            return (f"{text}: the module has statistics of a batch",), watched
        raise BadModel(
            f"{text}: the module compares samples, or leaves labels out of a loss of its own; let "
            f"it return values of each sample, of which the job's loss is a mean{_HINT}"
        )

    def _output(self) -> tuple[Any, bool]:
        """The module's output, and whether it draws random numbers."""
        outputs: list[Any] = []

        def call(*given: Any, **named: Any) -> Any:
            outputs.append(self.job.module(*given, **named))
            return outputs[-1]

        is_gpu = self.device.type == "cuda"
        state = (lambda: torch.cuda.get_rng_state(self.device)) if is_gpu else torch.get_rng_state
        torch.manual_seed(SEED)
        before = state()
        self.job.run(self.batch[0], self.batch[1], call)
        return outputs[0], not torch.equal(state(), before)

    def _is_judged(self, output: Any, alone: Evaluate, leaves: list[Any], count: int) -> bool:
        """Whether the loss function alone is known, and depends on the samples' results: a module
        may have computed the loss."""
        halved = tree_map(lambda t: t * 0.5 if _has_rows(t, self.samples) else t, output)
        losses = [_loss(e, leaves, range(count)) for e in (alone, self._loss_alone(halved, count))]
        return None not in losses and not torch.equal(*losses)

    def _loss_alone(self, output: Any, count: int) -> Evaluate:
        """The loss function on results of few samples, repeated with other factors in each sample,
        because all samples have about the same loss at first."""
        device = next((t.device for t in tree_leaves(output) if isinstance(t, torch.Tensor)), None)
        repeated = torch.arange(count, device=device) % self.samples
        factors = torch.linspace(1.0, 3.0, count, device=device)
        rows = _taken(output, repeated, self.samples, factors)

        def evaluate(leaves: list[Any], part: range) -> torch.Tensor:
            index = torch.arange(part.start, part.stop)
            own = _taken(rows, index.to(device), count)
            return self.job.loss(own, self._taken_batch(leaves, index)[1])

        return evaluate

    def _loss_of_module(self, leaves: list[Any], part: range) -> torch.Tensor:
        return self.job.run(*self._taken_batch(leaves, slice(part.start, part.stop)))

    def _taken_batch(self, leaves: list[Any], index: Any) -> tuple[Any, Any]:
        _, structure = tree_flatten((self.job.inputs, self.job.targets))
        return self.job.take(tree_unflatten(leaves, structure), index)

    def _difference(
        self, evaluate: Evaluate, leaves: list[Any], count: int, cuts: Sequence[int] | None = None
    ) -> str:
        """How the loss differs from the mean, or the sum, of those of two parts; empty if it does
        not, or if one is unknown."""
        whole = _loss(evaluate, leaves, range(count))
        if whole is None or not whole.isfinite():
            return ""
        is_mean = self.job.reduction == "mean"
        for cut in (cuts or {count // 2, 1}) if count > 1 else ():
            parts = range(cut), range(cut, count)
            losses = [_loss(evaluate, leaves, part) for part in parts]
            shares = [len(part) / count if is_mean else 1.0 for part in parts]
            known = [s * float(x) for s, x in zip(shares, losses, strict=True) if x is not None]
            # All labels of a part may be ignored, which is not a number.
            least = self.allowed * max(abs(float(whole)), SMALLEST)
            if len(known) == 2 and not abs(sum(known) - float(whole)) <= least:
                return (
                    f"the loss of {count} samples is {float(whole):.6g}, and the "
                    f"{'mean' if is_mean else 'sum'} of those of two parts {sum(known):.6g}, which "
                    "ranks and micro-batches train on"
                )
        return ""

    def _watched(
        self,
        evaluate: Evaluate,
        leaves: list[Any],
        count: int,
        first: int,
        probes: Sequence[float] = _PROBES,
    ) -> tuple[Watched, ...]:
        """The values that change weights in leaves from number ``first``; on the CPU, because a GPU
        does not survive a label that is out of range."""
        found: list[Watched] = []
        for number, value in self._probes(leaves, first, probes):
            leaf, probed = leaves[number], leaves.copy()
            kept = torch.zeros_like(leaf[0], dtype=torch.bool)
            for own in found:
                kept |= _has(leaf[0], own.value) & (own.leaf == number)
            probed[number] = leaf.clone()
            probed[number][0] = torch.where(kept, leaf[0], value).to(leaf.dtype)
            if self._difference(evaluate, probed, count):
                found.append(Watched(number, value, int(_counts(leaf, value)[0])))
        return tuple(found)

    def _probes(
        self, leaves: list[Any], first: int, values: Sequence[float]
    ) -> Iterator[tuple[int, float]]:
        """The values that tensors with samples can have, by the number of the tensor."""
        for number, leaf in enumerate(leaves[first:], first):
            if not self.job.batched_leaves[number]:
                continue
            for value in values:
                if leaf.is_floating_point() or (
                    not math.isnan(value)
                    and not leaf.is_complex()
                    and float(torch.tensor(int(value)).to(leaf.dtype)) == value
                ):
                    yield number, value


def refuse_uneven(batch: tuple[Any, Any], watched: Sequence[Watched]) -> None:
    """Raise :class:`BadModel` for a batch whose samples have not equally many watched values.

    Waits for targets that are on a GPU.
    """
    leaves = tree_leaves(batch) if watched else ()
    for own in watched:
        counts = _counts(leaves[own.leaf], own.value)
        if bool((counts != own.allowed).any()):
            raise BadModel(
                f"a sample has {int(counts[counts != own.allowed][0])} targets with the value "
                f"{own.value:g}, and samples of the example batch {own.allowed}; the loss leaves "
                "these out or gives them another weight, and divides by what is left, so parts of "
                f"a batch have another loss than the whole{_HINT}"
            )


def _counts(leaf: torch.Tensor, value: float) -> torch.Tensor:
    """How often each sample has a value."""
    return _has(leaf, value).reshape(len(leaf), -1).sum(1)


def _has(leaf: torch.Tensor, value: float) -> torch.Tensor:
    return leaf.isnan() if math.isnan(value) else leaf == value


def _loss(evaluate: Evaluate, leaves: list[Any], part: range) -> torch.Tensor | None:
    """The loss of some samples; None if the loss function raises."""
    try:
        return evaluate(leaves, part)
    except Exception:  # results whose first dimension is not that of samples, labels out of range
        return None


def _has_rows(leaf: Any, count: int) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == count


def _on_cpu(leaf: Any) -> Any:
    return leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf


def _taken(
    output: Any, index: torch.Tensor, count: int, factors: torch.Tensor | None = None
) -> Any:
    """Rows of the tensors that have one for each of ``count`` samples, times factors."""

    def rows(leaf: Any) -> Any:
        if not _has_rows(leaf, count):
            return leaf
        own = leaf[index]
        if factors is None or not own.is_floating_point():
            return own
        return own * factors.to(own.dtype).view(-1, *[1] * (own.dim() - 1))

    return tree_map(rows, output)
