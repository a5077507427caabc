"""Hybrid plans of the benchmark on GPUs, and the agreement of its records."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the plans need the extra nostall[torch]")
pytest.importorskip("scipy", reason="planning needs the extra nostall[sharding]")

from benchmarks.sharding.clusters import one_server  # noqa: E402
from benchmarks.sharding.gpu.hybrid_candidates import (  # noqa: E402
    Setting,
    counts,
    hybrid_candidates,
)
from benchmarks.sharding.gpu.models import MODELS  # noqa: E402
from benchmarks.sharding.gpu.results import summary  # noqa: E402

from nostall.parallel.module import Model  # noqa: E402
from nostall.parallel.sharding.cost.rates import DeviceRates  # noqa: E402

RATES = DeviceRates("slow", {"float32": 1e9}, 1e10)


def test_micro_batches_have_two_samples() -> None:
    assert counts(16) == [4, 2, 8] and counts(8) == [4, 2] and counts(6) == [2]


@pytest.mark.slow
@pytest.mark.parametrize(("gpus", "kinds"), [(2, {"1:1"}), (4, {"2:2", "2:1:1", "1:2:1", "1:1:2"})])
def test_candidates_use_all_gpus_and_layers(gpus: int, kinds: set[str]) -> None:
    torch.manual_seed(0)
    model = Model(MODELS["classifier"](True).job)
    setting = Setting(model, one_server(gpus, 300.0), RATES, {}, 4, 10.0)
    found = hybrid_candidates(setting)
    assert {plan.place.partition(",")[0] for plan in found} <= kinds
    assert "sharding" in {plan.name for plan in found}
    assert ("megatron" in {plan.name for plan in found}) is (gpus == 4)
    for plan in found:
        ends = [stage.end for stage in plan.stages]
        assert [stage.first for stage in plan.stages] == [0, *ends[:-1]] and ends[-1] == len(model)
        assert sum(stage.devices for stage in plan.stages) == gpus
        own = [stage.seconds for stage in plan.stages]
        assert plan.step_s == pytest.approx(sum(own) + 3 * max(own))
    best = min(found, key=lambda plan: plan.step_s)
    assert best.name == "sharding"


def test_hybrids_have_an_agreement_of_their_own() -> None:
    def record(plan: str, predicted: float, measured: float, **more: Any) -> dict[str, Any]:
        interval = [measured - 0.1, measured + 0.1]
        return {"model": "m", "mesh": "", "plan": plan, "predicted_s": predicted,
                "measured_s": measured, "interval_s": interval, **more}  # fmt: skip

    stages: dict[str, Any] = {"stages": []}
    records = [record("sharding", 1, 2), record("a", 3, 4, **stages), record("b", 2, 5, **stages)]
    group = summary(records)["models"]["m"]
    assert group["plans"] == 3 and group["tau"] == pytest.approx(1 / 3)
    assert group["hybrids"]["plans"] == 2 and group["hybrids"]["tau"] == -1
    assert summary(records[:1])["models"]["m"]["hybrids"] == {"plans": 0}
