"""Iterations of a run: training by any plan, timed and compared with a single process."""

from __future__ import annotations

import itertools
from time import perf_counter

import torch
import torch.distributed as dist

from nostall.parallel.execute.parts.captured_steps import CapturedSteps
from nostall.parallel.execute.parts.part import Part
from nostall.parallel.execute.reference import Reference, make_optimizer
from nostall.parallel.execute.run_config import RunResult
from nostall.parallel.module.job import Job, to_device


def train(
    job: Job,
    part: Part,
    run: Part | CapturedSteps,
    steps: int,
    device: torch.device,
    result: RunResult,
    reference: Reference | None,
) -> RunResult:
    """Run iterations of the part's batch size and complete the result; every rank calls this.

    ``run`` has the part's steps, captured or not.
    """
    optimizer = make_optimizer(
        job, [p for name, p in part.parameters.items() if name in part.trained]
    )
    own = part.own(part.samples).indices
    worst_gradient = worst_loss = 0.0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for number in range(steps):
        inputs, targets = to_device(job.own_batch(number, part.samples, own), device)
        _synchronize(device)
        dist.barrier()
        start = perf_counter()
        loss = run.step(inputs, targets, part.samples)
        result.launch_seconds.append(perf_counter() - start)
        _synchronize(device)
        result.seconds.append(perf_counter() - start)
        if not (isinstance(run, CapturedSteps) and run.has_whole_loss):
            dist.all_reduce(loss)
        result.losses.append(float(loss))
        if reference is not None:
            expected = reference.step(*job.batch(number, part.samples))
            result.reference_losses.append(expected)
            error = reference.gradient_error(part.whole_gradients())
            worst_gradient = max(worst_gradient, error)
            error = reference.loss_error(result.losses[-1], expected, part.loss_dtype)
            worst_loss = max(worst_loss, error)
            reference.update()
        start = perf_counter()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
            _synchronize(device)
        result.update_seconds.append(perf_counter() - start)
    _combine_ranks(result, (worst_gradient, worst_loss) if reference else None, device)
    return result


def _combine_ranks(
    result: RunResult, errors: tuple[float, float] | None, device: torch.device
) -> None:
    """Combine the ranks' results: slowest times, largest errors, each rank's memory.

    ``errors`` are the largest errors of a gradient and of a loss on this rank.
    """
    lists = (result.seconds, result.launch_seconds, result.update_seconds)
    largest = [*itertools.chain.from_iterable(lists), *(errors or (0.0, 0.0))]
    seconds = torch.tensor(largest, dtype=torch.float64, device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    *times, gradient, loss = seconds.tolist()
    steps = len(result.seconds)
    result.seconds, result.launch_seconds = times[:steps], times[steps : 2 * steps]
    result.update_seconds = times[2 * steps :]
    if errors is not None:
        result.worst_gradient, result.worst_loss = gradient, loss
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    peaks = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(peaks, torch.tensor([peak], dtype=torch.int64, device=device))
    result.peak_bytes = [int(p) for p in peaks] if device.type == "cuda" else []


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
