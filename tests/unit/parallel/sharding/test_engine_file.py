"""Plan files of PyTorch's engines, and the submodules that FSDP2 wraps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("scipy", reason="planning needs the extra nostall[sharding]")
torch = pytest.importorskip("torch", reason="models need the extra nostall[torch]")

from torch import nn  # noqa: E402

from nostall.parallel.errors import BadPlan  # noqa: E402
from nostall.parallel.execute.parts.any_plan import load_any_plan  # noqa: E402
from nostall.parallel.module.wrapping import wrapped_blocks  # noqa: E402
from nostall.parallel.sharding.engine_file import (  # noqa: E402
    RULES_OF,
    EngineFile,
    engine_document,
    load_engine_plan,
)
from nostall.parallel.sharding.planners.rules import RULES  # noqa: E402
from nostall.parallel.sharding.planners.sharding import Options, plan_by_rule  # noqa: E402
from nostall.parallel.sharding.tensor_styles import tensor_styles  # noqa: E402
from tests.unit.parallel.sharding.cost.test_prices import CLUSTER, RATES, _linear  # noqa: E402
from tests.unit.parallel.sharding.steps import ClusterMesh, Prices  # noqa: E402


@pytest.fixture
def path(tmp_path: Path) -> Path:
    plan = plan_by_rule(
        Prices(_linear(), ClusterMesh(CLUSTER, (2,)), RATES), RULES["fsdp"], Options()
    )
    assert plan is not None
    document = engine_document("fsdp2", plan, "m.py:build", 8, 2.0, ["blocks.0"], {})
    (tmp_path / "plan.json").write_text(json.dumps(document))
    return tmp_path / "plan.json"


def test_a_file_is_read_as_it_was_written(path: Path) -> None:
    assert isinstance(load_any_plan(path), EngineFile) and set(RULES_OF.values()) <= set(RULES)
    plan = load_engine_plan(path)
    assert (plan.engine, plan.samples, plan.wrap, len(plan.cluster)) == (
        "fsdp2", 8, ("blocks.0",), 2,
    )  # fmt: skip
    assert plan.predicted_step_s > 0 and not plan.reshard_after_forward and not plan.is_compiled


def test_fsdp2_frees_gathered_parameters_if_all_of_them_do_not_fit(path: Path) -> None:
    graph, small = _linear(), replace(CLUSTER, memory=(1.0,) * 2)
    prices = [Prices(graph, ClusterMesh(own, (2,)), RATES) for own in (CLUSTER, small)]
    plans = [plan_by_rule(own, RULES["fsdp"], Options()) for own in prices]
    found = [engine_document("fsdp2", p, "m.py", 8, 2.0, [], {}) for p in plans if p is not None]
    assert [own["options"]["reshard_after_forward"] for own in found] == [False, True]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"engine": "horovod"}, "engine"),
        ({"capture": True}, "capture"),
        ({"unknown": 1}, "unknown"),
        ({"predicted_step_s": -1}, "predicted_step_s"),
    ],
)
def test_other_values_are_refused_by_name(
    path: Path, changed: dict[str, object], text: str
) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(BadPlan, match=text):
        load_engine_plan(path)


def test_each_gpu_needs_a_sample(path: Path) -> None:
    document = json.loads(path.read_text())
    document["inputs"]["global_batch"] = 1
    path.write_text(json.dumps(document))
    with pytest.raises(BadPlan, match="1 samples for 2 GPUs; each needs one"):
        load_engine_plan(path)


def test_tensor_parallelism_needs_no_sample_for_each_gpu(path: Path) -> None:
    document = json.loads(path.read_text()) | {"engine": "tp"}
    document["inputs"]["global_batch"] = 1
    document["options"]["styles"] = {"up": "colwise"}
    path.write_text(json.dumps(document))
    plan = load_engine_plan(path)
    assert (plan.engine, plan.styles) == ("tp", {"up": "colwise"})
    document["options"]["styles"] = {}
    path.write_text(json.dumps(document))
    with pytest.raises(BadPlan, match="is for tp and cuts no layer"):
        load_engine_plan(path)


def test_a_file_of_the_former_version_has_no_styles(path: Path) -> None:
    document = json.loads(path.read_text())
    del document["options"]["styles"]
    path.write_text(json.dumps(document))
    assert load_engine_plan(path).styles == {}


class Named(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(4, inner), nn.Linear(inner, 4)
        self.other, self.lm_head = nn.Linear(4, 4), nn.Linear(4, 8)


def test_layers_are_cut_by_names_in_pairs_of_even_size() -> None:
    blocks = {"q_proj": "colwise", "o_proj": "rowwise"}
    assert tensor_styles(Named(8), 4) == {**blocks, "lm_head": "classes"}
    assert tensor_styles(Named(16), 16) == blocks  # the head has 8 outputs
    assert tensor_styles(Named(6), 4) == {}
    alone, tied = Named(8), Named(4)
    del alone.o_proj
    tied.o_proj.weight = tied.q_proj.weight
    assert tensor_styles(alone, 2) == {} and tensor_styles(tied, 2) == {}


def test_blocks_are_wrapped_once_and_tied_ones_not() -> None:
    module = nn.Sequential(
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.ReLU(), nn.Linear(2, 2)
    )
    assert wrapped_blocks(module) == ("0", "2")
    module[2].weight = module[0][0].weight
    assert wrapped_blocks(module) == ("0.1",)
    assert wrapped_blocks(nn.Linear(2, 2)) == ()
