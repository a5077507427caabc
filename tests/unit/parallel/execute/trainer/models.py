"""Jobs in float32, plans of all kinds for them, and the same training in a single process."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from nostall.parallel.module import Job, Model
from nostall.parallel.module.profiler import profile_tensors
from nostall.parallel.module.wrapping import wrapped_blocks
from nostall.parallel.plan import Plan, Stage, Workload
from nostall.parallel.profile import Layer, Profile
from nostall.parallel.sharding.capture.operators import capture
from nostall.parallel.sharding.cost.device_mesh import ClusterMesh
from nostall.parallel.sharding.cost.prices import Prices
from nostall.parallel.sharding.cost.rates import DeviceRates
from nostall.parallel.sharding.engine_file import EngineFile
from nostall.parallel.sharding.graph import strategy_of
from nostall.parallel.sharding.hybrid.plan_file import HybridFile
from nostall.parallel.sharding.hybrid.run import capture_stage
from nostall.parallel.sharding.hybrid.search import HybridStage
from nostall.parallel.sharding.plan_file import PlanFile
from nostall.parallel.sharding.planners.rules import RULES
from nostall.parallel.sharding.planners.sharding import Options, plan_by_rule
from tests.unit.parallel.cases import servers

BATCH, MICRO_BATCH, ROWS = 8, 2, 40
"""Samples of a batch, of a micro-batch, and of the data set."""
RATES = DeviceRates("test", {"float32": 1e8, "bfloat16": 1e8}, 1e9)
Data = tuple[torch.Tensor, torch.Tensor]


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.down, self.dropout = nn.Linear(2 * width, width), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Language(nn.Module):
    """Embedding, blocks and a head that shares the embedding; one parameter is never read."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block(8, dropout) for _ in range(2))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.unread = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


class Gate(nn.Module):
    """A layer with a parameter that has no gradient, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.offset = nn.Linear(8, 8), nn.Parameter(torch.ones(8))
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) + self.offset.detach() * self.frozen


def next_token(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def language(dropout: float = 0.0) -> Job:
    torch.manual_seed(0)
    tokens = torch.randint(0, 16, (4, 6))
    return Job(Language(dropout), (tokens,), tokens, next_token)


def squared_error(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """In float32: torch 2.11 has no gradient of a bfloat16 output with float32 targets."""
    return F.mse_loss(output.float(), targets)


def chain() -> Job:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), Gate(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    return Job(module, (torch.randn(4, 8),), torch.randn(4, 4), squared_error)


def summed() -> Job:
    """A classifier whose loss is a sum, with inputs by name."""
    torch.manual_seed(0)
    module = Classifier()
    inputs = {"image": torch.randn(4, 2, 6, 6)}

    def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return 0.1 * F.cross_entropy(output, targets, reduction="sum")

    return Job(module, inputs, torch.randint(0, 4, (4,)), loss, reduction="sum")


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 4, 3, 1, 1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 3, 1, 1)
        )
        self.head = nn.Linear(4, 4)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.layers(image)).mean((2, 3)))


class Cut(nn.Module):
    """Two layers, a frozen one too, with something between that depends on the width or not."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        width = 2 if kind == "deviation" else 8
        self.kind, self.norm = kind, nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)
        self.up.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.up(self.norm(input=x))
        if self.kind == "heads":  # two of any width: a cut halves their width, not their number
            inner = inner.view(x.shape[0], 2, -1).softmax(-1).flatten(1)
        elif self.kind == "checked" and inner.shape[1] != 8:
            raise ValueError(f"the width is {inner.shape[1]} and not 8")
        elif self.kind == "deviation":  # NaN for one value
            inner = inner / inner.std(1, keepdim=True)
        return self.down(inner)


def cut(kind: str) -> Job:
    torch.manual_seed(0)
    return Job(nn.Sequential(Cut(kind)), (torch.randn(4, 8),), torch.randn(4, 8), F.mse_loss)


JOBS: dict[str, Callable[[], Job]] = {"language": language, "chain": chain, "summed": summed}


def data(name: str) -> list[tuple[Any, Any]]:
    """A data set of (inputs, targets) of single samples."""
    generator = torch.Generator().manual_seed(7)
    if name.startswith("language"):
        tokens = torch.randint(0, 16, (2, ROWS, 6), generator=generator)
        return list(zip(*tokens, strict=True))
    if name == "chain":
        values = torch.randn(ROWS, 12, generator=generator)
        return [(v[:8], v[8:]) for v in values]
    images = torch.randn(ROWS, 2, 6, 6, generator=generator)
    labels = torch.randint(0, 4, (ROWS,), generator=generator)
    return [({"image": image}, label) for image, label in zip(images, labels, strict=True)]


def pipeline(job: Job, *gpus: tuple[int, ...], policy: Any = "1f1b", batch: int = BATCH) -> Any:
    """A plan with one stage for each tuple of GPUs, of about equal numbers of layers."""
    model = Model(job)
    layers = tuple(Layer(name, 1.0, 2.0, 1.0, 1.0) for name in model.layer_names)
    profile = Profile("job", layers, profile_tensors(model, MICRO_BATCH), MICRO_BATCH)
    ranks = 1 + max(max(own) for own in gpus)
    work = Workload(profile, servers(1, ranks), batch, MICRO_BATCH)
    ends = [len(model) * (i + 1) // len(gpus) for i in range(len(gpus))]
    starts = [0, *ends[:-1]]
    stages = tuple(Stage(a, b, own) for a, b, own in zip(starts, ends, gpus, strict=True))
    return work, Plan(stages, policy), "test"


def sharding(job: Job, rule: str, *mesh: int) -> PlanFile:
    """The plan of a rule."""
    cluster = servers(1, math.prod(mesh))
    graph = capture(job, BATCH, mesh).graph
    plan = plan_by_rule(Prices(graph, ClusterMesh(cluster, mesh), RATES), RULES[rule], Options())
    assert plan is not None
    return _file(plan, BATCH, mesh, cluster)


def _file(plan: Any, samples: int, mesh: Sequence[int], cluster: Any) -> PlanFile:
    graph = plan.prices.graph
    strategies = {
        operator.name: [(s.inputs, s.outputs) for s in strategy_of(graph, plan.assignment, n)]
        for n, operator in enumerate(graph.operators)
    }
    return PlanFile(
        "rule", 1.0, "job", samples, tuple(mesh), cluster, graph.fingerprint, strategies
    )


def hybrid(job: Job, *devices: int) -> HybridFile:
    """Stages of about equal numbers of layers, each sharded by FSDP's rule."""
    model = Model(job)
    ends = [len(model) * (i + 1) // len(devices) for i in range(len(devices))]
    stages = []
    for first, end, count in zip([0, *ends[:-1]], ends, devices, strict=True):
        graph = capture_stage(model, first, end, MICRO_BATCH, count).step.graph
        mesh = ClusterMesh(servers(1, count), (count,))
        plan = plan_by_rule(Prices(graph, mesh, RATES), RULES["fsdp"], Options())
        own = _file(plan, MICRO_BATCH, (count,), servers(1, count))
        stages.append((HybridStage(first, end, count, 1.0), own))
    total = servers(1, sum(devices))
    return HybridFile("rule", 1.0, "job", BATCH, MICRO_BATCH, total, tuple(stages))


def engine(job: Job, name: Any, ranks: int) -> EngineFile:
    """A plan of DDP, FSDP2, or tensor parallelism inside blocks."""
    wrap, kinds = wrapped_blocks(job.module), {".up": "colwise", ".down": "rowwise"}
    styles: dict[str, Any] = {
        part: style
        for part, _ in job.module.named_modules()
        for end, style in kinds.items()
        if part.endswith(end) and name == "tp"
    }
    return EngineFile(name, 1.0, "job", BATCH, servers(1, ranks), name, wrap, styles=styles)


class Single:
    """Training of a job in a single process with the methods of a trainer."""

    def __init__(self, job: Job, make: Any) -> None:
        self.job = job
        self.optimizer = make([p for p in job.module.parameters() if p.requires_grad])

    def forward_backward(self, batch: Any, scale: float = 1.0) -> float:
        inputs, targets = batch
        inputs = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
        loss = self.job.run(inputs, targets)
        (loss * scale).backward()
        return float(loss.detach())

    def loss(self, batch: Any) -> float:
        inputs, targets = batch
        inputs = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
        with torch.no_grad():
            return float(self.job.run(inputs, targets))

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.job.module.parameters() if p.grad is not None]

    def step_in_bfloat16(self, batch: Any) -> float:
        """A step of equal micro-batches with weights and inputs in bfloat16; returns the loss."""
        inputs, targets = batch
        inputs = inputs.to(torch.bfloat16) if inputs.is_floating_point() else inputs
        total = 0.0
        for first in range(0, BATCH, MICRO_BATCH):
            part = slice(first, first + MICRO_BATCH)
            halves = {n: p.to(torch.bfloat16) for n, p in self.job.module.named_parameters()}
            output = torch.func.functional_call(self.job.module, halves, (inputs[part],))
            loss = self.job.loss(output, targets[part]) * (MICRO_BATCH / BATCH)
            loss.backward()
            total += float(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(self.job.module.parameters(), max_norm)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
