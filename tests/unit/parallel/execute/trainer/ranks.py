"""Runs of trainers on processes, and the same training in a single process."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, default_collate

from nostall.core.errors import NostallError
from nostall.parallel.execute.trainer.build import build
from nostall.parallel.execute.trainer.trainer import Trainer
from tests.unit.parallel.execute.trainer.models import (
    BATCH,
    JOBS,
    ROWS,
    Single,
    cut,
    data,
    engine,
    hybrid,
    pipeline,
    sharding,
)

ACCUMULATED, MAX_NORM = 2, 0.5


def on_ranks(
    ranks: int, folder: Path, function: Callable[..., Any], *given: Any, may_fail: bool = False
) -> list[Any]:
    """Results of ``function(*given)`` on each rank of a gloo group; raises if a rank does.

    With ``may_fail``, the text of the error takes the place of a result, None that of a rank that
    was killed.
    """
    # Autograd of a PyTorch built for CUDA does not work in forked processes; spawning is slower.
    context = multiprocessing.get_context("spawn" if torch.version.cuda else "fork")
    store = folder / f"store-{len(list(folder.iterdir()))}"
    processes = [
        context.Process(target=_rank, args=(rank, ranks, store, function, given))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    results = []
    for rank in range(ranks):
        path = Path(f"{store}-{rank}.pt")
        result = torch.load(path, weights_only=False) if path.exists() else ("killed", None)
        if result[0] == "error" and not may_fail:
            raise RuntimeError(f"rank {rank} of {function.__name__}{given}: {result[1]}")
        results.append(result[1])
    return results


def fails(function: Callable[[], Any]) -> str:
    """The error of nostall's that a function raises."""
    try:
        function()
    except NostallError as error:
        return str(error)
    return "no error"


def _rank(
    rank: int, ranks: int, store: Path, function: Callable[..., Any], given: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    try:
        result = ("done", function(*given))
    except Exception:
        result = ("error", traceback.format_exc())
        torch.save(result, f"{store}-{rank}.pt")
        raise
    torch.save(result, f"{store}-{rank}.pt")
    dist.destroy_process_group()


@contextmanager
def counted_collectives() -> Iterator[dict[str, int]]:
    """The calls of gloo's collectives by name, also those of C++, as the profiler sees them."""
    counts: dict[str, int] = {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield counts
    for event in profile.events():
        if event.name.startswith("gloo:") and event.name not in ("gloo:send", "gloo:recv"):
            counts[event.name] = counts.get(event.name, 0) + 1


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)


def loader(trainer: Trainer, name: str, drop_last: bool = True) -> tuple[Any, Any]:
    rows = data(name)
    sampler = trainer.sampler(len(rows), seed=3, drop_last=drop_last)
    return DataLoader(rows, batch_sampler=sampler), sampler


def train_by(trainer: Trainer, name: str, steps: int, folder: str = "") -> list[float]:
    """Losses of a run with accumulation, clipping and a schedule, which goes on from a folder."""
    scheduler = cosine(trainer.optimizer)
    batches, sampler = loader(trainer, name)
    if folder:
        trainer.load(folder, scheduler=scheduler, sampler=sampler)
    losses = []
    while trainer.steps < steps:
        for batch in batches:
            losses.append(float(trainer.forward_backward(batch, scale=1 / ACCUMULATED)))
            if trainer.passes % ACCUMULATED == 0:
                losses.append(float(trainer.clip_grad_norm_(MAX_NORM)))
                trainer.optimizer.step()
                scheduler.step()
                trainer.zero_grad()
            if trainer.steps == steps:
                break
    if folder:
        trainer.save(folder, scheduler=scheduler, sampler=sampler)
    return losses


def single(name: str, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and norms of the same run in this process, and the weights after it."""
    process = Single(JOBS[name](), adamw)
    scheduler = cosine(process.optimizer)
    losses = []
    batches = whole_batches(name, epochs=ACCUMULATED * steps * BATCH // ROWS + 1)
    for number, batch in enumerate(batches[: ACCUMULATED * steps], 1):
        losses.append(process.forward_backward(batch, 1 / ACCUMULATED))
        if number % ACCUMULATED == 0:
            losses.append(float(process.clip_grad_norm_(MAX_NORM)))
            process.optimizer.step()
            scheduler.step()
            process.zero_grad()
    return losses, process.job.module.state_dict()


def whole_batches(name: str, epochs: int) -> list[Any]:
    """The whole batches of the samplers of :func:`loader`."""
    rows, batches = data(name), []
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(3 * 1_000_003 + epoch)
        order = torch.randperm(len(rows), generator=generator).tolist()
        for first in range(0, len(rows) - BATCH + 1, BATCH):
            batches.append(default_collate([rows[i] for i in order[first : first + BATCH]]))
    return batches


def plan_of(kind: str, job: Any) -> Any:
    """The plans of the scenarios by name, for a job."""
    plans: dict[str, Callable[[], Any]] = {
        "one": lambda: pipeline(job, (0,)),
        "data parallel": lambda: pipeline(job, (0, 1)),
        "data parallel 4": lambda: pipeline(job, (0, 1, 2, 3)),
        "pipeline": lambda: pipeline(job, (0,), (1,)),
        "pipeline 3": lambda: pipeline(job, (1,), (0,), (2,)),
        "pipeline 1:2:1": lambda: pipeline(job, (2,), (0, 3), (1,)),
        "pipeline 1:2, zero bubble": lambda: pipeline(job, (0,), (1, 2), policy="zero-bubble"),
        "fsdp": lambda: sharding(job, "fsdp", 2),
        "fsdp 4": lambda: sharding(job, "fsdp", 4),
        "replicated weights": lambda: sharding(job, "data-parallel", 2),
        "megatron x data": lambda: sharding(job, "megatron", 2, 2),
        "pipeline 2": lambda: pipeline(job, (0,), (1,), policy="gpipe"),
        "pipeline 2:2": lambda: pipeline(job, (0, 1), (2, 3)),
        "fsdp2": lambda: engine(job, "fsdp2", 2),
        "hybrid 1:1": lambda: hybrid(job, 1, 1),
        "ddp": lambda: engine(job, "ddp", 2),
        "fsdp2 kept": lambda: replace(engine(job, "fsdp2", 2), reshard_after_forward=False),
        "tp": lambda: engine(job, "tp", 2),
        "tp 4": lambda: engine(job, "tp", 4),
        "fsdp2 3": lambda: engine(job, "fsdp2", 3),
        "hybrid": lambda: hybrid(job, 2, 1),
    }
    return plans[kind]()


def ranks_of(plan: Any) -> int:
    return len(plan[0].cluster if isinstance(plan, tuple) else plan.cluster)


def train_plan(name: str, plan: Any, steps: int, folder: str, engine: str) -> Any:
    trainer = build(plan, JOBS[name](), adamw, engine=engine)
    losses = train_by(trainer, name, steps, folder)
    state = {
        key: getattr(value, "full_tensor", lambda v=value: v)()
        for key, value in trainer.state_dict()["model"].items()
    }
    about = trainer.engine, trainer.own_samples()
    trainer.close()
    return losses, state, about


def compare(folder: Path, name: str, kind: str, steps: int, engine: str = "auto") -> dict[str, Any]:
    """Largest differences of losses, norms and weights of a plan from a single process."""
    plan = plan_of(kind, JOBS[name]())
    results = on_ranks(ranks_of(plan), folder, train_plan, name, plan, steps, "", engine)
    losses, weights = single(name, steps)
    engines, own = zip(*(about for _, _, about in results), strict=True)
    return {**differences(results, losses, weights), "engine": engines[0], "own": own}


def differences(results: list[Any], losses: list[float], weights: Any) -> dict[str, Any]:
    states = [state for _, state, _ in results]
    return {
        "loss": max(
            abs(a - b) / abs(b) for own, *_ in results for a, b in zip(own, losses, strict=True)
        ),
        "weight": max(
            float((state[key] - weights[key]).abs().max() / weights[key].abs().max())
            for state in states for key in state
        ),
        "missing": sorted(set(weights) - {key for state in states for key in state}),
    }  # fmt: skip


def cuts() -> dict[str, str]:
    """The errors of tensor parallelism for modules that a cut changes, and for one that it does not
    change; and the names of its frozen parameters."""
    jobs = {kind: cut(kind) for kind in ("heads", "checked", "deviation", "plain")}
    found = {kind: fails(lambda job=job: build(engine(job, "tp", 2), job))
             for kind, job in jobs.items()}  # fmt: skip
    own = jobs["plain"].module.named_parameters()
    return found | {"frozen": ", ".join(name for name, p in own if not p.requires_grad)}
