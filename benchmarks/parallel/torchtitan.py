"""Exported plans, run by torchtitan on gloo processes and compared with one process (measured).

    python -m benchmarks run parallel.torchtitan --out benchmarks/parallel/results/torchtitan.json

Needs torchtitan 0.3 and the packages that its pipeline_parallel module imports.  For each plan,
torchtitan reads the files of ``nostall simulate --torchtitan``, splits the model by module names
and builds the schedule from the CSV file.  Losses and gradients of one step are compared with those
of a single process, in double precision.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.harness.result_file import save
from nostall.parallel.cluster import parse_cluster
from nostall.parallel.plan import Plan, Policy, Stage, Workload
from nostall.parallel.profile.layers import Layer, chain
from nostall.parallel.torchtitan_export import export_torchtitan

WIDTH, TOKENS, LAYERS, BATCH, MICRO = 16, 32, 5, 8, 2
NAMES = ("tok_embeddings", *(f"layers.{i}" for i in range(LAYERS)), "norm", "lm_head")
STRAIGHT, UNEVEN, INTERLEAVED = ((4, 0), (8, 1)), ((2, 0), (8, 1)), ((2, 0), (4, 1), (6, 0), (8, 1))
CASES: tuple[tuple[tuple[tuple[int, int], ...], Policy], ...] = (
    *((STRAIGHT, policy) for policy in ("gpipe", "pa", "pb", "1f1b", "list", "zero-bubble")),
    (UNEVEN, "pb"),
    (INTERLEAVED, "interleaved"),
)
"""((end, rank) of each stage, order)."""


class Model(nn.Module):  # type: ignore[misc]
    """A small decoder with the module names of torchtitan; modules that are None are skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, TOKENS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.tok_embeddings is None else self.tok_embeddings(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        x = x if self.norm is None else self.norm(x)
        return x if self.lm_head is None else self.lm_head(x)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)


def main(options: argparse.Namespace) -> None:
    records = [_case(stages, policy) for stages, policy in CASES]
    for record in records:
        print(record, flush=True)
    versions = {"torch": torch.__version__, "torchtitan": version("torchtitan")}
    save(options.out, kind="measured", about=versions, cases=records)


def make_plan(stages: tuple[tuple[int, int], ...], policy: Policy) -> tuple[Workload, Plan]:
    """A plan with arbitrary layer times, which only affect the order."""
    layers = [Layer(name, 1.0, 2.0, 1.0, 1.0) for name in NAMES]
    ranks = 1 + max(rank for _, rank in stages)
    cluster = parse_cluster(
        f'name = "test"\n[[servers]]\ngpus = {ranks}\nmemory_gib = 16\n'
        "link = { bandwidth_gbytes = 1 }\n"
    )
    starts = [0, *(end for end, _ in stages[:-1])]
    plan_stages = tuple(Stage(a, b, (g,)) for a, (b, g) in zip(starts, stages, strict=True))
    work = Workload(chain("toy", layers, [1.0] * (len(layers) - 1), MICRO), cluster, BATCH)
    return work, Plan(plan_stages, policy)


def _case(stages: tuple[tuple[int, int], ...], policy: Policy) -> dict[str, Any]:
    work, plan = make_plan(stages, policy)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        export_torchtitan(work, plan, folder)
        ranks = len({stage.gpus for stage in plan.stages})
        context = multiprocessing.get_context("spawn")
        processes = [context.Process(target=_rank, args=(r, ranks, folder)) for r in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
            process.kill()
        exit_codes = [process.exitcode for process in processes]
        parts = [json.loads(p.read_text()) for p in sorted(folder.glob("rank*.json"))]
    ends = [stage.end for stage in plan.stages]
    record: dict[str, Any] = {"policy": policy, "ends": ends, "exit_codes": exit_codes}
    if len(parts) == ranks:
        record["loss_error"] = max(p["loss_error"] for p in parts)
        record["gradient_error"] = max(p["gradient_error"] for p in parts)
        record["parameters"] = sum(p["parameters"] for p in parts)
    return record


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, TOKENS, (2, BATCH, 4), generator=generator)
    return tokens[0], tokens[1]


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


def _single_process_step() -> tuple[Model, float]:
    """The model with the summed gradients of all micro-batches, and the sum of their losses."""
    torch.manual_seed(0)
    model = Model().double()
    x, y = _batch()
    pairs = zip(x.split(MICRO), y.split(MICRO), strict=True)
    losses = torch.stack([_loss(model(a), b) for a, b in pairs])
    losses.sum().backward()
    return model, float(losses.sum().detach())


def _rank(rank: int, ranks: int, folder: Path) -> None:
    from torchtitan.config import ParallelismConfig
    from torchtitan.distributed import pipeline_parallel

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("pp",))
    settings = json.loads((folder / "torchtitan.json").read_text())
    parallelism = ParallelismConfig(**settings["parallelism"])
    reference, reference_loss = _single_process_step()
    torch.manual_seed(0)
    stages, parts = pipeline_parallel._pipeline_module_split(
        Model().double(),
        mesh["pp"],
        parallelism.pipeline_parallel_schedule,
        torch.device("cpu"),
        parallelism.module_fqns_per_model_part,
    )
    schedule = pipeline_parallel._build_pipeline_schedule(
        parallelism=parallelism,
        local_batch_size=settings["training"]["local_batch_size"],
        stages=stages,
        loss_fn=lambda output, target: (_loss(output, target), None),
    )
    x, y = _batch()
    losses: list[torch.Tensor] = []
    inputs = (x,) if any(stage.is_first for stage in stages) else ()
    has_last = any(stage.is_last for stage in stages)
    target = {"target": y, "losses": losses} if has_last else {}
    schedule.step(*inputs, **target, return_outputs=False)
    reference_parameters = dict(reference.named_parameters())
    parameters = _parameters_by_name(
        settings["parallelism"]["module_fqns_per_model_part"], stages, parts
    )
    gradient_error = max(
        _relative_error(parameter.grad, reference_parameters[name].grad)
        for name, parameter in parameters.items()
    )
    loss_error = abs(float(sum(losses).detach()) / reference_loss - 1) if losses else 0.0
    record = {
        "loss_error": loss_error,
        "gradient_error": gradient_error,
        "parameters": len(parameters),
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(record))
    dist.destroy_process_group()


def _relative_error(gradient: Any, reference: Any) -> float:
    return float((gradient - reference).abs().max() / reference.abs().max())


def _parameters_by_name(
    parts: list[list[str]], stages: Any, models: Any
) -> dict[str, nn.Parameter]:
    """Parameters by their names in the whole model; torchtitan renumbers the layers of a stage."""
    parameters = {}
    for stage, model in zip(stages, models, strict=True):
        layers = [n for n in parts[stage.stage_index] if n.startswith("layers.")]
        for name, parameter in model.named_parameters():
            if name.startswith("layers."):
                _, index, rest = name.split(".", 2)
                name = f"{layers[int(index)]}.{rest}"
            parameters[name] = parameter
    return parameters
