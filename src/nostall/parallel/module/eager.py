"""Comparison of a model's traced layers with its module: are the gradients those of training?

``torch.export`` traces the forward pass alone.  The backward pass of a custom autograd function,
hooks on tensors and activation checkpointing are not in the trace, and neither is what a module
does differently in its next pass.  So both run on one batch with one seed: the module twice, which
shows the differences that the device itself causes, then the traced layers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nostall.core.errors import NostallError, one_line
from nostall.parallel.errors import BadModel
from nostall.parallel.module.effects import PythonState, refuse_changed_state, refuse_sparse
from nostall.parallel.module.job import SEED, Job, to_device
from nostall.parallel.module.layering import Granularity
from nostall.parallel.module.loss_parts import (
    MIN_TOLERANCE,
    SMALLEST,
    Found,
    compare_parts,
    preserved,
)
from nostall.parallel.module.model import Model
from nostall.parallel.module.precision import tolerance

_CPU = torch.device("cpu")
SAMPLES = 2
"""Samples of a comparison before a plan whose layers are not measured."""
_STANCES = ("force_eager", "default")
"""Stances of torch.compile: compiled blocks run as the eager code that the trace has, so that
rounding is equal; ``torch.cond`` needs the default."""
REPEATED_DIFFERENCES = 10.0
"""Allowed multiple of the difference between two equal passes of the module."""
_LARGER = 2.0**20
"""Factor of the loss of the second pass.  Gradients grow with the loss, to the last bit, unless a
hook or the backward of a custom function clips them; those of float16 would overflow."""


def compared_model(
    job: Job,
    note: Callable[[str], None],
    granularity: Granularity = "block",
    samples: int = SAMPLES,
    device: torch.device = _CPU,
) -> Model:
    """The layers of a job whose gradients are those of its module; raises as the comparison does.

    ``note`` is called with each note of :func:`compare_with_eager`.
    """
    model = Model(job, granularity)
    for sentence in compare_with_eager(model, samples, device)[0]:
        note(sentence)
    return model


def compare_with_eager(model: Model, samples: int, device: torch.device) -> Found:
    """Raise :class:`BadModel` unless the traced layers have the gradients of the module.

    Runs ``samples`` samples on the device, or on the CPU if the module does not run there.  The
    error names the first parameter whose gradient differs, or the state that a pass changes.
    Parameters, buffers and generators of random numbers stay as they are.  Returns notes on what
    the module does and the traced layers do not, although the gradients are equal, and what to look
    for in the targets of later batches.
    """
    attempts = list(itertools.product(dict.fromkeys((device, _CPU)), _STANCES))
    for attempt in attempts:
        try:
            return _Comparison(model, samples, *attempt).run()
        except NostallError:
            raise
        except Exception as error:  # the user's code raises errors of any class
            # On a GPU: out of memory, or a tensor of the module's that is no buffer.
            if attempt == attempts[-1]:
                raise BadModel(
                    f"a training step of the module fails on {samples} samples: "
                    f"{one_line(error)}; correct it"
                ) from error
    raise AssertionError("the last attempt returns or raises")


class _Comparison:
    """Passes of the module and of its traced layers on one batch."""

    def __init__(self, model: Model, samples: int, device: torch.device, stance: str) -> None:
        self.model, self.job, self.device, self.stance = model, model.job, device, stance
        self.module: nn.Module = model.job.module
        self.samples = samples
        self.parameters = dict(self.module.named_parameters())

    def run(self) -> Found:
        batch = to_device(self.job.example_batch(self.samples), self.device)
        with preserved(self.module, self.device), torch.compiler.set_stance(self.stance):
            self.module.to(self.device)
            first, _ = self._eager(batch)
            if not first.keys() - {""} and any(p.requires_grad for p in self.parameters.values()):
                raise BadModel(_NOTHING_TO_TRAIN)
            before = PythonState(self.module, self.job.loss), self._tensors()
            dtype = self.model.computation_dtype
            second, repeated = self._eager(batch, 1.0 if dtype is torch.float16 else _LARGER)
            self._refuse_changes(*before)
            noise = _differences(first, second)
            for text, own in (_DIFFERS_FROM_ITSELF, [""]), (_CLIPS, noise):
                self._refuse({name: noise[name] for name in own}, tolerance(dtype), text)
            del second
            notes, watched = compare_parts(self.job, self.samples, self.device, dtype)
            traced = self._traced(batch)
        allowed = max(
            MIN_TOLERANCE,
            2 * torch.finfo(dtype).eps,
            REPEATED_DIFFERENCES * max(noise.values()),
        )
        self._refuse(_differences(first, traced), allowed, _DIFFERS_FROM_TRACE)
        return (*_notes(repeated), *notes), watched

    def _eager(self, batch: Any, factor: float = 1.0) -> tuple[dict[str, torch.Tensor], list[str]]:
        """Loss and gradients of the module, and the submodules that run again in the backward.

        The backward pass is that of ``factor`` times the loss.
        """
        repeated: list[str] = []
        is_backward = False

        def record(name: str) -> Any:
            return lambda *_: repeated.append(name) if is_backward else None

        hooks = [
            part.register_forward_pre_hook(record(name))
            for name, part in self.module.named_modules()
        ]
        try:
            torch.manual_seed(SEED)
            loss = self.job.run(*batch)
            is_backward = True
            return self._gradients(loss, factor), repeated
        finally:
            for hook in hooks:
                hook.remove()

    def _traced(self, batch: Any) -> dict[str, torch.Tensor]:
        segment = self.model.segment(0, len(self.model), self.samples, self.device)
        torch.manual_seed(SEED)
        return self._gradients(segment({}, *batch)["loss"])

    def _gradients(self, loss: torch.Tensor, factor: float = 1.0) -> dict[str, torch.Tensor]:
        """The loss and all gradients after the backward pass of ``factor`` times it, by name and
        divided by the factor; gradients that were there stay as they were.

        A loss that depends on no parameter has none.
        """
        kept = {name: parameter.grad for name, parameter in self.parameters.items()}
        for parameter in self.parameters.values():
            parameter.grad = None
        if loss.requires_grad:
            (loss * factor).backward()
        values = {"": loss.detach()}
        for name, parameter in self.parameters.items():
            gradient, parameter.grad = parameter.grad, kept[name]
            if gradient is not None:
                refuse_sparse(name, gradient)
                values[name] = gradient.detach() / factor
        return values

    def _tensors(self) -> dict[str, torch.Tensor]:
        """A copy of each buffer, and the sum of each parameter, which a pass may not change."""
        sums = {n: p.detach().sum(dtype=_sum_dtype(p)) for n, p in self.parameters.items()}
        return {**sums, **{n: b.clone() for n, b in self.module.named_buffers()}}

    def _refuse_changes(self, state: PythonState, tensors: dict[str, torch.Tensor]) -> None:
        for name, value in self._tensors().items():
            if not _is_same(value, tensors.get(name)):
                kind = "parameter" if name in self.parameters else "buffer"
                raise BadModel(
                    f"the forward pass changes the {kind} {name}; every stage and replica would "
                    "change a copy of its own, from other samples; write it without changing "
                    "tensors, or call eval() on the module that changes it"
                )
        refuse_changed_state(PythonState(self.module, self.job.loss).changed_since(state))

    def _refuse(self, differences: dict[str, float], allowed: float, text: str) -> None:
        """Raise :class:`BadModel` for the first difference that is not allowed."""
        for name, difference in differences.items():
            if not difference <= allowed:
                what = f"gradient of {name}" if name else "loss"
                raise BadModel(text.format(what=what, difference=f"{difference:.3g}"))


_NOTHING_TO_TRAIN = (
    "the loss depends on no trainable parameter; there is nothing to train (reentrant "
    "checkpointing of all layers drops their gradients: give use_reentrant=False)"
)
_DIFFERS_FROM_ITSELF = (
    "two passes of the module with the same batch and seed differ: the {what} by {difference} of "
    "its largest value; a traced step repeats what one pass did, so write the forward pass without "
    "counters and without random numbers from outside of torch"
)
_CLIPS = (
    "the {what} differs by {difference} of its largest value in a second pass with 2^20 times the "
    "loss, whose gradients are divided by that: something changes large gradients (a hook that "
    "clips, a custom autograd.Function) or differs between passes, and the traced layers do not; "
    "clip gradients of parameters instead (Trainer.clip_grad_norm_), or use --planner sharding "
    "with --mesh, which traces both passes"
)
_DIFFERS_FROM_TRACE = (
    "the {what} from the traced layers differs by {difference} of its largest value from that of "
    "the module; torch.export traces the forward pass alone and drops the backward of a custom "
    "autograd.Function, hooks on tensors and reentrant checkpointing (give use_reentrant=False); "
    "write them as operators, such as x + (f(x) - x).detach() for a straight-through f, or use "
    "--planner sharding with --mesh, which traces both passes"
)


def _notes(repeated: list[str]) -> tuple[str, ...]:
    if not repeated:
        return ()
    names = list(dict.fromkeys(name for name in repeated if name))
    return (
        f"{names[0] if names else 'the module'} runs again in the backward pass (activation "
        "checkpointing); the layers of a pipeline plan do not: their gradients are equal, and the "
        "profile counts the activations that they store",
    )


def _differences(
    expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor]
) -> dict[str, float]:
    """Largest difference of each value, divided by the value's largest entry.

    A missing gradient counts as zeros.
    """
    largest = {n: float(v.abs().max()) if v.numel() else 0.0 for n, v in expected.items()}
    floor = SMALLEST * max((size for name, size in largest.items() if name), default=0.0)
    result = {}
    for name in dict.fromkeys([*expected, *actual]):
        parts = [values[name] for values in (expected, actual) if name in values]
        if len(parts) == 2 and _is_same(*parts):
            result[name] = 0.0
            continue
        difference = parts[0] - parts[1] if len(parts) == 2 else parts[0]
        error, size = float(difference.abs().max()), max(largest.get(name, 0.0), floor)
        result[name] = error / size if size else math.inf if error else 0.0
    return result


def _is_same(value: torch.Tensor, before: torch.Tensor | None) -> bool:
    if before is None or value.shape != before.shape:
        return False
    return bool(torch.equal(torch.nan_to_num(value), torch.nan_to_num(before)))


def _sum_dtype(parameter: torch.Tensor) -> torch.dtype | None:
    return torch.float64 if parameter.is_floating_point() else None
