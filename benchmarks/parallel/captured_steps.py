"""Captured steps of trainers: losses, gradients and times beside launched ones, on GPUs of a host.

    python -m benchmarks run parallel.captured_steps --gpus 2 --out OUT.json

Each plan trains a GPT by launched steps, then by replays of a CUDA graph.  Losses are compared with
those of a single process; in float32 also gradients that add up, accumulate, or are of a short
batch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn

from benchmarks.harness.result_file import save
from nostall.cli.planning.sharding import device_rates
from nostall.parallel import Trainer, build
from nostall.parallel.cluster import Cluster, parse_cluster
from nostall.parallel.execute.parts.any_plan import AnyPlan
from nostall.parallel.module import Job, Model
from nostall.parallel.module.profiler import profile_tensors
from nostall.parallel.module.wrapping import wrapped_blocks
from nostall.parallel.plan import Plan, Policy, Stage, Workload
from nostall.parallel.profile import Layer, Profile
from nostall.parallel.sharding.capture.operators import capture
from nostall.parallel.sharding.cost.device_mesh import ClusterMesh
from nostall.parallel.sharding.cost.prices import Prices
from nostall.parallel.sharding.engine_file import EngineFile, Style, TorchEngine
from nostall.parallel.sharding.graph import strategy_of
from nostall.parallel.sharding.hybrid.plan_file import HybridFile
from nostall.parallel.sharding.hybrid.run import capture_stage
from nostall.parallel.sharding.hybrid.search import HybridStage
from nostall.parallel.sharding.plan_file import PlanFile
from nostall.parallel.sharding.planners.rules import RULES
from nostall.parallel.sharding.planners.sharding import Options, plan_by_rule
from nostall.workload.hardware.file import load_hardware

STEPS, TIMED = 8, 5
"""Steps before the capture and after it, and how many of the last ones count."""
LIMIT_S = 300.0
CLUSTER = (
    'name = "n"\n[[servers]]\ngpus = {}\nmemory_gib = 100\nlink = {{ bandwidth_gbytes = 300 }}\n'
)
PASSES = {
    "adds": [(50, 8, 1.0, True), (51, 8, 0.5, True)],
    "accumulates": [(52, 8, 0.5, False), (53, 8, 0.25, False), (54, 8, 0.25, True)],
    "short": [(55, 4, 1.0, True)],
}
"""By name, passes: number of the batch, its samples, scale, whether they reduce."""


HARDWARE = "h200-measured"
"""Prices what the rule leaves open: with slower GPUs, plans would send more than they need to."""


class Size(NamedTuple):
    width: int
    length: int
    words: int
    layers: int
    dtype: str
    samples: int


SMALL = Size(512, 256, 2048, 4, "float32", 8)
LARGE = Size(1024, 512, 8192, 8, "bfloat16", 16)
PIPELINES: dict[str, tuple[Policy, bool]] = {
    "pipeline 1f1b": ("1f1b", False),
    "pipeline gpipe": ("gpipe", False),
    "pipeline with recomputation": ("1f1b", True),
}
"""Schedules of pipelines with one stage a rank, and whether activations are computed again."""
MICRO_BATCHES = 4
KINDS = (
    "sharding data-parallel", "ddp", "data parallel, one stage", "sharding fsdp", "fsdp2", "tp",
    *PIPELINES, "hybrid",
)  # fmt: skip
ENGINES: tuple[TorchEngine, ...] = ("ddp", "fsdp2", "tp")
CASES: tuple[tuple[str, Size], ...] = (
    *((kind, SMALL) for kind in KINDS),
    *(
        (kind, LARGE)
        for kind in (
            "ddp",
            "fsdp2",
            "tp",
            "sharding data-parallel",
            "pipeline 1f1b",
            "hybrid",
        )
    ),
)


class Block(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        b, t, width = x.shape
        heads = self.qkv(self.n1(x)).view(b, t, 3, 8, width // 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, width))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Gpt(nn.Module):
    """Embedding, blocks and a head."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.words, size.width)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.words, bias=False)

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--plans", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--out", type=Path, required=True)


def main(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="nostall-captured-") as folder:
        result = Path(folder) / "result.json"
        subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
             str(options.gpus), "-m", __name__, str(result), *options.dtypes, *options.plans],
            check=True, timeout=LIMIT_S,
        )  # fmt: skip
        records = json.loads(result.read_text())
    save(options.out, kind="measured", gpus=options.gpus, records=records)


def rank(result: Path, wanted: Sequence[str]) -> None:
    """Run the cases on this rank; rank 0 writes the result after each."""
    is_gpu = torch.cuda.is_available()
    if is_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if is_gpu else "gloo")
    records = []
    for kind, size in CASES:
        if size.dtype not in wanted or kind not in wanted:
            continue
        records.append(Case(kind, size).run())
        if dist.get_rank() == 0:
            print(records[-1], flush=True)
            result.write_text(json.dumps(records))
    dist.destroy_process_group()


class Case:
    """A plan of a model of one size, on this rank."""

    def __init__(self, kind: str, size: Size) -> None:
        self.kind, self.size, self.ranks = kind, size, dist.get_world_size()
        is_gpu = torch.cuda.is_available()
        local = torch.cuda.current_device() if is_gpu else 0
        self.device = torch.device("cuda", local) if is_gpu else torch.device("cpu")

    def run(self) -> dict[str, Any]:
        expected = list(self._reference())
        job = self._job()
        trainer = build(self._plan(job), job, _adamw)
        losses, launched = self._timed(trainer, range(STEPS))
        trainer.capture()
        replayed, captured = self._timed(trainer, range(STEPS, 2 * STEPS))
        errors = [abs(a - b) / b for a, b in zip([*losses, *replayed], expected, strict=True)]
        record = {
            "plan": self.kind, "dtype": self.size.dtype, "captured": trainer._steps.is_captured,
            "loss_error": max(errors), "launched_ms": launched,
            "captured_ms": captured if trainer._steps.is_captured else None,
        }  # fmt: skip
        if self.size is SMALL:
            record["gradient_errors"] = self._gradient_errors(trainer)
        record["notes"] = trainer.notes
        trainer.close()
        return record

    def _job(self) -> Job:
        torch.manual_seed(0)
        size = self.size
        tokens = torch.randint(0, size.words, (size.samples, size.length))
        return Job(Gpt(size).to(getattr(torch, size.dtype)), (tokens,), tokens, _loss)

    def _plan(self, job: Job) -> AnyPlan:
        cluster = parse_cluster(CLUSTER.format(self.ranks))
        if self.kind in ENGINES:
            return self._engine(job, next(e for e in ENGINES if e == self.kind), cluster)
        if self.kind.startswith("sharding"):
            return self._sharding(job, self.kind.split()[1], cluster)
        if self.kind == "hybrid":
            return self._hybrid(job, cluster)
        is_pipeline = self.kind in PIPELINES
        model = Model(job)
        samples = self.size.samples // (MICRO_BATCHES if is_pipeline else self.ranks)
        layers = tuple(Layer(name, 1.0, 2.0, 1.0, 1.0) for name in model.layer_names)
        profile = Profile("job", layers, profile_tensors(model, samples), samples)
        workload = Workload(profile, cluster, self.size.samples, samples)
        if not is_pipeline:
            return (
                workload,
                Plan((Stage(0, len(model), tuple(range(self.ranks))),), "1f1b"),
                "given",
            )
        policy, recompute = PIPELINES[self.kind]
        stages = tuple(Stage(*ends, (rank,)) for rank, ends in enumerate(self._ends(model)))
        return workload, Plan(stages, policy, recompute=recompute), "given"

    def _ends(self, model: Model) -> list[tuple[int, int]]:
        """First and last layer of each stage."""
        ends = [len(model) * i // self.ranks for i in range(self.ranks + 1)]
        return list(itertools.pairwise(ends))

    def _hybrid(self, job: Job, cluster: Cluster) -> HybridFile:
        """A stage of one GPU for each rank."""
        model, size = Model(job), self.size.samples // MICRO_BATCHES
        one, stages = parse_cluster(CLUSTER.format(1)), []
        for first, end in self._ends(model):
            graph = capture_stage(model, first, end, size, 1).step.graph
            own = self._of_rule(graph, "data-parallel", one, size, (1,))
            stages.append((HybridStage(first, end, 1, 1.0), own))
        return HybridFile(
            "rule", 1.0, "job", self.size.samples, size, cluster, tuple(stages)
        )  # fmt: skip

    def _engine(self, job: Job, engine: TorchEngine, cluster: Cluster) -> EngineFile:
        blocks = wrapped_blocks(job.module)
        styles: dict[str, Style] = {}
        for block in blocks if engine == "tp" else ():
            styles |= {f"{block}.up": "colwise", f"{block}.down": "rowwise"}
        if engine == "tp":
            styles["head"] = "classes"
        return EngineFile(
            engine, 1.0, "job", self.size.samples, cluster, engine,
            blocks if engine == "fsdp2" else (), reshard_after_forward=False, styles=styles,
        )  # fmt: skip

    def _sharding(self, job: Job, rule: str, cluster: Cluster) -> PlanFile:
        mesh = (self.ranks,)
        graph = capture(job, self.size.samples, mesh).graph
        return self._of_rule(graph, rule, cluster, self.size.samples, mesh)

    def _of_rule(
        self, graph: Any, rule: str, cluster: Cluster, samples: int, mesh: tuple[int, ...]
    ) -> PlanFile:
        prices = Prices(graph, ClusterMesh(cluster, mesh), device_rates(load_hardware(HARDWARE)))
        plan = plan_by_rule(prices, RULES[rule], Options())
        assert plan is not None
        strategies = {
            operator.name: [(s.inputs, s.outputs) for s in strategy_of(graph, plan.assignment, n)]
            for n, operator in enumerate(graph.operators)
        }
        return PlanFile(rule, 1.0, "job", samples, mesh, cluster, graph.fingerprint, strategies)

    def _batch(self, number: int, samples: int, places: Sequence[int] | None = None) -> Any:
        generator = torch.Generator().manual_seed(number)
        shape = (samples, self.size.length + 1)
        rows = torch.randint(0, self.size.words, shape, generator=generator)
        rows = (rows if places is None else rows[list(places) or [0]]).to(self.device)
        return (rows[:, :-1].contiguous(),), rows[:, 1:].contiguous()

    def _reference(self) -> Iterator[float]:
        """Losses of a single process."""
        module = self._job().module.to(self.device)
        optimizer = _adamw(module.parameters())
        for number in range(2 * STEPS):
            inputs, targets = self._batch(number, self.size.samples)
            loss = _loss(module(*inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield float(loss.detach())

    def _timed(self, trainer: Trainer, numbers: Sequence[int]) -> tuple[list[float], float]:
        """Losses of steps, and the median of their milliseconds with the optimiser."""
        losses, times = [], []
        for number in numbers:
            batch = self._batch(number, self.size.samples, trainer.own_samples())
            self._wait()
            dist.barrier()
            self._wait()
            start = time.perf_counter()
            loss = trainer.step(batch)
            self._wait()
            times.append((time.perf_counter() - start) * 1e3)
            losses.append(float(loss))
        return losses, statistics.median(times[-TIMED:])

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _gradient_errors(self, trainer: Trainer) -> dict[str, float]:
        """Largest differences from a single process, over the largest entry of each gradient."""
        module = self._job().module.to(self.device)
        state = trainer.state_dict()["model"]
        own = {n: getattr(v, "full_tensor", lambda v=v: v)().cpu() for n, v in state.items()}
        states: list[Any] = [None] * self.ranks  # a stage has some of the parameters
        dist.all_gather_object(states, {n: own[n] for n in trainer._part.parameters if n in own})
        module.load_state_dict(own | {n: v for each in states for n, v in each.items()})
        found = {}
        for title, passes in PASSES.items():
            module.zero_grad()
            for number, samples, scale, reduce in passes:
                own = self._batch(number, samples, trainer.own_samples(samples))
                trainer.forward_backward(own, scale=scale, samples=samples, reduce=reduce)
                inputs, targets = self._batch(number, samples)
                (_loss(module(*inputs), targets) * scale).backward()
            gradients = trainer._part.whole_gradients()
            found[title] = max(
                float((g - module.get_parameter(n).grad).abs().max()
                      / module.get_parameter(n).grad.abs().max())
                for n, g in gradients.items() if g is not None
            )  # fmt: skip
            trainer.zero_grad()
        return found


def _loss(logits: Any, targets: Any) -> Any:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _adamw(own: Any) -> Any:
    own = list(own)
    return torch.optim.AdamW(own, lr=1e-3 if own[0].dtype is torch.float32 else 1e-4)


if __name__ == "__main__":
    rank(Path(sys.argv[1]), sys.argv[2:])
