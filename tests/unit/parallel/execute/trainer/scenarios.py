"""Program of the tests of trainers: scenarios on forked processes, so PyTorch is loaded once.

    python -m tests.unit.parallel.execute.trainer.scenarios FOLDER SCENARIO ...

A scenario is a function ``scenario_NAME`` that returns what its test asserts on, as JSON values.
The results of all of them are in ``FOLDER/results.json``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import default_collate

from nostall.parallel.execute.parts.computation import Computation, in_types_of
from nostall.parallel.execute.parts.engine_part import EnginePart
from nostall.parallel.execute.parts.hybrid_part import HybridPart
from nostall.parallel.execute.parts.pipeline_part import PipelinePart, planned_model
from nostall.parallel.execute.parts.sharded_part import ShardedPart
from nostall.parallel.execute.run import (
    RunOptions,
    run_engine_plan,
    run_hybrid_plan,
    run_plan,
    run_sharding_plan,
)
from nostall.parallel.execute.trainer.build import build
from nostall.parallel.execute.trainer.checkpoints import latest_checkpoint
from nostall.parallel.module import Job
from nostall.parallel.module.job import count_samples
from nostall.parallel.sharding.engine_file import EngineFile
from nostall.parallel.sharding.hybrid.plan_file import HybridFile
from nostall.parallel.sharding.plan_file import PlanFile
from tests.unit.parallel.execute.trainer.models import JOBS, Single, data, language
from tests.unit.parallel.execute.trainer.ranks import (
    adamw,
    compare,
    cosine,
    counted_collectives,
    cuts,
    differences,
    fails,
    loader,
    on_ranks,
    plan_of,
    ranks_of,
    single,
    train_by,
    train_plan,
    whole_batches,
)

FEW = (("language", "pipeline", "p2p"), ("language", "fsdp", "auto"))
OTHERS = (
    *(("language", kind, "auto") for kind in ("pipeline", "pipeline 1:2:1", "megatron x data")),
    *(("language", kind, "auto") for kind in ("pipeline 1:2, zero bubble", "ddp", "fsdp2 3")),
    *(("chain", kind, "auto") for kind in ("pipeline 3", "fsdp 4", "hybrid")),
    *(("summed", kind, "auto") for kind in ("pipeline", "replicated weights", "data parallel 4")),
)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
MOVES = ("pipeline 1:2:1", "fsdp", "one", "fsdp2 3", "pipeline", "megatron x data", "ddp")
KILLED_IN = ("run", "save")


def scenario_few(folder: Path) -> Any:
    return {f"{n}, {k}": compare(folder, n, k, 5, engine) for n, k, engine in FEW}


def scenario_others(folder: Path) -> Any:
    return {f"{n}, {k}": compare(folder, n, k, 200, engine) for n, k, engine in OTHERS}


def scenario_engines(folder: Path) -> Any:
    kinds = ("ddp", "fsdp2 3", "tp")
    return {kind: compare(folder, "language", kind, 5) for kind in kinds} | {
        "moves": _moves(folder, ("fsdp2 3", "tp 4", "pipeline", "tp", "ddp")),
        "cuts": on_ranks(2, folder, cuts),
    }


def scenario_moves(folder: Path) -> Any:
    return _moves(folder, MOVES)


def scenario_few_moves(folder: Path) -> Any:
    return _moves(folder, ("one", "pipeline", "fsdp"))


def _moves(folder: Path, kinds: Sequence[str]) -> Any:
    """A training that goes on by another plan, on other numbers of processes, every three steps."""
    kept = folder / f"moves {len(kinds)}"
    found: list[float] = []
    results: list[Any] = []
    for number, kind in enumerate(kinds):
        plan = plan_of(kind, language())
        steps = 3 * (number + 1)
        given = ("language", plan, steps, str(kept), "auto")
        results = on_ranks(ranks_of(plan), folder, train_plan, *given)
        found += results[0][0]
    losses, weights = single("language", 3 * len(kinds))
    return differences([(found, state, "") for _, state, _ in results], losses, weights)


def scenario_killed(folder: Path) -> Any:
    """A rank is killed, in a pass and in a save; the next run goes on from the last checkpoint."""
    results: dict[str, Any] = {}
    plan = plan_of("pipeline 1:2:1", language(0.5))
    (whole, *_), ranks = on_ranks(4, folder, _with_saves, plan, "", ""), 4
    for where in KILLED_IN:
        kept = folder / f"killed in {where}"
        ends = on_ranks(ranks, folder, _with_saves, plan, str(kept), where, may_fail=True)
        found = latest_checkpoint(kept)
        resumed = on_ranks(ranks, folder, _with_saves, plan, str(kept), "")
        results[where] = {
            "ends": [str(end)[-300:] for end in ends],
            "checkpoint": found.name if found else None,
            "folders": sorted(path.name for path in kept.iterdir()),
            "is_equal": resumed[0] == whole[-len(resumed[0]) :],
            "steps": len(resumed[0]),
        }
    return results


def _with_saves(plan: Any, folder: str, killed_in: str) -> list[float]:
    """Losses of seven steps with a checkpoint every two; dropout draws numbers."""
    trainer = build(plan, language(0.5), adamw)
    scheduler = cosine(trainer.optimizer)
    batches, sampler = loader(trainer, "language")
    others = {"scheduler": scheduler, "sampler": sampler}
    if folder:
        trainer.load(folder, **others)
    losses = []
    while trainer.steps < 7:
        for batch in batches:
            if killed_in == "run" and trainer.steps == 5 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            losses.append(float(trainer.step(batch, max_norm=1.0)))
            scheduler.step()
            if folder and trainer.steps % 2 == 0:
                if killed_in == "save" and trainer.steps == 4:
                    _kill_while_writing(rank=3)
                trainer.save(folder, **others)
            if trainer.steps == 7:
                break
    return losses


def scenario_modes(folder: Path) -> Any:
    """Evaluation, short batches, mixed precision, DCP without the trainer's own methods."""
    jobs = {"pipeline": "language", "fsdp": "language", "hybrid 1:1": "chain"}
    jobs |= {"tp": "language", "fsdp2 kept": "language"}
    return {
        kind: on_ranks(2, folder, _modes, name, plan_of(kind, JOBS[name]()))
        for kind, name in jobs.items()
    }


def _modes(name: str, plan: Any) -> dict[str, Any]:
    trainer = build(plan, JOBS[name](), adamw)
    rows, reference = data(name), Single(JOBS[name](), adamw)
    found: dict[str, Any] = {}
    for mode, samples in (("eval", 8), ("train", 8), ("eval", 4)):
        batch = default_collate(rows[:samples])
        own = default_collate([rows[i] for i in trainer.own_samples(samples) or [0]])
        loss = trainer.train(mode == "train").evaluate(own, samples=samples)
        expected = reference.loss(batch)
        found[f"{mode} {samples}"] = abs(float(loss) / expected - 1)
    trainer.train()
    own = default_collate([rows[i] for i in trainer.own_samples(4) or [0]])
    found["short"] = abs(float(trainer.forward_backward(own, samples=4)) / expected - 1)
    reference.forward_backward(batch)
    norms = [float(t.clip_grad_norm_(1e9)) for t in (trainer, reference)]
    found["norm"] = abs(norms[0] / norms[1] - 1)
    infinite = float(trainer.clip_grad_norm_(1e9, float("inf")))
    expected_norm = nn.utils.get_total_norm(reference.gradients(), float("inf"))
    found["infinity"] = abs(infinite / float(expected_norm) - 1)
    trainer.eval().evaluate(own, samples=4)  # must not keep what it gathered for the next step
    for own_optimizer in (trainer.optimizer, reference.optimizer):
        own_optimizer.step()
    loss = trainer.evaluate(own, samples=4)
    found["after a step"] = abs(float(loss) / reference.loss(batch) - 1)
    found["in eval mode"] = fails(lambda: trainer.forward_backward(own, samples=4))
    trainer.close()
    return found


def scenario_precision(folder: Path) -> Any:
    """Steps in bfloat16 with float32 weights beside the same ones in a single process.

    A weight that two stages share has its gradients summed in float32, in one process in bfloat16.
    """
    results = {}
    for name, kind in (("chain", "pipeline 2"), ("language", "fsdp"), ("chain", "hybrid 1:1")):
        plan = plan_of(kind, _halved(JOBS[name]()))
        results[kind] = on_ranks(2, folder, _in_bfloat16, name, plan)
    return results


def _halved(job: Job) -> Job:
    """The job as it computes: in bfloat16."""
    return in_types_of(job, BF16).traced


def _in_bfloat16(name: str, plan: Any) -> dict[str, Any]:
    trainer = build(plan, JOBS[name](), adamw, precision=BF16)
    batches, _ = loader(trainer, name)
    losses = [float(trainer.step(batch)) for batch in batches]
    reference = Single(JOBS[name](), adamw)
    expected = [reference.step_in_bfloat16(batch) for batch in whole_batches(name, 1)]
    own = dict(trainer.named_parameters())
    weights = {n: p.detach() for n, p in reference.job.module.named_parameters() if n in own}
    trainer.close()
    return {
        "dtypes": sorted({str(p.dtype) for p in own.values()}),
        "loss": max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True)),
        "names": len(weights),
    }


ACCUMULATIONS = (
    ("language", "ddp"), ("language", "fsdp2"), ("language", "data parallel"),
    ("language", "tp"), ("language", "fsdp"), ("chain", "replicated weights"),
    ("language", "pipeline 2:2"),
    ("summed", "pipeline 1:2, zero bubble"), ("language", "megatron x data"), ("chain", "hybrid"),
)  # fmt: skip


def scenario_accumulation(folder: Path) -> Any:
    return _accumulations(folder, ACCUMULATIONS)


def scenario_few_accumulations(folder: Path) -> Any:
    return _accumulations(folder, (("language", "ddp"), ("language", "fsdp")))


def _accumulations(folder: Path, cases: Sequence[tuple[str, str]]) -> Any:
    """Three passes that reduce gradients once, beside three that reduce each time."""
    results = {}
    for name, kind in cases:
        plan = plan_of(kind, JOBS[name]())
        ranks = on_ranks(ranks_of(plan), folder, _accumulate, name, plan)
        results[f"{name}, {kind}"] = {
            "error": max(error for error, *_ in ranks),
            "each": [each for _, each, *_ in ranks],
            "once": [once for _, _, once, _ in ranks],
            "refused": sorted({text for *_, text in ranks}),
        }
    return results


def _accumulate(name: str, plan: Any) -> tuple[float, Any, Any, str]:
    """Difference of the gradients, collectives of each pass, and the error of a step too early."""
    rows, scales, refused = data(name), (0.5, 1.0, 0.25), ""
    found, counts = [], []
    for reduced in (True, False):
        trainer = build(plan, JOBS[name](), adamw)
        own = trainer.own_samples() or [0]
        trainer.forward_backward(default_collate([rows[i] for i in own]))  # connects the ranks
        trainer.zero_grad()
        counts.append([])
        for number, scale in enumerate(scales):
            batch = default_collate([rows[8 * number + i] for i in own])
            reduce = reduced or number == 2
            with counted_collectives() as count:
                trainer.forward_backward(batch, scale=scale, reduce=reduce)
            counts[-1].append(count)
            refused = refused if reduce else fails(trainer.optimizer.step)
        parameters = dict(trainer.named_parameters())
        found.append({n: _local(p.grad) for n, p in parameters.items() if p.grad is not None})
        trainer.close()
    each, once = found
    assert each.keys() == once.keys()
    size = max(float(g.abs().max()) for g in each.values() if g.numel())
    error = max(float((each[n] - once[n]).abs().max()) for n in each if each[n].numel()) / size
    return error, *counts, refused


def _local(gradient: torch.Tensor) -> torch.Tensor:
    return getattr(gradient, "to_local", lambda: gradient)()


COMPILED = (
    ("chain", "fsdp"), ("chain", "pipeline"), ("chain", "pipeline 2"), ("summed", "data parallel"),
    ("chain", "hybrid"), ("chain", "ddp"), ("chain", "fsdp2"),
    ("chain", "pipeline 1:2, zero bubble"),
)  # fmt: skip


def scenario_compiled(folder: Path) -> Any:
    """Compiled training of two steps, asked to be captured, beside a single process."""
    results = {}
    for name, kind in COMPILED:
        plan = plan_of(kind, JOBS[name]())
        ranks = on_ranks(ranks_of(plan), folder, _compiled, name, plan)
        losses, weights = single(name, 2)
        results[f"{name}, {kind}"] = {
            **differences(ranks, losses, weights),
            "functions": [about[0] for _, _, about in ranks],
            "notes": [about[1] for _, _, about in ranks],
        }
    return results


def _compiled(name: str, plan: Any) -> Any:
    trainer = build(plan, JOBS[name](), adamw).compile().capture()
    if trainer.engine in ("torch", "p2p"):  # as a capture on a GPU does, and one that fails there
        trainer._part.prepare_capture(None)
        trainer._part.drop_capture()
        assert trainer.engine == "p2p"
    torch._dynamo.utils.counters.clear()
    losses = train_by(trainer, name, 2)
    state = {
        key: getattr(value, "full_tensor", lambda v=value: v)()
        for key, value in trainer.state_dict()["model"].items()
    }
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    trainer.close()
    return losses, state, (compiled, trainer.notes)


OWN_BATCHES = ("fsdp", "ddp", "pipeline 1:2:1", "hybrid")


def scenario_own_batches(folder: Path) -> Any:
    """Runs of ``launch`` whose batch function makes whole batches, and one with own samples."""
    results = {}
    for kind in OWN_BATCHES:
        plan = plan_of(kind, JOBS["chain"]())
        ranks = on_ranks(ranks_of(plan), folder, _own_batches, plan)
        results[kind] = {
            "losses": [own for own, *_ in ranks], "asked": [own for _, own, _ in ranks],
            "given": [own for *_, own in ranks],
        }  # fmt: skip
    return results


def _own_batches(plan: Any) -> Any:
    """Losses by whole and by own batches, the places asked for, and the samples that steps got."""
    rows, asked, given, losses = data("chain"), set[int](), set[int](), []
    options = RunOptions(2, torch.device("cpu"))

    def own(step: int, places: Sequence[int]) -> Any:
        asked.update(places)
        return as_inputs(default_collate([rows[8 * step + place] for place in places]))

    def whole(step: int) -> Any:
        return as_inputs(default_collate(rows[8 * step : 8 * step + 8]))

    for batches in (whole, own):
        job = replace(JOBS["chain"](), batches=batches, optimizer=adamw)
        with recorded_samples(given):
            losses.append(run_any(plan, job, options).losses)
    return losses, sorted(asked), sorted(given)


def as_inputs(batch: Any) -> Any:
    inputs, targets = batch
    return (inputs,), targets


@contextmanager
def recorded_samples(given: set[int]) -> Iterator[None]:
    """Add the numbers of samples of each step's input."""
    classes = (ShardedPart, HybridPart, EnginePart, PipelinePart)
    steps = [own.step for own in classes]

    def recorder(step: Any) -> Any:
        def recorded(part: Any, inputs: Any, targets: Any, *rest: Any, **named: Any) -> Any:
            given.add(count_samples((inputs, targets)))
            return step(part, inputs, targets, *rest, **named)

        return recorded

    for own, step in zip(classes, steps, strict=True):
        own.step = recorder(step)
    yield
    for own, step in zip(classes, steps, strict=True):
        own.step = step


def run_any(plan: Any, job: Job, options: RunOptions) -> Any:
    if isinstance(plan, PlanFile):
        return run_sharding_plan(job, plan, options)
    if isinstance(plan, EngineFile):
        return run_engine_plan(job, plan, options)
    if isinstance(plan, HybridFile):
        return run_hybrid_plan(job, plan, options)
    workload, pipeline, _ = plan
    return run_plan(planned_model(Computation(job, job), workload), workload, pipeline, options)


def scenario_stateful(folder: Path) -> Any:
    """DCP saves and loads a trainer, before its first step and onto another plan."""
    path, states = str(folder / "stateful"), {}
    for kind, steps in (("pipeline", 0), ("fsdp", 0), ("pipeline", 3), ("fsdp", 3)):
        plan = plan_of(kind, language())
        states[f"{kind} {steps}"] = on_ranks(2, folder, _stateful, plan, path, steps)[0]
    return states


def _stateful(plan: Any, path: str, steps: int) -> list[float]:
    """Train ``steps`` and save, or load; then the losses of two steps."""
    trainer = build(plan, language(), adamw)
    batches, _ = loader(trainer, "language")
    for _, batch in zip(range(steps), batches, strict=False):
        trainer.step(batch)
    if isinstance(plan, tuple):
        dcp.save({"trainer": trainer}, checkpoint_id=f"{path}-{steps}")
    else:
        trainer = build(plan, language(), adamw)
        dcp.load({"trainer": trainer}, checkpoint_id=f"{path}-{steps}")
        assert trainer.steps == steps
    batch = default_collate([data("language")[i] for i in trainer.own_samples()])
    return [float(trainer.step(batch)) for _ in range(2)]


def _kill_while_writing(rank: int) -> None:
    """Let a rank be killed when it has written its part of a checkpoint, before DCP's metadata."""
    write = dcp.FileSystemWriter.write_data

    def killed(*given: Any, **named: Any) -> Any:
        write(*given, **named)
        if dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(*given, **named)

    dcp.FileSystemWriter.write_data = killed


def main(folder: Path, *names: str) -> None:
    results = {name: globals()[f"scenario_{name}"](folder) for name in names}
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), *sys.argv[2:])
