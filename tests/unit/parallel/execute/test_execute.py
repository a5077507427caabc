"""Plans on four gloo processes: losses and gradients equal those of training in one process.

In double precision; because sums have another order, a gradient may differ by 1e-9 of the largest
value of its tensor, a loss by 1e-9 of itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.unit.parallel.ranks import CASES, DEADLINE, STEPS, Case

for name in ("torch", "transformers"):
    pytest.importorskip(name, reason="running plans needs the extra nostall[torch-tests]")
ROOT = Path(__file__).parents[4]
TIMEOUT_S = 240


FEW = ("chain 1f1b p2p", "chain 1f1b torch", "chain 3:1, slices of 2, 2 and 1")
"""Cases of `make test`: both engines, and replicas; they trace the smallest model only."""


def run_cases(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """Results of the named cases by name, and the timeout of a message under "timeout"."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.parallel.ranks", str(folder), "fork", *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    files = {case.name: f"{n}.json" for n, case in enumerate(CASES) if case.name in names}
    return {
        name: json.loads((folder / file).read_text())
        for name, file in {**files, "timeout": "timeout.json"}.items()
    }


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_cases(tmp_path_factory.mktemp("few"), FEW)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    names = [case.name for case in CASES if case.name not in FEW]
    return run_cases(tmp_path_factory.mktemp("others"), names)


def check_training(case: Case, result: dict[str, Any]) -> None:
    assert result["engine"] == case.engine
    assert len(result["losses"]) == STEPS
    assert result["losses"] == pytest.approx(result["reference_losses"], rel=1e-9)
    assert result["losses"][-1] < result["losses"][0]
    assert result["worst_gradient"] <= 1


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name in FEW], ids=lambda case: case.name
)
def test_a_plan_of_a_chain_trains_as_one_process_does(few: dict[str, Any], case: Case) -> None:
    check_training(case, few[case.name])


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name not in FEW], ids=lambda case: case.name
)
def test_a_plan_trains_as_one_process_does(others: dict[str, Any], case: Case) -> None:
    check_training(case, others[case.name])


def test_waiting_for_a_message_ends_at_the_deadline_of_the_run(few: dict[str, Any]) -> None:
    """torch's default timeout of new groups is half an hour on gloo."""
    assert few["timeout"]["kind"] == "timeout"
    assert DEADLINE <= few["timeout"]["seconds"] < 30
