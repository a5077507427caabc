"""What a user hands over: a module, an example batch, and a loss.

``path.py:build`` names a function without arguments that returns a :class:`Job`, or the tuple
``(module, inputs, targets, loss)``.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nostall.core.errors import MissingPart
from nostall.parallel.errors import BadModel

try:
    import torch
    from torch.utils._pytree import tree_leaves, tree_map
except ImportError as error:
    raise MissingPart(
        "modules need PyTorch, which is missing; pip install 'nostall[torch]'"
    ) from error

SEED = 0
"""Set before ``build`` is called, so that every process builds the same parameters."""


@dataclass(frozen=True, eq=False)
class Job:
    """One training job.

    ``inputs`` are the positional (sequence) or named (mapping) arguments of the module,
    ``targets`` whatever ``loss(output, targets)`` wants; tensors whose first dimension has as many
    entries as that of the first tensor are cut into samples, all others are given whole.  The loss
    is a scalar, a mean over samples (``reduction="mean"``) or a sum.  ``batches(step)`` gives
    (inputs, targets) of a whole iteration; without it the example is repeated.
    ``optimizer(parameters)`` makes the optimiser; without it SGD with a rate of 0.01.
    """

    module: torch.nn.Module
    inputs: Sequence[Any] | Mapping[str, Any]
    targets: Any
    loss: Callable[[Any, Any], torch.Tensor]
    reduction: Literal["mean", "sum"] = "mean"
    batches: Callable[[int], tuple[Any, Any]] | None = None
    optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer] | None = None

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
            if _batch_statistics(part):
                raise BadModel(
                    f"{name} is a {type(part).__name__} that takes its statistics from the batch: "
                    "over slices of a micro-batch they differ from those of the whole; put it "
                    "into eval mode, or use GroupNorm or LayerNorm"
                )

    @property
    def samples(self) -> int:
        """Samples of the example."""
        return samples_of((self.inputs, self.targets))

    def batch(self, step: int, samples: int) -> tuple[Any, Any]:
        """(inputs, targets) of an iteration, with exactly that many samples."""
        if self.batches is None:
            return self.sized(samples)
        inputs, targets = self.batches(step)
        found = samples_of((inputs, targets))
        if found != samples:
            raise BadModel(
                f"batches({step}) has {found} samples; allowed is {samples}, the plan's global "
                "batch; plan with --global-batch as large as the batches are"
            )
        return inputs, targets

    def sized(self, samples: int) -> tuple[Any, Any]:
        """The example, repeated or shortened to that many samples."""
        pick = torch.arange(samples) % self.samples
        both = (self.inputs, self.targets)
        sized: tuple[Any, Any] = _mapped(both, self.samples, lambda tensor: tensor[pick])
        return sized


def samples_of(values: Any) -> int:
    """Entries of the first dimension of the first tensor that has one."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return int(leaf.shape[0])
    raise BadModel(
        "the example batch has no tensor with samples; give the module's inputs with the samples "
        "in their first dimension"
    )


def part_of(values: Any, samples: int, first: int, end: int) -> Any:
    """Samples ``first`` to ``end`` of values that have ``samples`` of them."""
    return _mapped(values, samples, lambda tensor: tensor[first:end])


def on_device(values: Any, device: torch.device) -> Any:
    """The tensors among the values on a device; everything else as it is."""

    def move(leaf: Any) -> Any:
        return leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf

    return tree_map(move, values)


def _mapped(values: Any, samples: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    def one(leaf: Any) -> Any:
        batched = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == samples
        return change(leaf) if batched else leaf

    return tree_map(one, values)


def _batch_statistics(part: torch.nn.Module) -> bool:
    if not isinstance(part, torch.nn.modules.batchnorm._NormBase):
        return False
    if isinstance(part, torch.nn.modules.instancenorm._InstanceNorm):
        return bool(part.training and part.track_running_stats)
    return bool(part.training or not part.track_running_stats)


def load_job(target: str) -> Job:
    """The job that ``path.py:function`` returns.

    Raises :class:`BadModel` for a file or a function that is not there or does not return a job.
    """
    path, colon, name = target.rpartition(":")
    if not colon or not path.endswith(".py") or not name.isidentifier():
        raise BadModel(f"{target!r} names no module; write path.py:build")
    build = getattr(_imported(Path(path)), name, None)
    if not callable(build):
        raise BadModel(f"{path} has no function {name}; write path.py:FUNCTION")
    torch.manual_seed(SEED)
    try:
        made = build()
    except BadModel:
        raise
    except Exception as error:  # the user's own code
        raise BadModel(f"{target} failed: {type(error).__name__}: {error}; correct it") from error
    if isinstance(made, tuple) and len(made) == 4:
        made = Job(*made)
    if not isinstance(made, Job):
        raise BadModel(
            f"{target} returned a {type(made).__name__}; allowed is a nostall.parallel.module.Job "
            "or the tuple (module, inputs, targets, loss)"
        )
    return made


def _imported(path: Path) -> Any:
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
    except Exception as error:  # the user's own code
        raise BadModel(f"{path} failed: {type(error).__name__}: {error}; correct it") from error
    finally:
        sys.path.pop(0)
    return module
