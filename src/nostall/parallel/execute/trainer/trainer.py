"""A plan in the user's own loop: passes, clipping, checkpoints and samples of one rank."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from nostall.parallel.errors import BadCheckpoint, BadModel
from nostall.parallel.execute.parts.captured_steps import CapturedSteps
from nostall.parallel.execute.parts.computation import Computation
from nostall.parallel.execute.parts.part import Part
from nostall.parallel.execute.trainer import checkpoints
from nostall.parallel.execute.trainer.checkpoints import GENERATORS, MODEL, OPTIMIZER
from nostall.parallel.execute.trainer.named_state import NamedParameters
from nostall.parallel.execute.trainer.sampler import OwnSampler
from nostall.parallel.module.job import count_samples, to_device
from nostall.parallel.module.loss_parts import Watched, refuse_uneven
from nostall.parallel.slices import OwnSamples

_COUNTS = "trainer"
"""Key of the trainer's counts in a checkpoint."""
_EPSILON = 1e-6
"""That of ``torch.nn.utils.clip_grad_norm_``."""
_SUMMED = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
"""Types in which squares of values of shorter types are summed."""


class Trainer:
    """One rank of a training by a plan; ``nostall.parallel.build`` makes it.

    All ranks call the same methods in the same order.  A batch is (inputs, targets) as in the job,
    with the rank's own samples only: those of :meth:`own_samples`, which :meth:`sampler` gives.
    """

    optimizer: torch.optim.Optimizer
    """The optimiser of the rank's parameters; schedulers of learning rates take it."""
    samples: int
    """Samples of a whole batch."""
    steps: int
    """Steps of the optimiser so far."""
    passes: int
    """Calls of :meth:`forward_backward` so far."""

    def __init__(
        self,
        computation: Computation,
        part: Part,
        named: NamedParameters,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        seed: int,
        watched: Sequence[Watched] = (),
    ) -> None:
        """Users call :func:`nostall.parallel.build`."""
        self._watched = watched
        self._computation, self._part, self._named = computation, part, named
        self._device, self._seed = device, seed
        self.optimizer, self.samples = optimizer, part.samples
        self.steps = self.passes = 0
        self._is_training = True
        self._steps: Part | CapturedSteps = part
        self._has_kept = False
        """Whether gradients of passes without a reduction are kept."""
        optimizer.register_step_pre_hook(lambda *_: self._check_reduced())
        optimizer.register_step_post_hook(self._count_step)
        self._unread = _unread(computation.job.module, part)
        self._own: dict[int, OwnSamples] = {}
        self._frozen = {n for n, p in part.parameters.items() if not p.requires_grad}

    @property
    def engine(self) -> str:
        """Name of the engine that runs the plan."""
        return self._part.engine

    @property
    def notes(self) -> list[str]:
        """What is not compiled or not captured, with the reason."""
        return list(self._part.notes)

    def compile(self) -> Trainer:
        """Let Inductor compile what this rank computes between collectives; returns the trainer.

        Call it on all ranks, before the first pass.
        """
        if isinstance(self._steps, CapturedSteps):
            raise BadModel("compile() after capture() would not reach the graph; call it before")
        self._part.compile()
        return self

    def capture(self) -> Trainer:
        """Capture passes of whole batches of the plan as one CUDA graph; returns the trainer.

        The first pass runs its batch several times before.  Where steps cannot be captured, they
        are launched operator by operator, and :attr:`notes` has the reason.  Call it on all ranks.
        """
        if self._has_kept and not isinstance(self._steps, CapturedSteps):
            raise BadModel(
                "capture() after a pass with reduce=False would lose the gradients that are kept; "
                "call it before the first pass, or after a pass with reduce=True"
            )
        if not isinstance(self._steps, CapturedSteps):
            self._steps = CapturedSteps(self._part, self._device)
        return self

    def own_samples(self, samples: int | None = None) -> list[int]:
        """The places in a whole batch of the samples that this rank reads; none if it reads none.

        ``samples`` is the size of the whole batch, if it is another one than the plan's.  Raises
        :class:`BadPlan` if the plan cannot run a batch of that size.
        """
        return self._own_of(self.samples if samples is None else samples).indices

    def forward_backward(
        self,
        batch: Any,
        *,
        scale: float = 1.0,
        samples: int | None = None,
        reduce: bool = True,
    ) -> torch.Tensor:
        """Forward and backward pass; adds ``scale`` times the gradients to ``.grad``.

        Returns the loss of the whole batch without ``scale``, a scalar that is equal on all ranks.
        ``samples`` is the size of the whole batch, if it is another one than the plan's (the last
        one of an epoch may be).  For an accumulation over n batches, give ``scale=1/n``, and
        ``reduce=False`` for all but the last: the rank then keeps its own part of the gradients,
        whole ones also of sharded parameters, until a pass with ``reduce`` sums them over ranks.
        """
        if not self._is_training:
            raise BadModel(
                "forward_backward in eval mode; call train() before, or evaluate() for the loss"
            )
        self._check_frozen()
        size = self.samples if samples is None else samples
        inputs, targets = self._own_batch(batch, size)
        parameters = list(self._part.parameters.values())
        before = [p.grad for p in parameters]
        before = [g.clone() if g is not None and self._overwrites(g) else g for g in before]
        for parameter in parameters:
            parameter.grad = None
        with torch.enable_grad(), self._random_numbers("train"):
            loss = self._steps.step(inputs, targets, size, scale=scale, reduce=reduce)
        for parameter in parameters:
            if not parameter.requires_grad:  # frozen since; a traced step computes its gradient
                parameter.grad = None
        _add_gradients(parameters, before)
        self._has_kept = not reduce
        self.passes += 1
        return self._sum_over_ranks(loss)

    def step(
        self, batch: Any, *, max_norm: float | None = None, samples: int | None = None
    ) -> torch.Tensor:
        """Both passes, clipping to ``max_norm`` if given, a step of the optimiser, cleared
        gradients; returns the loss of the whole batch."""
        loss = self.forward_backward(batch, samples=samples)
        if max_norm is not None:
            self.clip_grad_norm_(max_norm)
        self.optimizer.step()
        self.zero_grad()
        return loss

    def evaluate(self, batch: Any, *, samples: int | None = None) -> torch.Tensor:
        """The loss of the whole batch by the forward pass alone, in the mode that is set.

        Raises :class:`BadPlan` if the plan does not fit the module in eval mode.
        """
        size = self.samples if samples is None else samples
        inputs, targets = self._own_batch(batch, size)
        with self._random_numbers("evaluate"):
            loss = self._part.evaluate(inputs, targets, size, is_training=self._is_training)
        loss = loss.detach().to(torch.float64)
        dist.all_reduce(loss)
        return loss

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip as ``torch.nn.utils.clip_grad_norm_`` does, by the norm over all ranks' gradients.

        Returns that norm before clipping; a tied weight counts once.
        """
        self._check_reduced()
        part = self._part
        total = _total_norm(part.parameters, part.counted, float(norm_type), self._device)
        _clip(part.parameters, max_norm, total)
        return total

    def zero_grad(self) -> None:
        """Clear the gradients, also those that are not reduced or that no optimiser steps.

        Raises :class:`BadModel` for FSDP2 after a pass with ``reduce=False``.
        """
        if self._has_kept:
            self._steps.drop_kept()
            self._has_kept = False
        for parameter in self._part.parameters.values():
            parameter.grad = None

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """The parameters that this rank holds; a shard is the local part of one."""
        return iter(self._part.parameters.values())

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The same with their names in the job's module."""
        return iter(self._part.parameters.items())

    def train(self, mode: bool = True) -> Trainer:
        """Set training mode: the mode in which each submodule was when the trainer was built."""
        self._is_training = mode
        return self

    def eval(self) -> Trainer:
        """Set eval mode, in which :meth:`evaluate` runs all submodules in eval mode."""
        return self.train(False)

    def sampler(
        self, size: int, *, shuffle: bool = True, seed: int = 0, drop_last: bool = True
    ) -> OwnSampler:
        """Sampler of this rank's own samples of a data set of ``size`` samples."""
        return OwnSampler(
            size, self.samples, self.own_samples, lambda: self.passes,
            shuffle=shuffle, seed=seed, drop_last=drop_last,
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Model, optimiser and counts by full names, for ``torch.distributed.checkpoint``.

        It has what this rank holds, shards as DTensors, over the memory in use.  Before its first
        step, an optimiser gets the state that such a step creates, with zeros, so that DCP can load
        into it.
        """
        with self._with_optimizer_state():
            optimizer = self._named.optimizer_state(self.optimizer)
        return {MODEL: self._model_state(), OPTIMIZER: optimizer, _COUNTS: self._counts()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state with the entries of :meth:`state_dict`, of any plan."""
        own = self._model_state()
        for name, tensor in own.items():
            if name not in state[MODEL]:
                raise BadCheckpoint(f"the state is of another model: it has no {name}")
            with torch.no_grad():
                tensor.copy_(state[MODEL][name])
        self._named.load_optimizer(self.optimizer, state[OPTIMIZER])
        counts = state[_COUNTS]
        self.steps, self.passes = int(counts["steps"]), int(counts["passes"])
        self._seed = int(counts["seed"])

    def save(self, folder: str | Path, **others: Stateful) -> Path:
        """Write a checkpoint into a subfolder named by :attr:`steps`, and return its path.

        It has the model, the optimiser, the counts, torch's default generators of each rank, and
        ``others``, such as a scheduler and a sampler, but no gradients: save after a step of the
        optimiser.  All ranks see the folder.  A process that is killed meanwhile leaves
        the older checkpoints as they were.  Raises :class:`BadCheckpoint` if it cannot be written,
        or if an entry of ``others`` has another value on another rank: DCP writes one of them.
        """
        path = checkpoints.checkpoint_folder(Path(folder), self.steps)
        _check_names(others)
        states = {key: own.state_dict() for key, own in others.items()}
        checkpoints.check_same(states)
        optimizer = self._named.optimizer_state(self.optimizer)
        state = {MODEL: self._model_state(), OPTIMIZER: optimizer, _COUNTS: self._counts(),
                 GENERATORS: checkpoints.generator_states(self._device)}  # fmt: skip
        checkpoints.save(path, state | states)
        return path

    def load(self, folder: str | Path, **others: Stateful) -> Path | None:
        """Load the latest complete checkpoint of :meth:`save` in a folder, or a given one.

        Returns its path, or None without a change if there is none.  On another number of
        processes, generators stay as they are.  Raises :class:`BadCheckpoint` if it is of another
        model, or lacks one of ``others``.
        """
        path = self._same_on_all_ranks(Path(folder))
        if path is None:
            return None
        _check_names(others)
        metadata = checkpoints.read_metadata(path)
        model = self._model_state()
        checkpoints.check_model(path, metadata, model, list(self._module_names()))
        options = self._named.optimizer_state(self.optimizer)["param_groups"]
        optimizer = checkpoints.optimizer_template(metadata, self._named, options)
        saved = metadata.state_dict_metadata
        generators = {
            key: value
            for key, value in checkpoints.generator_states(self._device).items()
            if f"{GENERATORS}.{key}" in saved
        }
        state = {MODEL: model, OPTIMIZER: optimizer, _COUNTS: self._counts(),
                 GENERATORS: generators}  # fmt: skip
        for key, own in others.items():
            if not any(name.startswith(f"{key}.") for name in saved):
                raise BadCheckpoint(
                    f"{path} has no {key}; it was saved without it: leave {key} out of load()"
                )
            state[key] = own.state_dict()
        checkpoints.load(path, state)
        self.load_state_dict(state)
        for key, own in others.items():
            own.load_state_dict(state[key])
        checkpoints.restore_generators(generators, self._device)
        return path

    def close(self) -> None:
        """Destroy the plan's CUDA graph and process groups; the default group stays.

        Call it before the default group ends, too: NCCL waits for graphs that use it.
        """
        if isinstance(self._steps, CapturedSteps):
            self._steps.close()
        self._part.close()

    def _overwrites(self, gradient: torch.Tensor) -> bool:
        """Whether the next pass overwrites a gradient's memory."""
        if isinstance(self._steps, CapturedSteps):
            return self._steps.overwrites(gradient)
        return self._part.overwrites_gradients

    def _own_of(self, samples: int) -> OwnSamples:
        if samples not in self._own:
            self._own[samples] = self._part.own(samples)
        return self._own[samples]

    def _own_batch(self, batch: Any, samples: int) -> tuple[Any, Any]:
        """The rank's part of a batch, checked and on the device."""
        job, own = self._computation.job, self._own_of(samples)
        if len(own) == 0:  # nothing of it is read
            inputs, targets = job.inputs, job.targets
        else:
            inputs, targets = _as_pair(batch)
            if isinstance(inputs, torch.Tensor) and len(job.inputs) == 1:
                inputs = (inputs,)
            inputs, targets = _ordered(inputs, job.inputs), _ordered(targets, job.targets)
            found = count_samples((inputs, targets))
            if found != len(own):
                raise BadModel(
                    f"rank {dist.get_rank()} got a batch of {found} samples and reads {len(own)} "
                    f"of a whole batch of {samples}; give those of own_samples() (a DataLoader "
                    "with batch_sampler=trainer.sampler(...) does), and samples=N for a whole "
                    "batch of another size"
                )
            if samples > self._part.loss_samples:
                refuse_uneven((inputs, targets), self._watched)
        batch = self._computation.cast(inputs), targets
        if self._part.is_traced:
            self._computation.traced.check_batch(batch)
        inputs, targets = to_device(batch, self._device)
        return inputs, targets

    def _sum_over_ranks(self, loss: torch.Tensor) -> torch.Tensor:
        total = loss.detach().to(torch.float64)
        if not (isinstance(self._steps, CapturedSteps) and self._steps.has_whole_loss):
            dist.all_reduce(total)
        return total

    @contextmanager
    def _random_numbers(self, use: str) -> Iterator[None]:
        """Let a pass draw numbers that depend on seed, pass and rank, and keep the generators.

        A resumed run then draws the same numbers as one that was not interrupted.
        """
        if not self._part.random_operators:
            yield
            return
        text = f"{use} {self._seed} {self.passes} {dist.get_rank()}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            yield

    @contextmanager
    def _with_optimizer_state(self) -> Iterator[None]:
        """Let an optimiser that has not stepped have a state of zeros, for a moment."""
        optimizer, steps, has_kept = self.optimizer, self.steps, self._has_kept
        rates = [group.get("lr") for group in optimizer.param_groups]
        if optimizer.state or None in rates:
            yield
            return
        own = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in own]
        try:
            for group in optimizer.param_groups:
                group["lr"] = 0.0 * group["lr"]
            for parameter in own:
                parameter.grad = torch.zeros_like(parameter)
            self._has_kept = False
            type(optimizer).step(optimizer)
            for state in optimizer.state.values():
                if isinstance(state.get("step"), torch.Tensor):
                    state["step"].zero_()
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            yield
        finally:
            self.steps, self._has_kept = steps, has_kept
            for parameter, gradient in zip(own, gradients, strict=True):
                parameter.grad = gradient
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            optimizer.state.clear()

    def _model_state(self) -> dict[str, torch.Tensor]:
        return self._named.model_state(self._computation.job.module, self._unread)

    def _module_names(self) -> Iterable[str]:
        names: dict[str, Any] = self._computation.job.module.state_dict(keep_vars=True)
        return names.keys()

    def _counts(self) -> dict[str, int]:
        return {"steps": self.steps, "passes": self.passes, "seed": self._seed}

    def _check_frozen(self) -> None:
        trainable = [n for n in self._frozen if self._part.parameters[n].requires_grad]
        if trainable:
            raise BadModel(
                f"{min(trainable)} was frozen when the trainer was built, so steps do not compute "
                "its gradient; build with it trainable, and let the optimizer function leave it "
                "out until trainer.optimizer.add_param_group"
            )

    def _check_reduced(self) -> None:
        if self._has_kept:
            raise BadModel(
                "the last pass had reduce=False, so the gradients are not yet summed over ranks; "
                "give reduce=True to the last pass of an accumulation"
            )

    def _count_step(self, *_: Any) -> None:
        self.steps += 1

    def _same_on_all_ranks(self, folder: Path) -> Path | None:
        """The checkpoint that rank 0 finds: another rank may see a file system later."""
        found: list[Any] = [None]
        if dist.get_rank() == 0:
            is_one = (folder / checkpoints.METADATA).exists()
            found = [folder if is_one else checkpoints.latest_checkpoint(folder)]
        dist.broadcast_object_list(found, 0, device=self._device)
        path: Path | None = found[0]
        return path


def _as_pair(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        raise BadModel(
            f"a batch is a {type(batch).__name__}; allowed is a pair (inputs, targets), as in the "
            "job"
        )
    return batch[0], batch[1]


def _ordered(given: Any, example: Any) -> Any:
    """Named values in the order of those of the job, in which the traced step reads them."""
    if not isinstance(example, Mapping):
        return given
    names = set(given) if isinstance(given, Mapping) else set()
    if names != set(example):
        raise BadModel(
            f"a batch has the names {sorted(map(str, names))[:8]}; allowed are those of the job, "
            f"{sorted(map(str, example))[:8]}"
        )
    return {name: given[name] for name in example}


def _check_names(others: Mapping[str, Any]) -> None:
    for name in (MODEL, OPTIMIZER, _COUNTS, GENERATORS):
        if name in others:
            raise BadCheckpoint(f"{name} is part of each checkpoint; name the other object anew")


def _unread(module: torch.nn.Module, part: Part) -> list[str]:
    """The parameters that no rank holds, under all of their names; a collective call."""
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, list(part.parameters))
    known = {id(module.get_parameter(name)) for own in held for name in own}
    return [
        name for name, p in module.named_parameters(remove_duplicate=False) if id(p) not in known
    ]


def _add_gradients(parameters: list[torch.nn.Parameter], before: list[torch.Tensor | None]) -> None:
    """Add the new gradients to those before."""
    pairs = [(old, p) for old, p in zip(before, parameters, strict=True) if old is not None]
    both = [(old, p.grad) for old, p in pairs if p.grad is not None]
    if both:
        torch._foreach_add_([old for old, _ in both], [new for _, new in both])
    for old, parameter in pairs:
        parameter.grad = old


def _total_norm(
    parameters: Mapping[str, torch.nn.Parameter],
    counted: Collection[str],
    norm_type: float,
    device: torch.device,
) -> torch.Tensor:
    """The norm of the gradients of all ranks' parameters, equal on all ranks; a collective call.

    ``counted`` are the names of those that this rank counts: one rank counts a replica, a tied
    weight or a shard.
    """
    own = [p for name, p in parameters.items() if name in counted]
    norms = [
        norm.to(device, torch.float64)
        for dtype, gradients in _gradients(own).items()
        for norm in torch._foreach_norm(gradients, norm_type, _SUMMED.get(dtype))
    ]
    values = torch.stack(norms) if norms else torch.zeros(0, dtype=torch.float64, device=device)
    if norm_type == float("inf"):
        total = values.max() if norms else values.new_zeros(())
        dist.all_reduce(total, op=dist.ReduceOp.MAX)
        return total
    total = values.pow(norm_type).sum()
    dist.all_reduce(total)
    return total.pow(1 / norm_type)


def _clip(
    parameters: Mapping[str, torch.nn.Parameter], max_norm: float, total: torch.Tensor
) -> None:
    """Scale the gradients as ``torch.nn.utils.clip_grad_norm_`` does, for a norm of ``total``."""
    factor = torch.clamp(max_norm / (total + _EPSILON), max=1.0)
    for dtype, gradients in _gradients(parameters.values()).items():
        torch._foreach_mul_(gradients, factor.to(dtype))


def _gradients(
    parameters: Iterable[torch.nn.Parameter],
) -> dict[torch.dtype, list[torch.Tensor]]:
    """The gradients that there are, as local tensors by element type."""
    found: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor):  # FSDP2's; each rank has a shard, perhaps an empty one
            gradient = gradient.to_local()
        if gradient is not None and gradient.numel():
            found.setdefault(gradient.dtype, []).append(gradient)
    return found
