"""Bounds, the certificate of no gain, the bundle and the page."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nostall import __version__
from nostall.attach.program.changes import MARKED
from nostall.attach.program.machine import cpu_name
from nostall.attach.program.start import VARIABLE
from nostall.core.errors import BadInput, MissingPart
from nostall.core.measurement import Comparison
from nostall.optimizing.bundle import bundle_environment, read_bundle, write_bundle
from nostall.optimizing.diagnosis import Facts, certificate, diagnose, with_numerics
from nostall.optimizing.page import write_page
from nostall.optimizing.proof import Proof
from nostall.optimizing.result import Attempt, Result


def facts(
    *, forward: float = 0.3, optimizer: float = 0.2, loader: float = 0.1, **changes: Any
) -> Facts:
    """Twenty steps of one second with these parts."""
    parts = {"forward": forward, "backward": 0.2, "optimizer": optimizer, "loader": loader}
    return Facts({
        "steps": [(1, 1.0)] * 20,
        "parts": {name: [seconds] * 20 for name, seconds in parts.items()},
        "cuda": False, "device": cpu_name(), "driver": None, "torch": "2.13.0", "threads": 1,
        "roots": ["GPT"], "obstacle": "", "flags": ["fused"], "optimizers": ["AdamW"], "world": 1,
        "loader": {"workers": 0, "pinned": False}, "peak_bytes": 1 << 30, "step_is": "",
        "identity": {"model": "0" * 64, "sources": {"__main__": "1" * 64}},
        "mean_seconds": 1.0, "calls": 1, "in_torch": False, "images": False,
        "matmul_precision": "highest", "trace_obstacle": "the program has a profiler of its own",
        "trace": {"obstacle": "the program has a profiler of its own"}, "trace_file": None,
        **changes,
    })  # fmt: skip


def bounds(found: Facts) -> dict[str, float | None]:
    return {level.name: level.bound for level in diagnose(found)}


def test_a_bound_is_the_step_over_what_remains() -> None:
    found = bounds(facts())
    assert found["torch.compile"] == pytest.approx(2.0)
    assert found["fused optimiser"] == pytest.approx(1.25)


def test_a_program_that_keeps_a_graph_is_not_compiled() -> None:
    found = facts(kept_graph="retain_graph=True", loss_elements=1 << 23)
    levels = {level.name: level for level in diagnose(found)}
    for name in ("torch.compile", "compiled loss"):
        assert levels[name].change is None and "retain_graph=True" in levels[name].reason
    assert levels["fused optimiser"].change is not None


def test_a_bound_follows_from_the_numbers_beside_it() -> None:
    found = facts(parts={
        "forward": [0.1] * 20, "backward": [0.1] * 20, "loader": [0.0] * 20,
        "optimizer": [0.2] * 11 + [0.6] * 9,
    })  # fmt: skip
    level = next(level for level in diagnose(found) if level.name == "fused optimiser")
    rest = re.search(r"100% / ([\d.]+)%.* \(median ([\d.]+)%\)", level.reason)
    assert rest is not None and level.bound is not None and level.share is not None
    assert level.bound == pytest.approx(100 / float(rest[1]), rel=1e-2)
    assert (float(rest[1]), float(rest[2])) == (40.0, pytest.approx(100 * (1 - level.share)))
    assert "optimizer" not in level.touches + level.reason


def test_a_pause_outside_of_all_parts_does_not_lower_a_bound() -> None:
    found = facts(steps=[(1, 1.0)] * 14 + [(1, 60.0)] * 6)
    assert bounds(found)["torch.compile"] == pytest.approx(2.0)


def test_on_a_gpu_no_bound_is_given_and_no_certificate() -> None:
    found = facts(cuda=True, forward=0.0)
    levels = diagnose(found)
    assert {level.bound for level in levels} == {None}
    assert [level.name for level in levels] == [
        "CUDA graphs",
        "torch.compile",
        "fused optimiser",
        "back end nostall",
        "input pipeline",
        "TF32",
    ]
    assert certificate(found, levels) == ""


def test_a_static_cache_is_tried_first_where_a_model_generates() -> None:
    names = [level.name for level in diagnose(facts(cuda=True, generates=True))]
    assert names[:3] == ["static cache", "CUDA graphs", "torch.compile"]
    assert "static cache" not in [level.name for level in diagnose(facts(cuda=True))]


def on_gpu(**changes: Any) -> Facts:
    """Steps of one second: 400 ms of products, 300 pointwise, 100 optimiser, 150 idle, 50 both."""
    trace = {
        "steps": 3, "step": 1.2, "busy": 0.85, "pointwise": 0.3, "optimizer": 0.1,
        "without_compile": 0.5, "without_optimizer": 0.75, "without_both": 0.4, "obstacle": "",
        **changes.pop("trace", {}),
    }  # fmt: skip
    return facts(cuda=True, trace=trace, **changes)


def test_on_a_gpu_a_bound_is_the_step_over_the_work_that_remains() -> None:
    found = bounds(on_gpu())
    assert found["torch.compile"] == found["CUDA graphs"] == pytest.approx(1 / 0.5)
    assert found["fused optimiser"] == pytest.approx(1 / 0.75)
    reasons = {level.name: level.reason for level in diagnose(on_gpu())}
    assert "idle 15%, pointwise work 30%" in reasons["torch.compile"]
    assert "idle 15%, optimiser 10%" in reasons["fused optimiser"]


def test_reading_data_in_the_program_remains_and_in_workers_does_not() -> None:
    own = Facts({**on_gpu().raw, "parts": {**on_gpu().raw["parts"], "loader": [0.8] * 20}})
    assert bounds(own)["torch.compile"] == pytest.approx(1 / 0.8)
    for loader in ({"workers": 2}, {"workers": 0, "on_gpu": True}):
        found = Facts({**own.raw, "loader": loader})
        assert bounds(found)["torch.compile"] == pytest.approx(2.0)


def test_no_graphs_without_gaps_or_where_gradients_live_on() -> None:
    levels = {level.name: level for level in diagnose(on_gpu(trace={"busy": 0.96}))}
    assert levels["CUDA graphs"].change is None and "only 4.0%" in levels["CUDA graphs"].reason
    assert levels["torch.compile"].change is not None
    idle = diagnose(on_gpu(trace={"busy": 0.6, "without_compile": 0.4, "without_optimizer": 0.5}))
    assert idle[0].name == "CUDA graphs" and diagnose(on_gpu())[0].name == "torch.compile"
    twice = diagnose(on_gpu(calls=2, keeps_gradients=False))
    assert [level.change for level in twice if level.name == "CUDA graphs"] == [
        {"name": "CUDA graphs", "kind": "compile", "value": MARKED}
    ]
    for kept in ({"calls": 2}, {"calls": 1, "keeps_gradients": True}):
        levels = {level.name: level for level in diagnose(on_gpu(**kept))}
        assert levels["CUDA graphs"].change is None
        assert "gradients live on" in levels["CUDA graphs"].reason
    often = {level.name: level for level in diagnose(on_gpu(calls=9, keeps_gradients=False))}
    assert "9 times" in often["CUDA graphs"].reason
    inference = {level.name: level for level in diagnose(on_gpu(calls=0))}
    assert inference["CUDA graphs"].change is not None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"trace": {"obstacle": "convolutions can run"}}, "convolutions can run"),
        ({"trace": {"busy": 1.2}}, "more work than the watched ones"),
        ({"steps": [(n % 2, 1.0) for n in range(20)]}, "steps differ"),
    ],
)
def test_no_bound_on_a_gpu_says_why(changes: dict[str, Any], reason: str) -> None:
    levels = {level.name: level for level in diagnose(on_gpu(**changes))}
    assert levels["torch.compile"].bound is None and reason in levels["torch.compile"].reason
    optimizer = levels["fused optimiser"].bound
    assert (optimizer is None) == ("convolutions" not in reason)


def test_the_certificate_on_a_gpu() -> None:
    found = on_gpu(trace={"busy": 0.99, "without_both": 0.97, "without_compile": 0.98})
    text = certificate(found, diagnose(found))
    assert "at most 1.031" in text and "lower precision" in text and "(97% of a step)" in text
    assert certificate(on_gpu(), diagnose(on_gpu())) == ""


def test_lines_of_modules_whose_method_compiles_nothing() -> None:
    lines = {level.name: level.line for level in diagnose(on_gpu(in_torch=True, images=True))}
    assert lines["torch.compile"] == "model = torch.compile(model)  # GPT"
    assert lines["CUDA graphs"].startswith('model = torch.compile(model, mode="reduce-overhead")')
    assert lines["channels_last"] == "model = model.to(memory_format=torch.channels_last)"
    assert 'model.compile(backend="nostall")  # GPT' in {x.line for x in diagnose(on_gpu())}


def test_the_certificate_says_what_would_move_it() -> None:
    found = facts(forward=0.01, optimizer=0.01, loader=0.7)
    found = Facts({**found.raw, "parts": {**found.raw["parts"], "backward": [0.01] * 20}})
    text = certificate(found, diagnose(found))
    assert "at most 1.031" in text and "a faster input pipeline (70% of a step)" in text
    few = Facts({**found.raw, "steps": found.raw["steps"][:9]})
    assert certificate(few, diagnose(few)) == ""
    assert certificate(facts(), diagnose(facts())) == ""


def test_what_cannot_be_tried_says_why() -> None:
    levels = diagnose(facts(obstacle="it runs under torch.compile already", flags=[], world=2))
    reasons = {level.name: (level.reason, level.change) for level in levels}
    assert reasons["torch.compile"] == ("it runs under torch.compile already", None)
    assert "set already" in reasons["fused optimiser"][0]
    assert "num_workers=0" in reasons["input pipeline"][0]
    assert "characterize" in reasons["communication"][0]
    assert not any(level.change for level in levels)


def test_numbers_change_only_if_allowed() -> None:
    gpu = facts(cuda=True)
    advice = {level.name: level.change for level in diagnose(gpu)}
    assert advice["TF32"] is None
    allowed = with_numerics(diagnose(gpu), gpu)
    tried = [level for level in allowed if level.change]
    assert tried[-1].name == "TF32" and tried[-1].result_class == "changes numbers"
    assert [level.name for level in allowed].count("TF32") == 1
    for other in (facts(), facts(cuda=True, matmul_precision="high")):
        assert with_numerics(diagnose(other), other) == diagnose(other)


def test_kinds_of_steps() -> None:
    assert facts(steps=[(n, 1.0) for n in range(20)]).never_repeats
    assert facts(steps=[(n % 2, 1.0) for n in range(20)]).varied
    assert not facts(steps=[(1, 1.0)] * 19 + [(2, 9.0)]).varied


def result() -> Result:
    found = facts()
    levels = diagnose(found)
    proof = Proof(Comparison(1.2, 1.1, 1.3, 0.98, 1.02, "measured"), "", 12, (1.0, 0.8))
    attempts = [
        Attempt(levels[0], "dropped", "not faster", "within rounding", proof),
        Attempt(levels[1], "kept", "1.2 times as fast", "within rounding", proof),
    ]
    return Result(["python", "a <b>.py"], None, found, levels, "", attempts, proof)


def test_a_bundle_is_read_back_and_applied_here(tmp_path: Path) -> None:
    path = write_bundle(result(), tmp_path / "out" / "bundle.json")
    bundle = read_bundle(path)
    assert [change.value for change in bundle.changes] == ["fused"]
    settings = json.loads(bundle_environment(bundle, path, {"A": "b"}, None)[VARIABLE])
    assert settings["step_is"] == "" and bundle.schema_version == 4
    assert settings["identity"] == facts().raw["identity"]
    assert settings["changes"] == [
        {
            "name": "fused optimiser",
            "kind": "optimizer",
            "value": "fused",
            "result_class": "within rounding",
        }
    ]


def test_a_bundle_tells_what_its_steps_are(tmp_path: Path) -> None:
    found = result()
    found.facts = facts(step_is="each call of GPT")
    path = write_bundle(found, tmp_path / "bundle.json")
    settings = json.loads(bundle_environment(read_bundle(path), path, {}, None)[VARIABLE])
    assert settings["step_is"] == "each call of GPT"
    found.facts = facts(identity="0" * 64)  # of a recording of an earlier version
    write_bundle(found, path)
    with pytest.raises(BadInput, match="of which program it is"):
        bundle_environment(read_bundle(path), path, {}, None)


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({"device": "CPU other"}, BadInput, "the device CPU other"),
        ({"device": "NVIDIA H200"}, MissingPart, "no GPU is found here"),
        ({"nostall": "0.0.1"}, BadInput, f"nostall 0.0.1, and here it is {__version__}"),
    ],
)
def test_a_bundle_of_another_machine_is_refused(
    changes: dict[str, str], error: type[Exception], reason: str, tmp_path: Path
) -> None:
    path = write_bundle(result(), tmp_path / "bundle.json")
    document = json.loads(path.read_text())
    document["machine"] |= changes
    path.write_text(json.dumps(document))
    with pytest.raises(error, match=reason):
        bundle_environment(read_bundle(path), path, {}, None)


def test_a_gpu_bundle_is_refused_on_another_gpu(tmp_path: Path) -> None:
    path = write_bundle(result(), tmp_path / "bundle.json")
    document = json.loads(path.read_text())
    document["machine"]["device"] = "NVIDIA H200"
    path.write_text(json.dumps(document))
    assert VARIABLE in bundle_environment(read_bundle(path), path, {}, "NVIDIA H200")
    with pytest.raises(BadInput, match="NVIDIA A100"):
        bundle_environment(read_bundle(path), path, {}, "NVIDIA A100")


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("schema_version", 3, "schema_version is '3'; allowed are 4"),
        ("changes", [{"kind": "exec"}], "changes.0"),
        ("changes", [], "changes"),
        ("hook", "import os", "hook is an unknown key"),
        ("ratio", "fast", "ratio is 'fast'"),
    ],
)
def test_a_file_that_is_no_bundle_is_refused(
    key: str, value: object, reason: str, tmp_path: Path
) -> None:
    path = write_bundle(result(), tmp_path / "bundle.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(BadInput, match=reason):
        read_bundle(path)
    path.write_bytes(b"\x80\x04evil pickle")
    with pytest.raises(BadInput, match="is no bundle"):
        read_bundle(path)


def test_a_native_change_needs_its_kernels(tmp_path: Path) -> None:
    path = write_bundle(result(), tmp_path / "bundle.json")
    document = json.loads(path.read_text())
    document["changes"][0] |= {"kind": "native", "value": "store"}
    path.write_text(json.dumps(document))
    with pytest.raises(BadInput, match="lacks its kernels"):
        bundle_environment(read_bundle(path), path, {}, None)


def test_own_triton_kernels_are_a_level_without_a_bound() -> None:
    kernels = [{"kernel": name, "launches": 2.0} for name in ("norm", "gate", "norm")]
    level = next(level for level in diagnose(facts(kernels=kernels)) if "native" in level.name)
    assert level.touches == "3 Triton kernels, 6 launches a step" and level.bound is None
    assert level.result_class == "bit-equal" and level.line.endswith("@triton.jit of norm, gate")
    assert level == [x for x in diagnose(facts(kernels=kernels)) if x.change][-1]
    assert certificate(facts(forward=0.0, kernels=kernels), [level]) == ""
    ranks = next(x for x in diagnose(facts(kernels=kernels, world=2)) if x.name == level.name)
    assert ranks.change is None and "several ranks" in ranks.reason


def test_the_page_shows_the_waterfall_and_escapes(tmp_path: Path) -> None:
    page = write_page(result(), tmp_path / "report.html").read_text("utf-8")
    assert "a &lt;b&gt;.py" in page and "<b>" not in page
    for text in ("measured together", "+ fused optimiser", "1.200 [1.100, 1.300]", "833.3 ms"):
        assert text in page
    assert "× as fast, measured on the whole step: fused optimiser.</p>" in page
    nothing = result()
    nothing.attempts = nothing.attempts[:1]
    assert "measured together" not in write_page(nothing, tmp_path / "b.html").read_text("utf-8")


def test_the_headline_says_that_the_time_ran_out_and_what_was_not_tried(tmp_path: Path) -> None:
    nothing = result()
    nothing.attempts, nothing.limit = nothing.attempts[:1], "--minutes 1"
    nothing.together = None
    page = write_page(nothing, tmp_path / "a.html").read_text("utf-8")
    left = [
        level.name for level in nothing.levels
        if level.change and level.name != nothing.attempts[0].level.name
    ]  # fmt: skip
    assert f"{len(left)} level" in page and left
    assert re.search(rf"the time is over \(--minutes 1\): .* not tried: {', '.join(left)}\.", page)
    nothing.attempts = []
    page = write_page(nothing, tmp_path / "b.html").read_text("utf-8")
    assert "the time is over (--minutes 1): " in page and "not proven faster" not in page


def test_an_original_that_differs_from_itself_is_flagged(tmp_path: Path) -> None:
    drifting = result()
    attempt = drifting.attempts[0]
    assert "without 1" not in write_page(drifting, tmp_path / "a.html").read_text("utf-8")
    proof = Proof(Comparison(0.9, 0.5, 1.2, 0.494, 0.923, "measured"), "", 8, (1.0, 1.0))
    drifting.attempts[0] = replace(attempt, proof=proof)
    page = write_page(drifting, tmp_path / "b.html").read_text("utf-8")
    assert "0.494 to 0.923, without 1" in page and "the original differs from itself" in page


def test_ranks_have_no_bounds() -> None:
    """The wait for another rank lies outside of the optimiser, and gets shorter with it."""
    found = facts(world=2)
    assert set(bounds(found).values()) == {None} and not certificate(found, diagnose(found))
    reasons = {level.name: level.reason for level in diagnose(found)}
    assert "ranks wait for each other" in reasons["fused optimiser"]


def test_a_loader_without_workers_gets_some_where_it_takes_time() -> None:
    known = {"workers": 0, "pinned": False, "iterable": False}
    found = {level.name: level for level in diagnose(facts(loader_share=0, processors=16))}
    assert "input pipeline" in found  # recordings of earlier versions do not tell the kind
    given = facts(loader=0.1, processors=16)
    given = Facts({**given.raw, "loader": known})
    found = {level.name: level for level in diagnose(given)}
    assert found["loader workers"].change is not None and "input pipeline" not in found
    assert found["loader workers"].change["value"] == "workers=4"
    assert found["loader workers"].bound == pytest.approx(1 / 0.9)
    ranks = {level.name: level for level in diagnose(Facts({**given.raw, "world": 2}))}
    assert ranks["loader workers"].change is None
    iterable = Facts({**given.raw, "loader": {**known, "iterable": True}})
    assert "loader workers" not in {level.name for level in diagnose(iterable)}


def test_attention_and_memory_are_levels_where_they_are_used() -> None:
    attention = {"calls": 3, "half": True, "masked": True, "first": "FLASH_ATTENTION"}
    gpu = {"cuda": True, "attention": attention, "driver_calls": 7, "not_expandable": ""}
    found = {level.name: level for level in diagnose(facts(**gpu))}
    assert found["cuDNN attention"].change is not None
    assert found["expandable segments"].change is not None
    first = {**attention, "first": "CUDNN_ATTENTION"}
    found = {level.name: level for level in
             diagnose(facts(**{**gpu, "attention": first, "driver_calls": 0}))}  # fmt: skip
    assert "masks" in found["flash attention"].reason
    assert found["expandable segments"].change is None
