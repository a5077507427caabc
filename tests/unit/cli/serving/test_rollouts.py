"""Tests of ``nostall serving rollouts`` on engines that need neither vLLM nor a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from nostall.attach.rollouts import engine
from nostall.attach.rollouts.job import RolloutJob, Settings, run_job
from nostall.attach.rollouts.model import GIB, Memory, Model, ModelConfig
from nostall.attach.rollouts.workload import Rollout
from nostall.cli.report import report
from nostall.cli.serving import app as command
from nostall.cli.serving.app import app
from nostall.core.errors import BadInput, BadRun, MissingPart, NostallError
from tests.unit.attach.rollouts.fake_engine import FakeEngine

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip
NUMBERS = ("--prompts", "2", "--samples", "2", "--shared", "64", "--new", "24", "--steps", "8")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "llama" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(LLAMA))
    return path


class FakeGpu:
    """Starts fake engines, and remembers which were started together."""

    def __init__(self, step_s: dict[str, float], fails_at: int = -1) -> None:
        self.step_s, self.fails_at = step_s, fails_at
        self.started: list[tuple[tuple[str, ...], Settings]] = []

    @contextmanager
    def __call__(
        self, names: Sequence[str], settings: Settings, start_s: float
    ) -> Iterator[list[FakeEngine]]:
        self.started.append((tuple(names), settings))
        yield [FakeEngine(name, self.step_s[name], 0.0, self.fails_at) for name in names]


def job(model: Path, **changes: Any) -> RolloutJob:
    numbers = {"prompts": 2, "samples": 2, "shared": 64, "new": 24, **changes}
    return RolloutJob(Rollout(**numbers), Model.read(model), rounds=4, steps=8)


@pytest.mark.parametrize(("free_gib", "groups"), [(140, 1), (30, 2)])
def test_engines_run_in_turns_if_both_fit_else_one_by_one(
    free_gib: int, groups: int, model: Path
) -> None:
    gpu = FakeGpu({"FLASH_ATTN": 3e-3, "CUSTOM": 1e-3})
    shares: list[float] = []
    found = run_job(job(model), int(free_gib * GIB), lambda share, stage: shares.append(share), gpu)
    assert len(gpu.started) == groups
    assert found["in_turns"] == (groups == 1)
    assert found["ratio"] == pytest.approx(3.0)
    assert found["verdict"] == "faster"
    assert found["engines"]["CUSTOM"]["tokens_per_s"] == pytest.approx(4e3)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_an_engine_that_ends_is_an_error_that_names_it(model: Path) -> None:
    gpu = FakeGpu({"FLASH_ATTN": 3e-3, "CUSTOM": 1e-3}, fails_at=2)
    with pytest.raises(BadInput, match="FLASH_ATTN: the process ended with exit code 1; try"):
        run_job(job(model), int(140 * GIB), lambda share, stage: None, gpu)


def test_memory_is_that_of_weights_and_distinct_tokens(model: Path) -> None:
    config = ModelConfig.model_validate(LLAMA)
    assert config.weight_bytes / 2 == pytest.approx(8.03e9, rel=0.001)
    assert config.key_bytes == 32 * 2 * 8 * 128 * 2
    memory = job(model, prompts=32, samples=8, shared=2048, new=384).memory
    tokens = 32 * 2048 + 256 * (16 + 384 + 16)
    assert memory.cache_gib == pytest.approx(1.05 * tokens * config.key_bytes / GIB, rel=1e-4)
    assert Memory(10.0, 12.0).engines(70) == 2
    assert Memory(10.0, 12.0).engines(60) == 1
    with pytest.raises(BadInput, match=r"needs 30 GiB .* 19 GiB of this GPU are usable"):
        Memory(10.0, 12.0).engines(20)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": 200, "samples": 8}, "1600 requests at a time; allowed are up to 1024"),
        ({"shared": 8190}, "requests of 8230 tokens, and the model takes 8192"),
        ({"new": 15}, "allowed are 16 tokens or more"),
        ({"system": 65}, "a system prompt within the shared tokens"),
    ],
)
def test_numbers_that_do_not_fit_are_named(
    changes: dict[str, int], message: str, model: Path
) -> None:
    with pytest.raises(BadInput, match=message):
        job(model, **changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("{", "it is no JSON"),
        ("[]", "the document"),
        ("{}", "architectures: Field required"),
        (json.dumps({**LLAMA, "num_hidden_layers": 0}), "num_hidden_layers: .* greater than or"),
        (json.dumps({**LLAMA, "vocab_size": "many"}), "vocab_size: .* valid integer"),
    ],
)
def test_a_bad_model_is_named_with_what_to_give(
    text: str | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BadInput, match=f"--model {path}: .*{message}"):
        Model.read(path)


def test_a_folder_with_a_configuration_is_a_model(model: Path) -> None:
    assert Model.read(model.parent) == Model.read(model)
    assert Model.read(model).name == "llama"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeGpu:
    """The command with fake engines, in an empty folder."""
    torch = pytest.importorskip("torch")
    gpu = FakeGpu({"FLASH_ATTN": 3e-3, "CUSTOM": 1e-3})
    monkeypatch.setattr(command, "check_vllm", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(140 * GIB), 0))
    monkeypatch.setattr(command, "run_job", lambda *given: run_job(*given, gpu))
    monkeypatch.chdir(tmp_path)
    return gpu


def test_the_command_prints_a_table_of_80_columns_and_what_to_do_next(
    measured: FakeGpu, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = CliRunner().invoke(app, ["rollouts", "--model", str(model), *NUMBERS, "--out", "r"])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert all(len(line) <= 80 for line in lines[:-1])
    assert "nostall / FLASH_ATTN: 3.000 [3.000, 3.000], null [1.000, 1.000]: faster" in lines
    assert "steps served by nostall: 3 decode" in lines
    assert "left to FLASH_ATTN: 2 prefill steps" in lines
    assert lines[-1] == f"next:     vllm serve {model} --attention-backend CUSTOM"
    record = json.loads(Path("r/run.json").read_text())
    assert (record["status"], record["result"]["verdict"]) == ("done", "faster")
    assert json.loads(Path("r/rollouts.json").read_text())["records"]["CUSTOM"]["rounds"]


def test_turns_fit_into_short_samples(measured: FakeGpu, model: Path) -> None:
    short = ["--prompts", "2", "--samples", "2", "--shared", "64", "--new"]
    for new, steps in (("64", 56), ("9", 1), ("200", 64)):
        arguments = ["rollouts", "--model", str(model), *short, new, "--rounds", "2"]
        done = CliRunner().invoke(app, [*arguments, "--out", new])
        assert done.exit_code == 0, done.output
        assert json.loads(Path(new, "run.json").read_text())["settings"]["steps"] == steps
    done = CliRunner().invoke(app, ["rollouts", "--model", str(model), *short, "8"])
    assert "allowed are 9 tokens or more" in str(done.exception)


def test_there_is_no_page_of_a_run(measured: FakeGpu, model: Path) -> None:
    CliRunner().invoke(app, ["rollouts", "--model", str(model), *NUMBERS, "--out", "r"])
    with pytest.raises(BadRun, match=r"samples are in r/rollouts\.json"):
        report(Path("r"))


def test_the_configuration_of_the_examples_is_a_model(model: Path) -> None:
    example = Path(__file__).parents[4] / "examples" / "serving" / "llama-4-layers"
    found = Model.read(example)
    assert found.name == "llama-4-layers"
    assert job(example / "config.json", new=64, shared=2048).memory.total_gib < 10


def test_another_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "find_spec", lambda name: True)
    monkeypatch.setattr("nostall.attach.vllm.plugin.installed_version", lambda: "0.32")
    with pytest.raises(MissingPart, match=r"vLLM 0\.32 is installed.*allowed is 0\.25"):
        engine.check_vllm()


def test_the_command_advises_what_was_faster(measured: FakeGpu, model: Path) -> None:
    measured.step_s["CUSTOM"] = 3e-3
    done = CliRunner().invoke(app, ["rollouts", "--model", str(model), *NUMBERS])
    assert done.output.splitlines()[-1].endswith("--attention-backend FLASH_ATTN")
    (run,) = Path("runs").iterdir()
    assert "rollouts-2x2_64_24" in run.name


def test_the_command_gives_json_with_the_samples(measured: FakeGpu, model: Path) -> None:
    arguments = ["rollouts", "--model", str(model), *NUMBERS, "--format", "json"]
    done = CliRunner().invoke(app, arguments)
    found = json.loads(done.output)
    assert found["kind"] == "measured"
    assert len(found["records"]["FLASH_ATTN"]["rounds"][0]["turns"]) == 8


def test_a_failed_run_says_so(measured: FakeGpu, model: Path) -> None:
    measured.fails_at = 3
    done = CliRunner().invoke(app, ["rollouts", "--model", str(model), *NUMBERS, "--out", "r"])
    assert isinstance(done.exception, BadInput)
    assert json.loads(Path("r/run.json").read_text())["status"] == "failed"


def test_without_vllm_the_command_says_how_to_get_it(model: Path) -> None:
    pytest.importorskip("torch")
    done = CliRunner().invoke(app, ["rollouts", "--model", str(model), *NUMBERS])
    assert isinstance(done.exception, NostallError)
    assert done.exception.exit_code == 3
    assert "pip install vllm" in str(done.exception) or "no GPU" in str(done.exception)
