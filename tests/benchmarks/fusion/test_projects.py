"""Kinds of other projects: their split is fixed, and each chain computes with its own inputs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from benchmarks.fusion.chains.projects import PROJECTS, kinds_of, project_chains  # noqa: E402
from benchmarks.fusion.unseen import kinds  # noqa: E402
from benchmarks.fusion.unseen.deployed import Case, Settings, _error, measure  # noqa: E402
from benchmarks.fusion.unseen.kinds_page import figures  # noqa: E402
from benchmarks.harness.result_file import load  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402


def test_the_halves_are_fixed() -> None:
    train, test = kinds_of("train"), kinds_of("test")
    assert {*train} | {*test} == {*PROJECTS} and not {*train} & {*test}
    assert (len(train), len(test)) == (19, 18)
    assert test[:3] == ["guidance with rescaled deviation", "gated norm of pairs",
                        "spherical harmonics"]  # fmt: skip


def test_each_kind_is_of_another_project() -> None:
    projects = [kind.project for kind in PROJECTS.values()]
    assert len({*projects}) == len(projects) >= 15


@pytest.mark.parametrize("name", project_chains())
def test_a_chain_computes_with_its_inputs(name: str) -> None:
    """Without memory; gradients of trained kinds reach each input that is no constant."""
    kind, chain = project_chains()[name]
    with FakeTensorMode():
        inputs = chain.tensors("cpu")
        leaves = [
            x.requires_grad_()
            for at, x in enumerate(inputs)
            if kind.trained and x.is_floating_point() and at not in kind.constants
        ]
        result = chain.function(*inputs)
        outputs = result if isinstance(result, tuple) else (result,)
        if leaves:
            wanted = [x for x in outputs if x.requires_grad]
            seeds = [torch.ones_like(x) for x in wanted]
            gradients = torch.autograd.grad(wanted, leaves, seeds)
            assert [x.shape for x in gradients] == [x.shape for x in leaves]


def stub(job: kinds.Job) -> dict[str, Any]:
    name, settings = job
    if "Gumbel" in name:
        raise ValueError("no memory")
    return {"case": name, "methods": {}, "failed": {}, "seconds": settings.measured_s}


def test_each_chain_is_measured_once_and_failures_are_named(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    kinds.add_options(parser)
    out = tmp_path / "kinds.json"
    options = parser.parse_args(["--out", str(out), "--device", "cpu", "--workers", "2"])
    names = list(project_chains())[:2]
    kinds.run(options, [*names, "Gumbel codes"], ["cpu"], stub)
    result = load(out)
    assert [*result["chains"]] and {*result["chains"]} == {*names}
    assert result["failed"] == {"Gumbel codes": "ValueError: no memory"}
    kinds.run(options, names, ["cpu"], stub)
    assert {*load(out)["chains"]} == {*names}


@pytest.mark.slow
def test_a_case_has_errors_and_times_of_each_method(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = PROJECTS["clipped policy loss"]

    def inputs(device: str) -> list[Any]:
        chain = kinds.Chain("c", kind.function, tuple(kind.inputs(4, 1000)))  # type: ignore[arg-type]
        return kinds._inputs(kind, chain, device)

    monkeypatch.setattr("benchmarks.fusion.unseen.deployed.CHOSEN", "compile twice")
    record = measure(Case("c", kind.function, inputs), Settings("cpu", 0.05, forced=False))
    assert record["failed"] == {}
    assert {*record["methods"]} == {"compile", "compile twice"}
    for found in record["methods"].values():
        assert len(found["errors"]) == 3 and max(found["errors"]) < 1e-4 and not found["wrong"]
    assert {*record["looped"]["compared"]} == {"compile twice"}


def measured(ratio: float, state: str, autotuned: float = 1.0, wrong: bool = False) -> Any:
    """A chain whose choice is so many times as fast as the default mode, by both clocks."""
    times = {"compile": 1.0, "nostall": 1 / ratio, "stitched": 1 / ratio, "max-autotune": autotuned}
    verdict = "faster" if ratio > 1 else "same"
    found = {"ratio": ratio, "low": ratio, "high": ratio, "verdict": verdict}
    clock = {
        "samples_s": {name: [time] * 3 for name, time in times.items()},
        "compared": {"nostall": found},
    }
    methods = {name: {"wrong": wrong and name == "nostall"} for name in times}
    methods["nostall"]["graphs"] = [{"state": state}]  # type: ignore[assignment]
    return {"case": f"chain {ratio}", "methods": methods, "looped": clock, "replayed": clock}


def test_figures_are_means_lowest_values_and_shares() -> None:
    rows = figures([measured(1.5, "stitched", 0.9), measured(0.96, "inductor")])
    cells = {title.partition(",")[0]: rest for title, *rest in rows}
    assert cells["as deployed over the default mode"][0] == "1.200 (0.96 to 1.50, 2 chains)"
    best = cells["as deployed over the better of default and max-autotune"]
    assert best[0] == "1.138 (0.96 to 1.35, 2 chains)"
    assert cells["lowest as deployed"] == ["0.960 (chain 0.96)"] * 2 + ["no"]
    assert cells["chosen and faster"] == ["1 of 2"] * 2 + ["no"]
    assert cells["stitched version at 0.9 or more"] == ["2 of 2"] * 2 + ["yes"]


def test_a_wrong_version_has_no_ratio() -> None:
    rows = figures([measured(1.5, "stitched"), measured(9.0, "stitched", wrong=True)])
    assert rows[0][1].endswith("1 chains)")
    assert rows[-1][1:] == ["1", "", "no"]


def test_guidance_in_eager_pytorch_is_further_off_than_its_sample_rounded_to_bf16() -> None:
    """What the fused kernel of this kind rounds, and torch.compile's kernels do not."""
    kind = PROJECTS["guidance with rescaled deviation"]
    chain = kinds.Chain("c", kind.function, tuple(kind.inputs(8, 4, 32)))  # type: ignore[arg-type]
    inputs = kinds._inputs(kind, chain, "cpu")
    wanted = kind.function(*(x.double() for x in inputs))
    assert isinstance(wanted, torch.Tensor)
    cond, uncond, x, sigma = (x.double() for x in inputs)
    guided = (uncond + 7.5 * (cond - uncond)).bfloat16().double()
    dims = (1, 2, 3)
    scale = cond.std(dims, keepdim=True) / guided.std(dims, keepdim=True)
    noise = (x - (0.7 * scale + 0.3) * guided) / (sigma.abs()[:, None, None, None] + 0.1)
    rounded = _error(x - 0.1 * noise, wanted)
    in_fp32 = _error(kind.function(*(x.float() for x in inputs)), wanted)  # type: ignore[arg-type]
    eager = _error(kind.function(*inputs), wanted)  # type: ignore[arg-type]
    assert in_fp32 < 1e-6 < rounded < eager
