"""Training jobs: a module, an example batch and a loss, built by a function of the user's.

``path.py:build`` names a function without arguments that returns a :class:`Job` or the tuple
``(module, inputs, targets, loss)``.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from nostall.core.errors import MissingPart
from nostall.parallel.errors import BadModel

try:
    import torch
    from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
except ImportError as error:
    raise MissingPart(
        "modules need PyTorch, which is missing; pip install 'nostall[torch]'"
    ) from error

_GRADIENT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Attributes of a tensor with the functions that run when its gradient is computed."""
SEED = 0
"""torch's seed when ``build`` is called, so that every process builds the same parameters."""


@dataclass(frozen=True, eq=False)
class Job:
    """One training job.

    A tensor of the batch whose first dimension is as long as that of the first tensor is sliced by
    samples; all other values are passed unchanged to every replica.  Raises :class:`BadModel` if a
    field has a wrong type, the example batch has no samples, or a module computes its statistics
    over the batch, as BatchNorm in training mode does.
    """

    module: torch.nn.Module
    inputs: Sequence[Any] | Mapping[str, Any]
    """Arguments of the module: positional for a sequence, by name for a mapping."""
    targets: Any
    """Second argument of the loss."""
    loss: Callable[[Any, Any], torch.Tensor]
    """Function of (output, targets) that returns a scalar."""
    reduction: Literal["mean", "sum"] = "mean"
    """Whether the loss is a mean or a sum over samples."""
    batches: Callable[..., tuple[Any, Any]] | None = None
    """Function of the iteration's number that returns (inputs, targets) of the whole iteration, or
    of that number and a list of places in the iteration, with the samples of these places only:
    each rank then reads its own.  None repeats the example batch."""
    optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer] | None = None
    """Function that creates the optimiser of some parameters; None for SGD with rate 0.01."""

    def __post_init__(self) -> None:
        if not isinstance(self.module, torch.nn.Module):
            raise BadModel(
                f"the module is a {type(self.module).__name__}; allowed is a torch.nn.Module; "
                "return Job(module, inputs, targets, loss)"
            )
        if not isinstance(self.inputs, Mapping | list | tuple):
            raise BadModel(
                f"the inputs are a {type(self.inputs).__name__}; allowed is a tuple of arguments "
                "or a dict of named ones; write (x,) for one tensor"
            )
        if not callable(self.loss):
            raise BadModel(
                f"the loss is a {type(self.loss).__name__}; allowed is a function of (output, "
                "targets), for example torch.nn.functional.cross_entropy"
            )
        _ = self.samples
        for name, part in self.module.named_modules():
            if _has_batch_statistics(part):
                raise BadModel(
                    f"{name} is a {type(part).__name__} that takes its statistics from the batch: "
                    "over slices of a micro-batch they differ from those of the whole; put it "
                    "into eval mode, or use GroupNorm or LayerNorm"
                )
        for name, parameter in self.module.named_parameters():
            if any(getattr(parameter, hooks, None) for hooks in _GRADIENT_HOOKS):
                raise BadModel(
                    f"the parameter {name} has a gradient hook, which would see the gradients of "
                    "micro-batches or shards, or would not run; change gradients in the optimiser "
                    "(Job's optimizer) instead"
                )

    @property
    def samples(self) -> int:
        """Number of samples of the example batch."""
        return count_samples((self.inputs, self.targets))

    def run(
        self, inputs: Any, targets: Any, module: Callable[..., Any] | None = None
    ) -> torch.Tensor:
        """Loss of one forward pass of the module, or of ``module`` in its place."""
        module = self.module if module is None else module
        output = module(**inputs) if isinstance(inputs, Mapping) else module(*inputs)
        return self.loss(output, targets)

    def batch(self, step: int, samples: int) -> tuple[Any, Any]:
        """Inputs and targets of an iteration of ``samples`` samples.

        Raises :class:`BadModel` if ``batches`` returns another number of samples.
        """
        if self.batches is None:
            return self.example_batch(samples)
        if self._takes_places:
            return self.own_batch(step, samples, range(samples))
        inputs, targets = self.batches(step)
        actual = count_samples((inputs, targets))
        if actual != samples:
            raise BadModel(
                f"batches({step}) has {actual} samples; allowed is {samples}, the plan's global "
                "batch; plan with --global-batch as large as the batches are"
            )
        return inputs, targets

    def own_batch(self, step: int, samples: int, places: Sequence[int]) -> tuple[Any, Any]:
        """The samples at some places of an iteration of ``samples`` samples.

        Only these are made, unless ``batches`` knows whole iterations only.
        """
        if self.batches is None or (not places and all(self.batched_leaves)):
            numbers = torch.tensor(list(places), dtype=torch.long)
            return self.take((self.inputs, self.targets), numbers % self.samples)
        if not self._takes_places:
            return self.take(self.batch(step, samples), torch.tensor(list(places)).long())
        # Without places of its own, a rank reads what has no samples beside one sample.
        asked = list(places) or [0]
        found = self.batches(step, asked)
        actual = count_samples(found)
        if actual != len(asked):
            raise BadModel(
                f"batches({step}, places) has {actual} samples for {len(asked)} places; return one "
                "sample for each place"
            )
        return self.take(found, slice(len(places)))

    @cached_property
    def _takes_places(self) -> bool:
        """Whether ``batches`` needs a second argument."""
        try:
            given = inspect.signature(self.batches).parameters if self.batches else {}
        except (TypeError, ValueError):  # a function of C
            return False
        return (
            sum(
                p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
                for p in given.values()
            )
            > 1
        )

    def example_batch(self, samples: int) -> tuple[Any, Any]:
        """Inputs and targets of the example batch, repeated or truncated to ``samples`` samples."""
        indices = torch.arange(samples) % self.samples
        return self.take((self.inputs, self.targets), indices)

    @cached_property
    def batched_leaves(self) -> tuple[bool, ...]:
        """For each leaf of (inputs, targets), whether its first dimension counts samples."""
        leaves = tree_leaves((self.inputs, self.targets))
        return tuple(
            isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == self.samples
            for leaf in leaves
        )

    def take(self, batch: tuple[Any, Any], index: Any) -> tuple[Any, Any]:
        """The samples of a batch at an index: a slice, or numbers of samples.

        Raises :class:`BadModel` if the batch has another structure than the example batch.
        """
        leaves, structure = tree_flatten(batch)
        self._check_count(leaves)
        taken = [
            leaf[index] if is_batched else leaf
            for leaf, is_batched in zip(leaves, self.batched_leaves, strict=True)
        ]
        inputs, targets = tree_unflatten(taken, structure)
        return inputs, targets

    def check_batch(self, batch: tuple[Any, Any]) -> None:
        """Raise :class:`BadModel` unless a batch has the types, shapes and values in Python of the
        example batch, which a traced step keeps; the number of samples may be another one."""
        leaves = tree_leaves(batch)
        self._check_count(leaves)
        examples = tree_leaves((self.inputs, self.targets))
        for n, pair in enumerate(zip(leaves, examples, self.batched_leaves, strict=True)):
            leaf, example, is_batched = pair
            found, expected = (_described(value, is_batched) for value in (leaf, example))
            if found != expected:
                raise BadModel(
                    f"value {n} of (inputs, targets) is {found} and in the job {expected}; the "
                    "step was traced with the latter: pad batches to one shape, and build a "
                    "trainer for each other shape, type or value"
                )

    def _check_count(self, leaves: Sequence[Any]) -> None:
        if len(leaves) != len(self.batched_leaves):
            raise BadModel(
                f"a batch has {len(leaves)} values and the example batch has "
                f"{len(self.batched_leaves)}; give (inputs, targets) as in the job"
            )


def count_samples(values: Any) -> int:
    """Size of the first dimension of the first tensor that has dimensions."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return int(leaf.shape[0])
    raise BadModel(
        "the example batch has no tensor with samples; give the module's inputs with the samples "
        "in their first dimension"
    )


def _described(value: Any, is_batched: bool) -> str:
    """What a traced step keeps of a value: the shape of a sample and the type, or a plain value."""
    if isinstance(value, torch.Tensor):
        samples, shape = ("samples of " if is_batched else ""), tuple(value.shape[is_batched:])
        return f"a tensor of {samples}shape {shape} in {value.dtype}"
    is_plain = isinstance(value, bool | int | float | complex | str | bytes | None)
    return f"{value!r:.80}" if is_plain else f"a {type(value).__name__}"


def to_device(values: Any, device: torch.device) -> Any:
    """Move the tensors among the values to a device; other values stay the same."""

    def move(leaf: Any) -> Any:
        return leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf

    return tree_map(move, values)


def _has_batch_statistics(part: torch.nn.Module) -> bool:
    if not isinstance(part, torch.nn.modules.batchnorm._NormBase):
        return False
    if isinstance(part, torch.nn.modules.instancenorm._InstanceNorm):
        return bool(part.training and part.track_running_stats)
    return bool(part.training or not part.track_running_stats)


def load_job(target: str) -> Job:
    """Import ``path.py:function`` and call the function to build a job.

    Raises :class:`BadModel` if the file or function does not exist, fails, or returns something
    else, and :class:`MissingPart` if the file imports a package that is not installed.
    """
    path, colon, name = target.rpartition(":")
    if not colon or not path.endswith(".py") or not name.isidentifier():
        raise BadModel(f"{target!r} names no module; write path.py:build")
    build = getattr(_import_file(Path(path)), name, None)
    if not callable(build):
        raise BadModel(f"{path} has no function {name}; write path.py:FUNCTION")
    torch.manual_seed(SEED)
    try:
        job = build()
    except BadModel:
        raise
    except Exception as error:  # the user's function may raise any error
        raise BadModel(f"{target} failed: {type(error).__name__}: {error}; correct it") from error
    if isinstance(job, tuple) and len(job) == 4:
        job = Job(*job)
    if not isinstance(job, Job):
        raise BadModel(
            f"{target} returned a {type(job).__name__}; allowed is a nostall.parallel.module.Job "
            "or the tuple (module, inputs, targets, loss)"
        )
    return job


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise BadModel(f"cannot read {path}: there is no such file; give a Python file")
    name = f"nostall_job_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise BadModel(f"cannot import {path}; give a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise MissingPart(f"{path} needs {error.name or error}; install it") from error
    except Exception as error:  # the user's file may raise any error
        raise BadModel(f"{path} failed: {type(error).__name__}: {error}; correct it") from error
    finally:
        sys.path.pop(0)
    return module
