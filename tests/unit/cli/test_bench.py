"""Tests of ``nostall bench`` with a fake device, and without a GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nostall.cli import bench as command
from nostall.cli import main
from nostall.core import BadInput, MissingPart
from nostall.gpu import Kernel, MeasurementPlan, Outcome, Timing, sanitizer
from nostall.gpu.sanitizer import SanitizerReport
from nostall.sass.binary.cubin import Cubin
from tests.e2e.cli import LAUNCH, SMALL, error_line, nostall

ORIGINAL = SMALL.read_bytes()


class FakeGpu:
    """A device on which the last byte of a cubin decides its outcome.

    2: 20 % faster than the original; others: wrong outputs. A cold cache costs 1 us.
    """

    info: Mapping[str, str] = {"gpu": "Fake 9000"}

    def __init__(self, kernel: Kernel, plan: MeasurementPlan) -> None:
        if kernel.launch.trips:
            raise BadInput(f"{kernel.name} is not deterministic: 3 words of its outputs differ")
        self.plan = plan

    def __enter__(self) -> FakeGpu:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def evaluate(self, cubin: bytes) -> Outcome:
        raise AssertionError("bench only compares")

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        assert checks == self.plan.inputs + 1 or self.plan.tolerance is not None
        if rounds == 3:
            return Outcome("hang", detail="no answer within 11.5 s")
        if cubin == ORIGINAL or cubin.endswith(b"2"):
            original = (10e-6 + 1e-6 * self.plan.cold) * np.linspace(1.0, 1.001, rounds)
            factor = 1.0 if cubin == ORIGINAL else 0.8
            samples = (tuple(original * k) for k in (1.0, factor, 1.0))
            return Outcome("timed", Timing(*samples))
        return Outcome("wrong", detail="3 words of the outputs differ on fresh input 0")


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "LocalGpu", FakeGpu)


@pytest.fixture
def candidate(tmp_path: Path) -> Path:
    """A cubin that differs from the original."""
    path = tmp_path / "b.cubin"
    path.write_bytes(ORIGINAL + b"2")
    Cubin.parse(path.read_bytes())
    return path


def run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *args: object
) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the command in this process."""
    monkeypatch.setattr(sys, "argv", ["nostall", "bench", *map(str, args)])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as end:
        main()
    output = capfd.readouterr()
    code: Any = end.value.code
    return int(code or 0), output.out, output.err


@pytest.mark.usefixtures("fake_gpu")
def test_without_candidate_the_original_is_compared_with_itself(
    monkeypatch: Any, capfd: Any
) -> None:
    code, out, err = run(monkeypatch, capfd, SMALL, "--launch", LAUNCH)
    assert (code, err) == (0, "")
    assert "transpose on Fake 9000, measured, warm caches" in out
    assert "10.005" in out and "null: original / original is in [1.0000, 1.0000]" in out
    assert "candidate" not in out


@pytest.mark.usefixtures("fake_gpu")
def test_a_candidate_is_compared_with_the_original(
    monkeypatch: Any, capfd: Any, candidate: Path
) -> None:
    args = [SMALL, "--launch", LAUNCH, "--candidate", candidate]
    code, out, _ = run(monkeypatch, capfd, *args)
    assert code == 0 and "original / candidate: 1.2500 [1.2500, 1.2500]: faster" in out
    code, out, _ = run(monkeypatch, capfd, *args, "--format", "json", "--rounds", 20, "--cold")
    document = json.loads(out)
    assert code == 0 and document["verdict"] == "faster" and document["kind"] == "measured"
    assert document["ratio"] == pytest.approx(1.25) and document["cold"] is True
    assert {name: len(values) for name, values in document["samples"].items()} == {
        "original": 20,
        "candidate": 20,
        "null": 20,
    }
    assert document["medians"]["original"] == pytest.approx(11.0055e-6)


@pytest.mark.usefixtures("fake_gpu")
def test_the_output_states_how_outputs_were_compared(
    monkeypatch: Any, capfd: Any, candidate: Path
) -> None:
    args = [SMALL, "--launch", LAUNCH, "--candidate", candidate]
    code, out, _ = run(monkeypatch, capfd, *args)
    assert code == 0 and "outputs equal the original's bit by bit on 4 random inputs" in out
    args += ["--checks", 1000, "--tolerance", "1e-3,1e-6", "--timing", "cupti"]
    code, out, _ = run(monkeypatch, capfd, *args)
    assert code == 0 and "warm caches, by CUPTI" in out
    assert "equal the original's within rtol 0.001, atol 1e-06 on 1000 random inputs" in out
    code, out, _ = run(monkeypatch, capfd, *args, "--format", "json")
    document = json.loads(out)
    assert (document["checks"], document["timing"]) == (1000, "cupti")
    assert document["tolerance"] == {"rtol": 1e-3, "atol": 1e-6}


@pytest.mark.usefixtures("fake_gpu")
@pytest.mark.parametrize(("answer", "expected"), [("clean", 0), ("errors", 1), ("did not run", 0)])
def test_errors_of_the_sanitizer_set_the_exit_code(
    monkeypatch: Any, capfd: Any, candidate: Path, answer: Any, expected: int
) -> None:
    monkeypatch.setattr(sanitizer, "find", lambda: "compute-sanitizer")
    reports = {
        "memcheck": SanitizerReport("clean"),
        "racecheck": SanitizerReport(answer, "its first words"),
    }
    monkeypatch.setattr(sanitizer, "sanitize", lambda kernel, cubin, plan: reports)
    args = [SMALL, "--launch", LAUNCH, "--candidate", candidate, "--sanitizer"]
    code, out, _ = run(monkeypatch, capfd, *args)
    assert code == expected
    assert f"memcheck: clean\nracecheck: {answer}: its first words" in out
    code, out, _ = run(monkeypatch, capfd, *args, "--format", "json")
    assert code == expected
    assert json.loads(out)["sanitizer"]["racecheck"]["answer"] == answer


@pytest.mark.usefixtures("fake_gpu")
def test_a_missing_sanitizer_is_an_error(monkeypatch: Any, capfd: Any) -> None:
    def raise_missing() -> str:
        raise MissingPart("compute-sanitizer is not on the PATH")

    monkeypatch.setattr(sanitizer, "find", raise_missing)
    code, out, err = run(monkeypatch, capfd, SMALL, "--launch", LAUNCH, "--sanitizer")
    assert (code, out) == (3, "") and len(err.splitlines()) == 1


@pytest.mark.usefixtures("fake_gpu")
def test_candidate_with_wrong_outputs_exits_with_1(
    monkeypatch: Any, capfd: Any, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong.cubin"
    wrong.write_bytes(ORIGINAL + b"1")
    args = [SMALL, "--launch", LAUNCH, "--candidate", wrong]
    code, out, err = run(monkeypatch, capfd, *args)
    assert (code, err) == (1, "")
    assert out.startswith(f"{wrong}: its outputs differ from the original's: 3 words")
    code, out, _ = run(monkeypatch, capfd, *args, "--format", "json")
    assert code == 1 and json.loads(out)["fate"] == "wrong"


@pytest.mark.usefixtures("fake_gpu")
def test_hang_exits_with_1(monkeypatch: Any, capfd: Any) -> None:
    code, out, _ = run(monkeypatch, capfd, SMALL, "--launch", LAUNCH, "--rounds", 3)
    assert code == 1 and out.startswith(f"{SMALL}: it hangs: no answer")


@pytest.mark.usefixtures("fake_gpu")
def test_a_nondeterministic_kernel_is_an_error(
    monkeypatch: Any, capfd: Any, tmp_path: Path
) -> None:
    launch = tmp_path / "spec.toml"
    launch.write_text(LAUNCH.read_text() + "\n[trips]\n0 = 2\n")
    code, out, err = run(monkeypatch, capfd, SMALL, "--launch", launch)
    assert (code, out) == (2, "")
    assert "transpose is not deterministic" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "--launch"),
        (["--launch", LAUNCH, "--rounds", 1], "2 or more"),
        (["--launch", LAUNCH, "--candidate", "/nothing.cubin"], "/nothing.cubin"),
        (["--launch", LAUNCH, "--seed", -1], "--seed is -1"),
        (["--launch", LAUNCH, "--checks", 0], "--checks is 0"),
        (["--launch", LAUNCH, "--timing", "sundial"], "allowed are graph, events, cupti"),
        (["--launch", LAUNCH, "--tolerance", "some"], "--tolerance is 'some'; give rtol"),
        (["--launch", LAUNCH, "--tolerance", "0"], "--tolerance is '0'"),
        (["--launch", LAUNCH, "--tolerance", "1e-3,nan"], "--tolerance is '1e-3,nan'"),
        (["--launch", LAUNCH, "--tolerance", "1,2,3"], "--tolerance is '1,2,3'"),
    ],
)
def test_bad_input_is_reported_on_one_line(
    monkeypatch: Any, capfd: Any, args: list[Any], message: str
) -> None:
    code, out, err = run(monkeypatch, capfd, SMALL, *args)
    assert (code, out) == (2, "") and message in err and len(err.splitlines()) == 1


def test_missing_gpu_is_an_error() -> None:
    """No device is visible, whether or not the machine has one."""
    done = nostall("bench", SMALL, "--launch", LAUNCH, CUDA_VISIBLE_DEVICES="-1")
    line = error_line(done, 3)
    assert "GPU" in line or "nostall[gpu]" in line
