"""Program that runs plans of ``CASES`` on four ranks and writes one JSON file per case.

    python -m tests.unit.parallel.ranks FOLDER [fork|spawn [NAME ...]]

Without names, all cases are run.  With fork, PyTorch is loaded and models are traced once for all
ranks.
"""

from __future__ import annotations

import copy
import itertools
import json
import multiprocessing
import sys
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any

from nostall.parallel.plan import Plan, Policy, Stage, Workload
from nostall.parallel.profile import Layer, Profile
from nostall.parallel.simulate import simulate
from nostall.parallel.slices import Slices
from tests.unit.parallel.cases import servers

RANKS = 4
STEPS = 5
DEADLINE = 0.5
"""Timeout in seconds of a message that is never sent."""


@dataclass(frozen=True)
class Case:
    """A plan of a job and how it is run."""

    name: str
    job: str
    """Name of a function of tests.unit.parallel.jobs."""
    stages: tuple[tuple[float, tuple[int, ...]], ...]
    """Per stage, its end as a fraction of the layers, and its GPUs."""
    policy: Policy
    samples: int = 8
    """Samples of an iteration."""
    micro_batch: int = 2
    engine: str = "p2p"
    recompute: bool = False

    def plan(self, layers: int) -> Plan:
        ends = [round(fraction * layers) for fraction, _ in self.stages]
        stages = tuple(
            Stage(first, end, gpus)
            for first, end, (_, gpus) in zip([0, *ends[:-1]], ends, self.stages, strict=True)
        )
        return Plan(stages, self.policy, recompute=self.recompute)


FOUR = ((0.25, (0,)), (0.5, (1,)), (0.75, (2,)), (1.0, (3,)))
ANY_ORDER = ((0.25, (2,)), (0.5, (0,)), (0.75, (3,)), (1.0, (1,)))
THREE = ((0.3, (0,)), (0.6, (1,)), (1.0, (2,)))
TWO_TWO = ((0.4, (0, 1)), (1.0, (3, 2)))
ONE_TWO_ONE = ((0.4, (2,)), (0.7, (0, 3)), (1.0, (1,)))
THREE_ONE = ((0.6, (0, 1, 2)), (1.0, (3,)))
TWO_HALVES = ((0.5, (0, 1)), (1.0, (3, 2)))
ONE_THREE = ((0.5, (0,)), (1.0, (1, 2, 3)))
ROTATION = ((0.25, (0, 1)), (0.5, (2, 3)), (0.75, (0, 1)), (1.0, (2, 3)))
ALL = ((1.0, (0, 1, 2, 3)),)

CASES = (
    *(
        Case(f"chain {policy} {engine}", "chain", FOUR, policy, engine=engine)
        for policy in ("gpipe", "pa", "pb", "1f1b", "list", "zero-bubble")
        for engine in ("p2p", "torch")
    ),
    Case("chain interleaved p2p", "chain", ROTATION, "interleaved"),
    Case("chain interleaved torch", "chain", ROTATION, "interleaved", engine="torch"),
    Case("chain 2:2 torch", "chain", TWO_TWO, "pb", engine="torch"),
    Case("chain GPUs in any order torch", "chain", ANY_ORDER, "1f1b", engine="torch"),
    Case("chain one GPU idle", "chain", THREE, "pb", engine="torch"),
    Case("chain 3:1, slices of 2, 2 and 1", "chain", THREE_ONE, "pb", 10, 5),
    Case("chain 3:1, an empty slice", "chain", THREE_ONE, "pb", 8, 2),
    Case("chain 1:2:1, micro-batches of 3 and 2", "chain", ONE_TWO_ONE, "zero-bubble", 8, 3),
    Case("chain 1:2:1 re-computed", "chain", ONE_TWO_ONE, "list", recompute=True),
    Case("chain data parallel, 2 or 3 samples", "chain", ALL, "1f1b", 9, 2),
    Case("chain data parallel, a replica without samples", "chain", ALL, "1f1b", 3, 1),
    Case("resnet torch", "resnet", FOUR, "1f1b", 4, 2, engine="torch"),
    Case("resnet 1:2:1, uneven", "resnet", ONE_TWO_ONE, "list", 6, 3),
    Case("transposed torch", "transposed", FOUR, "1f1b", engine="torch"),
    Case("gpt2 torch", "gpt2", FOUR, "pb", 4, 2, engine="torch"),
    Case("gpt2 3:1, uneven", "gpt2", THREE_ONE, "zero-bubble", 10, 5),
    Case("frozen first half p2p", "frozen_first_half", FOUR, "zero-bubble"),
    Case("frozen first half torch", "frozen_first_half", FOUR, "1f1b", engine="torch"),
    Case("frozen first half 3:1", "frozen_first_half", THREE_ONE, "pb", 10, 5),
    Case("complex cut 2:2", "complex_cut", TWO_HALVES, "pb"),
    Case("complex cut 3:1", "complex_cut", THREE_ONE, "pb", 10, 5),
    Case("penalty 2:2, the same slices", "penalty", TWO_HALVES, "pb"),
    Case("penalty 1:3", "penalty", ONE_THREE, "pb", 6, 3),
)


def workload(model: Any, case: Case) -> Workload:
    """A workload with arbitrary times, which affect only the order of operations."""
    from nostall.parallel.module.profiler import profile_tensors

    layers = tuple(Layer(name, 1.0, 2.0, 1.0, 1.0) for name in model.layer_names)
    profile = Profile(case.job, layers, profile_tensors(model, case.micro_batch), case.micro_batch)
    return Workload(profile, servers(1, RANKS), case.samples, case.micro_batch)


def main(folder: Path, start: str = "fork", *names: str) -> int:
    """Start the ranks; returns the first exit code that is not 0.

    ``spawn`` is slower than ``fork``, but it also works with a PyTorch built for CUDA on a machine
    without a driver, which fails in a forked process.
    """
    context = multiprocessing.get_context(start)
    cases = {n: case for n, case in enumerate(CASES) if not names or case.name in names}
    models = traced_models(cases) if start == "fork" else None
    ranks = [
        context.Process(target=run, args=(rank, folder, cases, models)) for rank in range(RANKS)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return next((abs(rank.exitcode or 0) for rank in ranks if rank.exitcode), 0)


def traced_models(cases: dict[int, Case]) -> dict[str, Any]:
    """The models of the cases, with their stages traced for all slice sizes."""
    import torch

    import nostall.parallel.execute.run  # noqa: F401 - imported before the fork
    from nostall.parallel.module import Model
    from tests.unit.parallel import jobs

    torch.set_num_threads(1)
    models = {
        name: Model(getattr(jobs, name)(), "leaf" if name == "resnet" else "block")
        for name in dict.fromkeys(case.job for case in cases.values())
    }
    for case in cases.values():
        model = models[case.job]
        work, plan = workload(model, case), case.plan(len(model))
        slices = Slices(work, plan)
        for s, stage in enumerate(plan.stages):
            for replica, m in itertools.product(
                range(len(stage.gpus)), range(slices.micro_batches)
            ):
                first, end = slices.samples(s, replica, m)
                if first < end:
                    model.segment(stage.first, stage.end, end - first, torch.device("cpu"))
        simulate(work, plan)
    return models


def run(rank: int, folder: Path, cases: dict[int, Case], models: dict[str, Any] | None) -> None:
    """Run the cases on one rank; rank 0 writes the result of each to a file with its number."""
    import torch
    import torch.distributed as dist

    from nostall.parallel.execute.run import RunOptions, run_plan

    models = models or traced_models(cases)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=120),
    )
    initial = {name: copy.deepcopy(m.job.module.state_dict()) for name, m in models.items()}
    for number, case in cases.items():
        model = models[case.job]
        model.job.module.load_state_dict(initial[case.job])
        work, plan = workload(model, case), case.plan(len(model))
        options = RunOptions(STEPS, torch.device("cpu"), engine=case.engine, check=True)
        result = run_plan(model, work, plan, options)
        if rank == 0:
            (folder / f"{number}.json").write_text(json.dumps(asdict(result)))
    _run_into_deadline(rank, folder)
    dist.destroy_process_group()


def _run_into_deadline(rank: int, folder: Path) -> None:
    """Rank 0 waits for a message that rank 1 never sends, and writes the error's kind and time."""
    import torch
    import torch.distributed as dist

    from nostall.parallel.execute.communication.process_groups import ProcessGroups
    from nostall.parallel.execute.launcher.failures import classify_error

    group = ProcessGroups(torch.device("cpu"), DEADLINE).get((0, 1), "forward", messages=True)
    if rank == 0:
        start = monotonic()
        try:
            dist.recv(torch.zeros(1), 1, group=group)
        except RuntimeError as error:
            record = {"kind": classify_error(error).kind, "seconds": monotonic() - start}
            (folder / "timeout.json").write_text(json.dumps(record))
    dist.barrier()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
