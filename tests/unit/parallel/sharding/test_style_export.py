"""Exported styles: what the text says, and training with the pasted text on two processes."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="capture needs the extra nostall[torch]")
pytest.importorskip("scipy", reason="planning needs the extra nostall[sharding]")

import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from torch import nn  # noqa: E402

from nostall.parallel.cluster import parse_cluster  # noqa: E402
from nostall.parallel.module import Job  # noqa: E402
from nostall.parallel.sharding.capture.operators import capture  # noqa: E402
from nostall.parallel.sharding.cost.device_mesh import ClusterMesh  # noqa: E402
from nostall.parallel.sharding.cost.prices import Prices  # noqa: E402
from nostall.parallel.sharding.cost.rates import DeviceRates  # noqa: E402
from nostall.parallel.sharding.planners.rules import RULES, Rule  # noqa: E402
from nostall.parallel.sharding.planners.sharding import Options, plan_by_rule  # noqa: E402
from nostall.parallel.sharding.style_export import StyleExport, export_styles  # noqa: E402

SAMPLES = 4
RATES = DeviceRates("slow", {"float64": 1e6}, 1e6)
CLUSTER = (
    'name = "n"\n[[servers]]\ngpus = {}\nmemory_gib = 1\nlink = {{ bandwidth_gbytes = 300 }}\n'
)


class Layer(nn.Module):
    """A residual feed-forward network behind a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up_proj, self.down_proj = nn.Linear(8, 64), nn.Linear(64, 8, bias=False)

    def forward(self, x: Any) -> Any:
        return x + self.down_proj(nn.functional.gelu(self.up_proj(self.norm(x))))


class Tied(nn.Module):
    """Layers between an embedding and a head that share their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed_tokens.weight

    def forward(self, tokens: Any) -> Any:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _loss(logits: Any, targets: Any) -> Any:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def job() -> Job:
    torch.manual_seed(0)
    tokens = torch.randint(0, 16, (SAMPLES, 6))
    return Job(Tied().double(), (tokens,), tokens.roll(-1, 1), _loss)


def export(rule: str, mesh: tuple[int, ...] = (2,)) -> StyleExport:
    """The export of a rule's plan; ``megatron`` keeps activations between layers whole."""
    return export_job(job(), rule, mesh)


def export_job(training: Job, rule: str, mesh: tuple[int, ...]) -> StyleExport:
    """The export of a rule's plan of any job."""
    own = RULES[rule]

    def wanted(operator: Any, graph: Any) -> Any:
        is_between = any(part in operator.target for part in ("layer_norm", "aten.add."))
        return "R" if is_between else own.inner(operator, graph)

    given = Rule(rule, wanted, own.outer) if rule == "megatron" else own
    step = capture(training, training.samples, mesh, "tied")
    devices = int(torch.tensor(mesh).prod())
    prices = Prices(step.graph, ClusterMesh(parse_cluster(CLUSTER.format(devices)), mesh), RATES)
    plan = plan_by_rule(prices, given, Options(seconds=20))
    assert plan is not None
    return export_styles(plan, training)


def test_linear_layers_of_tensor_parallelism_get_the_styles_of_pytorch() -> None:
    found = export("megatron")
    assert found.standard == 4
    assert found.placed == ("embed_tokens", "layers.0.norm", "layers.1.norm")
    assert "'layers.*.up_proj': ColwiseParallel(" in found.text
    assert "'layers.*.down_proj': RowwiseParallel(input_layouts=Shard(-1)" in found.text
    assert "'head.weight': 'embed_tokens.weight'" in found.text
    assert f"{sum(found.left_out.values())} redistributions inside of modules" in found.text
    assert "3 modules need Placed" in found.text


def test_layers_that_differ_are_listed_one_by_one() -> None:
    assert "layers.*" in export("fsdp").text
    text = export("data-parallel", (1, 2)).text
    assert "MESH = (1, 2)" in text
    assert "'embed_tokens': Placed({'weight': [Replicate(), Replicate()]})" in text


@pytest.mark.slow
def test_the_pasted_text_trains_as_one_process_does(tmp_path: Path) -> None:
    cases = [(rule, mesh) for mesh in ((2,), (1, 2)) for rule in RULES]
    texts = [export(*case).text for case in cases]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_rank, (texts, port, str(tmp_path)), nprocs=2)
    for rank in (0, 1):
        errors = torch.load(tmp_path / f"{rank}.pt")
        assert len(errors) == len(cases)
        assert max(errors) < 1e-12, dict(zip(cases, errors, strict=True))


def _rank(rank: int, texts: list[str], port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    errors = [_largest_error(text) for text in texts]
    torch.save(errors, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _largest_error(text: str) -> float:
    """Of the loss and of the gradients, over the largest entry of each."""
    pasted: dict[str, Any] = {}
    exec(text, pasted)
    own, reference = job(), job()
    inputs, targets = reference.example_batch(SAMPLES)
    expected = reference.loss(reference.module(*inputs), targets)
    expected.backward()
    mesh = pasted["init_device_mesh"]("cpu", pasted["MESH"])
    pasted["shard_model"](own.module, mesh)
    inputs, targets = pasted["shard_batch"]((inputs, targets), mesh)
    with pasted["implicit_replication"]():
        loss = own.loss(own.module(*inputs), targets)
        loss.backward()
    errors = [float(abs(loss.full_tensor().detach() / expected.detach() - 1))]
    for (name, ours), (other, whole) in zip(
        own.module.named_parameters(), reference.module.named_parameters(), strict=True
    ):
        assert name == other
        assert ours.grad is not None and whole.grad is not None
        assert ours.grad.placements == ours.placements
        difference = (ours.grad.full_tensor() - whole.grad).abs().max() / whole.grad.abs().max()
        errors.append(float(difference))
    return max(errors)
