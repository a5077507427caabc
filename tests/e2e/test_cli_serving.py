"""End-to-end tests of ``nostall serving``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nostall.serving.simulate.step_costs import BUILT_IN
from tests.e2e.cli import ROOT, error_line, nostall_here
from tests.unit.serving.simulate.test_step_costs import document

TRACES = ROOT / "tests" / "corpus" / "serving"


@pytest.fixture
def batch(tmp_path: Path) -> Path:
    file = tmp_path / "batch.json"
    arguments = ["--trace", TRACES / "azure_code.csv", "--verifies", "2", "--trees", "--decodes", 9]
    done = nostall_here("serving", "batch", *map(str, arguments), "--out", str(file))
    assert done.code == 0
    assert f"next:     nostall serving show {file}" in done.out
    return file


@pytest.mark.parametrize("order", ["given", "snake", "lpt", "sorted", "paired"])
def test_show_prints_the_same_units_in_each_order(batch: Path, order: str) -> None:
    options = ("--units-per-program", "2", "--programs", "33", "--format", "json")
    document = nostall_here("serving", "show", str(batch), "--order", order, *options).json
    given = nostall_here("serving", "show", str(batch), "--order", "given", *options).json
    assert sorted(document["tasks"]) == sorted(given["tasks"])
    assert document["reductions"] == given["reductions"]
    summary = document["summary"]
    assert summary["units"] == len(document["tasks"]) == document["program_offsets"][-1]
    assert summary["programs"] == (33 if order != "sorted" else summary["units"])
    assert sum(kind["units"] for kind in summary["kinds"]) == summary["units"]
    assert {kind["stage"] for kind in summary["kinds"]} == {"prefill", "decode", "verify"}
    assert summary["cost_kind"] == "modelled"


def test_show_fits_into_80_columns(batch: Path) -> None:
    words = ("serving", "show", str(batch), "--split", "512", "--rows", "3")
    done = nostall_here(*words, COLUMNS="80")
    assert done.code == 0
    rules = [line for line in done.out.splitlines() if line[:1] == "─"]
    assert rules and max(map(len, rules)) <= 80
    assert "Token-Table: " in done.out
    assert "Reductions: " in done.out
    assert "costs are modelled" in " ".join(done.out.split())


def test_simulate_compares_the_policies(tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({**document(60), "kv_tokens": 100_000}))
    trace = str(TRACES / "mooncake.jsonl")
    arguments = ("serving", "simulate", trace, "--costs", str(costs))
    shown = nostall_here(*arguments, "--requests", "30", "--format", "json").json
    assert shown["kind"] == "modelled"
    assert [policy["policy"] for policy in shown["policies"]] == ["vllm", "xy-serve"]
    assert all(policy["requests"] == 30 for policy in shown["policies"])
    assert all(policy["cached_tokens"] > 0 for policy in shown["policies"])
    table = nostall_here(*arguments, "--requests", "9", "--policy", "xy-serve")
    assert "9 requests of mooncake.jsonl, modelled" in table.out
    assert "vllm" not in table.out


def test_simulate_has_measured_costs(tmp_path: Path) -> None:
    trace = str(TRACES / "mooncake.jsonl")
    words = ("serving", "simulate", trace, "--requests", "9", "--policy", "vllm")
    shown = nostall_here(*words).out
    assert "measured steps (NVIDIA H" in " ".join(shown.split())
    damaged = tmp_path / "costs.json.gz"
    damaged.write_bytes(BUILT_IN.read_bytes()[:1000])
    done = nostall_here(*words, "--costs", str(damaged))
    assert done.code == 2
    assert "benchmarks run serving.step_costs --out FILE" in error_line(done)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("batch",), "give either --name, an example, or --trace"),
        (("batch", "--name", "decodes"), "did you mean 'decode'?"),
        (("show", "BATCH", "--order", "snail"), "order 'snail' is unknown"),
        (("show", "BATCH", "--tiles", "16,x"), "--tiles 16,x; allowed are numbers"),
        (("show", "BATCH", "--tiles", "16,24"), "allowed are multiples of 16"),
        (("show", "BATCH", "--heads", "30"), "30 heads and 8 KV heads"),
        (("show", "BATCH", "--split", "100"), "split 100; allowed are multiples of kv_align 64"),
        (("show", "BATCH", "--costs", "BATCH"), "cost file"),
    ],
)
def test_wrong_usage_is_one_clear_line(
    arguments: tuple[str, ...], message: str, batch: Path
) -> None:
    words = [str(batch) if word == "BATCH" else word for word in arguments]
    done = nostall_here("serving", *words)
    assert message in error_line(done)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("llama9",), "model 'llama9' is unknown"),
        (("qwen2.5-7b", "--ranks", "8"), "28 heads"),
        (("llama3-8b", "--dtype", "int8"), "dtype int8"),
    ],
)
def test_tune_refuses_bad_arguments(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = nostall_here("serving", "tune", *arguments, "--out", str(tmp_path / "table.json"))
    assert message in error_line(done)


def test_tune_without_a_gpu(tmp_path: Path) -> None:
    done = nostall_here("serving", "tune", "llama3-8b", "--out", str(tmp_path / "table.json"))
    assert "no GPU is present" in error_line(done, code=3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--dtype", "int8"), "--dtype int8"),
        (("--head-dim", "256"), "heads of up to 128"),
        (("--kv-heads", "7"), "32 query heads and 7 KV heads"),
    ],
)
def test_search_refuses_bad_arguments(
    batch: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = nostall_here("serving", "search", str(batch), *arguments)
    assert message in error_line(done)


def test_search_without_a_gpu(batch: Path) -> None:
    done = nostall_here("serving", "search", str(batch), CUDA_VISIBLE_DEVICES="")
    assert "no GPU is present" in error_line(done, code=3)


def example_batch(tmp_path: Path, name: str) -> str:
    file = str(tmp_path / f"{name}.json")
    assert nostall_here("serving", "batch", "--name", name, "--out", file).code == 0
    return file


def test_native_without_a_gpu(tmp_path: Path) -> None:
    batch = example_batch(tmp_path, "decode")
    done = nostall_here("serving", "native", batch, CUDA_VISIBLE_DEVICES="")
    assert "no GPU is present" in error_line(done, code=3)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("prefill", ["--assemble-only"], "the plan for prefill.json is the Gluon kernel"),
        ("decode", ["--dtype", "float32"], "--dtype float32; allowed are"),
        ("decode", ["--head-dim", "256"], "--head-dim 256; plans are searched"),
    ],
)
def test_native_refuses_what_it_cannot_search(
    tmp_path: Path, name: str, options: list[str], message: str
) -> None:
    batch = example_batch(tmp_path, name)
    done = nostall_here("serving", "native", batch, *options)
    assert message in error_line(done)


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 1000,
    "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "options", "code", "message"),
    [
        (None, (), 2, "cannot be read (No such file or directory); give the config.json"),
        ("{", (), 2, "is no JSON"),
        ("\x00\udcff", (), 2, "is no JSON"),
        ('{"architectures": []}', (), 2, "architectures: List should have at least 1 item"),
        (LLAMA, ("--shared", 4000), 2, "requests of 4400 tokens, and the model takes 4096"),
        (
            LLAMA,
            ("--new", 71, "--steps", 64),
            2,
            "allowed are 72 tokens or more; generate more, or give fewer",
        ),
        (LLAMA, ("--prompts", 10**9), 2, "requests at a time; allowed are up to 1024"),
        (LLAMA, ("--shared", 10**12), 2, "requests of up to 131072 tokens"),
        (LLAMA, ("--system", 3000), 2, "a system prompt within the shared tokens"),
        (LLAMA, (), 3, "vLLM is not installed"),
    ],
)
def test_rollouts_that_cannot_be_measured(
    config: object, options: tuple[object, ...], code: int, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    if config is not None:
        text = config if isinstance(config, str) else json.dumps(config)
        file.write_bytes(text.encode(errors="surrogateescape"))
    done = nostall_here("serving", "rollouts", "--model", file, *options, cwd=tmp_path)
    assert message in error_line(done, code)
    assert not (tmp_path / "runs").exists()
