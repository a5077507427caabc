"""Checks of a model and a plan before a run: what a run would get wrong is refused by name."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nostall.parallel.errors import BadModel, BadPlan
from nostall.parallel.module.job import Job
from nostall.parallel.module.model import Model
from nostall.parallel.plan import Plan, Workload
from nostall.parallel.slices import Slices


def check_deterministic(random_operators: Sequence[str]) -> None:
    """Raise :class:`BadModel` if there are names of operators that draw random numbers."""
    if names := random_operators:
        raise BadModel(
            "--check compares with training in a single process, and this step draws "
            f"random numbers ({', '.join(names[:4])}), which differ between processes; call "
            "eval() on the module, set its dropout to 0, or run without --check"
        )


def check_optimizer(job: Job, *, is_sharded: bool) -> None:
    """Raise :class:`BadModel` if the optimiser's step of a parameter depends on other gradients.

    Each rank steps its own parameters, or with ``is_sharded`` its own rows of them, so clipping by
    the norm of all gradients would clip by a rank's own norm.  Small matrices with large gradients
    show it; an optimiser that does not take these is not judged.
    """
    if job.optimizer is None:
        return
    try:
        whole = _stepped(job, [(0, 1)], rows=1)
        parts = _stepped(job, [(0,), (1,)], rows=2 if is_sharded else 1)
    except Exception:  # the user's function may expect the parameters of its module
        return
    if not torch.allclose(whole, parts, rtol=1e-4, atol=0.0):
        raise BadModel(
            "the optimiser changes a value by the gradients of others (clipping by the norm of all "
            "gradients does), and each rank has the gradients of its own stage or shards only; "
            "clip each value (torch.nn.utils.clip_grad_value_), leave the clipping out, or plan "
            "with replicated parameters (--planner data-parallel)"
        )


def _stepped(job: Job, groups: Sequence[Sequence[int]], rows: int) -> torch.Tensor:
    """Two matrices after two steps; an optimiser for each group and each part of the rows."""
    assert job.optimizer is not None
    generator = torch.Generator().manual_seed(0)
    values = [100 * torch.randn(4, 4, generator=generator) for _ in range(2)]
    gradients = [1e4 * torch.randn(4, 4, generator=generator) for _ in range(2)]
    result = []
    for group in groups:
        for part in range(rows):
            own = slice(4 // rows * part, 4 // rows * (part + 1))
            parameters = [torch.nn.Parameter(values[i][own].clone()) for i in group]
            optimizer = job.optimizer(parameters)
            for step in (1.0, 0.1):
                for i, parameter in zip(group, parameters, strict=True):
                    parameter.grad = step * gradients[i][own].clone()
                try:
                    optimizer.step()
                except TypeError:  # LBFGS, which needs a closure
                    optimizer.step(lambda: torch.zeros(()))
            result += [p.detach() - values[i][own] for i, p in zip(group, parameters, strict=True)]
    return torch.cat(result)


def check_layers(model: Model, workload: Workload) -> None:
    """Raise :class:`BadPlan` unless the plan's profile has the layers of the model."""
    planned = tuple(layer.name for layer in workload.profile.layers)
    actual = model.layer_names
    if planned != actual:
        at = next(
            (i for i, (a, b) in enumerate(zip(planned, actual, strict=False)) if a != b),
            min(len(planned), len(actual)),
        )
        in_plan = planned[at] if at < len(planned) else "nothing"
        in_module = actual[at] if at < len(actual) else "nothing"
        raise BadPlan(
            f"the plan is for {len(planned)} layers and the module has {len(actual)}; the "
            f"first difference is layer {at}: {in_plan} in the plan, {in_module} in the module; "
            "plan from the module itself (nostall plan module.py:build), with the same --layers"
        )


def check_sample_sums(model: Model, workload: Workload, plan: Plan) -> None:
    """Raise :class:`BadPlan` if a value computed from samples reaches a replica from several ones.

    A value such as a mean over the batch has no sample dimension, so the parts of several replicas
    cannot be put together.
    """
    slices = Slices(workload, plan)
    for boundary, stage in enumerate(plan.stages[:-1]):
        names = model.sample_sums(stage.end)
        if names and _has_several_sources(slices, boundary):
            following = len(plan.stages[boundary + 1].gpus)
            raise BadPlan(
                f"{names[0]}, computed from samples but without a sample dimension, crosses the "
                f"cut after layer {stage.end - 1} from {len(stage.gpus)} replicas to {following}; "
                "each replica computes its own from other samples, so the plan would train on "
                f"another loss; give both stages the same number of replicas, or stage {boundary} "
                "one GPU"
            )


def _has_several_sources(slices: Slices, boundary: int) -> bool:
    """Whether a replica after the boundary receives samples from several replicas before it."""
    for m in range(slices.micro_batches):
        targets = [message.target for message in slices.messages(boundary, m)]
        if len(set(targets)) < len(targets):
            return True
    return False
