"""Plans on four gloo processes: losses and gradients equal those of training in one process.

In double precision; because sums have another order, a gradient may differ by 1e-9 of the largest
value of its tensor, a loss by 1e-9 of itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.parallel.ranks import CASES, DEADLINE, STEPS, Case

for name in ("torch", "transformers"):
    pytest.importorskip(name, reason="running plans needs the extra nostall[torch-tests]")
ROOT = Path(__file__).parents[4]
TIMEOUT_S = 240


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of all cases by name, and the timeout of a message under "timeout"."""
    folder = tmp_path_factory.mktemp("ranks")
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.parallel.ranks", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    files = {case.name: f"{number}.json" for number, case in enumerate(CASES)}
    return {
        name: json.loads((folder / file).read_text())
        for name, file in {**files, "timeout": "timeout.json"}.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_plan_trains_as_one_process_does(results: dict[str, Any], case: Case) -> None:
    result = results[case.name]
    assert result["engine"] == case.engine
    assert len(result["losses"]) == STEPS
    assert result["losses"] == pytest.approx(result["reference_losses"], rel=1e-9)
    assert result["losses"][-1] < result["losses"][0]
    assert result["worst_gradient"] <= 1


def test_waiting_for_a_message_ends_at_the_deadline_of_the_run(results: dict[str, Any]) -> None:
    """torch's default timeout of new groups is half an hour on gloo."""
    assert results["timeout"]["kind"] == "timeout"
    assert DEADLINE <= results["timeout"]["seconds"] < 30
