"""Plans run on four gloo processes: losses and gradients are those of training in one process.

In double precision; a gradient may differ by 1e-9 of the largest of its tensor, a loss by 1e-9 of
itself (sums in another order).
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
SECONDS = 240


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What every case was, by name."""
    folder = tmp_path_factory.mktemp("ranks")
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.parallel.ranks", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    files = {case.name: f"{number}.json" for number, case in enumerate(CASES)}
    return {
        name: json.loads((folder / file).read_text())
        for name, file in {**files, "late": "late.json"}.items()
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_plan_trains_as_one_process_does(ran: dict[str, Any], case: Case) -> None:
    found = ran[case.name]
    assert found["engine"] == case.engine
    assert len(found["losses"]) == STEPS
    assert found["losses"] == pytest.approx(found["reference_losses"], rel=1e-9)
    assert found["losses"][-1] < found["losses"][0]
    assert found["worst_gradient"] <= 1


def test_waiting_for_a_message_ends_by_the_deadline_of_the_run(ran: dict[str, Any]) -> None:
    """Not by torch's own for new groups, which is half an hour on gloo."""
    assert ran["late"]["kind"] == "timeout"
    assert DEADLINE <= ran["late"]["seconds"] < 30
