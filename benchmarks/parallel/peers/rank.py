"""One rank of ``parallel.peers``: sets up the arms of a model and times them in turns.

All ranks make the same calls in the same order.  Rank 0 writes the records after each.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist

from benchmarks.parallel.peers.arms import (
    Arms,
    Ddp,
    Fsdp2,
    Peer,
    Plan,
    Step,
    TensorParallel,
    candidate,
    fresh_job,
)
from benchmarks.parallel.peers.models import adamw
from nostall.core.errors import one_line
from nostall.parallel.execute.parts.any_plan import load_any_plan

CHECKED = 2
"""Steps of each way to run an arm whose losses are compared with those of a single process."""
ROUNDS_S, COMPILE_S = 13.0, 9.0
"""Seconds that rounds take at most, and that compiling an arm may take: none is set up later."""
LAUNCHED, COMPILED, CAPTURED, BOTH = "launched", "compiled", "captured", "compiled and captured"
BOUND = "compiled and captured, without reductions"


@dataclass
class Runner:
    """One arm that is ready to run."""

    record: dict[str, Any]
    step: Step
    ms: list[float] = field(default_factory=list)


@dataclass
class Session:
    """What this rank knows of a run of one model."""

    model: str
    plan: Path
    device: torch.device
    until: float
    out: Path
    steps: int
    rounds: int
    expected: list[float] = field(default_factory=list)
    """Losses of a single process."""
    runners: list[Runner] = field(default_factory=list)
    null: Runner | None = None
    failed: list[dict[str, Any]] = field(default_factory=list)
    made: list[Arms] = field(default_factory=list)
    updates_ms: dict[str, float] = field(default_factory=dict)
    """Milliseconds of the optimiser's step alone, by arm."""

    def left(self) -> float:
        """Seconds that are left to rank 0; the same on all ranks."""
        seconds = torch.tensor(self.until - monotonic(), device=self.device)
        dist.broadcast(seconds, 0)
        return float(seconds)

    def wait(self) -> None:
        """Wait for the GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def save(self) -> None:
        """Write what is known, on rank 0."""
        if dist.get_rank() != 0:
            return
        runners = [*self.runners, *([self.null] if self.null else [])]
        records = [{**r.record, "ms": r.ms} for r in runners]
        partial = self.out.with_suffix(".new")
        content = {"losses": self.expected, "updates_ms": self.updates_ms}
        partial.write_text(json.dumps({**content, "arms": [*records, *self.failed]}))
        partial.replace(self.out)

    def say(self, text: str) -> None:
        """Print what is done, on rank 0."""
        if dist.get_rank() == 0:
            print(f"  {self.model} {self.until - monotonic():4.0f} s left: {text}", flush=True)


def main() -> None:
    options = json.loads(os.environ["NOSTALL_OPTIONS"])
    rank = int(os.environ["RANK"])
    is_gpu = options["device"] == "cuda"
    device = torch.device("cuda", rank) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if is_gpu else "gloo", timeout=timedelta(seconds=90))
    session = Session(
        options["model"], Path(options["plan"]), device, monotonic() + options["seconds"],
        Path(options["out"]), options["steps"], options["rounds"],
    )  # fmt: skip
    torch._dynamo.config.recompile_limit = 64  # arms share functions, and each has its own guards
    session.expected = reference(session)
    session.say("losses of one process")
    for make, compiles, modes in _copies(session):
        if session.left() > ROUNDS_S + compiles * COMPILE_S:
            set_up(session, make, compiles, modes)
    rounds(session)
    _updates(session)
    session.save()
    session.say("done")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # NCCL does not end a communicator while a graph uses it


Copies = list[tuple[Callable[[], Arms], bool, tuple[str, ...]]]
"""What makes each copy, whether it is compiled, and the ways in which its steps run."""


def _copies(session: Session) -> Copies:
    def peer(kind: type[Peer]) -> Callable[[], Arms]:
        return lambda: kind(session.model, session.device)

    def plan() -> Arms:
        while not session.plan.exists() and session.until - monotonic() > 0:
            sleep(0.2)
        return Plan("plan", load_any_plan(session.plan), session.model, session.device)

    def engine(name: str) -> Callable[[], Arms]:
        return lambda: Plan(
            f"candidate {name}", candidate(session.plan, name), session.model, session.device
        )

    return [
        (peer(Ddp), False, (LAUNCHED,)),
        (peer(Ddp), True, (COMPILED, BOTH, BOUND)),
        (plan, False, (LAUNCHED, CAPTURED)),
        (plan, True, (BOTH,)),
        (peer(Fsdp2), True, (COMPILED, BOTH)),
        (peer(TensorParallel), True, (COMPILED, BOTH)),
        *((engine(name), True, (BOTH,)) for name in ("fsdp2", "tp", "ddp")),
        (peer(Fsdp2), False, (LAUNCHED,)),
        (peer(TensorParallel), False, (LAUNCHED,)),
    ]


def reference(session: Session) -> list[float]:
    job = fresh_job(session.model, session.device)
    optimizer, losses = adamw(job.module.parameters()), []
    for _ in range(2 * CHECKED):
        loss = job.run(job.inputs, job.targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    del job, optimizer, loss
    gc.collect()
    if session.device.type == "cuda":
        torch.cuda.empty_cache()
    return losses


def set_up(
    session: Session, make: Callable[[], Arms], compiles: bool, modes: tuple[str, ...]
) -> None:
    """Add the runners of one copy of the model; an error becomes a record."""
    start, name = monotonic(), "?"
    for mode in modes:
        try:
            if mode == modes[0]:
                arms = make()
                session.made.append(arms)
                name = arms.name
                if compiles:
                    arms.compile()
                if mode in (CAPTURED, BOTH):
                    _losses(session, arms, arms.step)
            if mode == BOUND:
                assert isinstance(arms, Ddp)
                step, error = arms.without_reductions(), None
            else:
                step = arms.captured() if mode in (CAPTURED, BOTH) else arms.step
                first = 0 if mode in (LAUNCHED, COMPILED) else CHECKED
                error = _loss_error(_losses(session, arms, step), session.expected[first:])
        except Exception as raised:  # an arm that cannot run is a result; all ranks run the same
            session.failed.append(
                {"arm": name, "mode": mode, "error": f"{type(raised).__name__}: {one_line(raised)}"}
            )
            session.say(f"{name}, {mode}: {session.failed[-1]['error'][:150]}")
            if mode == modes[0]:
                break
            continue
        notes = arms.trainer.notes if isinstance(arms, Plan) else []
        record = {"arm": name, "mode": mode, "loss_error": error, "notes": notes,
                  "setup_s": monotonic() - start}  # fmt: skip
        session.runners.append(Runner(record, step))
        session.say(f"{name}, {mode}: loss error {error}")
        if notes:
            session.say(f"notes {notes}"[:300])
    gc.collect()
    session.save()


def _losses(session: Session, arms: Arms, step: Step) -> list[float]:
    """Losses of the whole batch of some steps."""
    found = []
    for _ in range(CHECKED):
        loss = step().double().clone()
        if not arms.is_whole_loss:
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        found.append(float(loss))
    return found


def _loss_error(losses: list[float], expected: list[float]) -> float:
    return max(abs(a / b - 1) for a, b in zip(losses, expected, strict=False))


def rounds(session: Session) -> None:
    """Time a block of steps of each arm in each round, in another order; the first arm twice."""
    if not session.runners:
        return
    first = session.runners[0]
    if session.null is None:
        record = {**first.record, "mode": f"{first.record['mode']}, again"}
        session.null = Runner(record, first.step)
    runners = [*session.runners, session.null]
    took = 0.0
    for number in range(session.rounds):
        start = monotonic()
        if session.left() < 1.5 * took + 1:
            session.say(f"{number} rounds")
            return
        place = number * len(runners) // session.rounds
        order = [*runners[place:], *runners[:place]]
        times = torch.tensor([_block(session, r.step) for r in order], dtype=torch.float64)
        times = times.to(session.device)
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        for runner, ms in zip(order, times.tolist(), strict=True):
            runner.ms.append(ms)
        session.save()
        took = monotonic() - start
    session.say(f"{session.rounds} rounds")


def _updates(session: Session) -> None:
    """Time the optimiser's steps alone, of the copies of DDP and FSDP2 that have gradients."""
    for arms in session.made:
        if isinstance(arms, Ddp | Fsdp2) and arms.name not in session.updates_ms:
            session.updates_ms[arms.name] = _block(session, arms.update)


def _block(session: Session, step: Step) -> float:
    """Milliseconds of a step, the mean over those of a block."""
    step()
    session.wait()
    dist.barrier()
    session.wait()
    start = perf_counter()
    for _ in range(session.steps):
        step()
    session.wait()
    return (perf_counter() - start) / session.steps * 1e3


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
