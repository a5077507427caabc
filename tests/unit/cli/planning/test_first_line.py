"""``plan`` and ``launch`` say what they do before they import what is slow, on terminals."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from nostall.parallel.evaluation import evaluate_plan
from nostall.parallel.plan import Workload
from nostall.parallel.plan_file import plan_document
from nostall.parallel.planners import make_plan
from tests.unit.parallel.cases import profile, servers

CLUSTER = """
name = "two"
[[servers]]
gpus = 2
memory_gib = 1
link = { bandwidth_gbytes = 10, latency_us = 10 }
"""
PROGRAM = """
import os, sys

class Watch:
    def find_spec(self, name, *rest):
        if name in ("torch", "numba"):
            sys.stderr.write(f"IMPORTS {name}\\n")
            sys.stderr.flush()
            os._exit(0)

sys.meta_path.insert(0, Watch())
from nostall.cli import main
main()
"""


def stderr_until_slow_imports(folder: Path, *given: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *given], cwd=folder, capture_output=True, text=True,
        timeout=120, check=True, env=os.environ | {"FORCE_COLOR": "1", "COLUMNS": "120"},
    )  # fmt: skip
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", done.stderr).splitlines()


def test_plan_says_what_it_does_before_slow_imports(tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text(CLUSTER)
    (tmp_path / "train.py").write_text("")
    given = ("plan", "train.py:build", "--cluster", "two.toml")
    first, *others = stderr_until_slow_imports(tmp_path, *given)
    assert first == "nostall: plans train.py:build on the GPUs of two.toml"
    assert "IMPORTS torch" in others
    assert not any("plans" in line for line in stderr_until_slow_imports(tmp_path, *given, "-q"))


def test_launch_says_what_it_does_before_slow_imports(tmp_path: Path) -> None:
    work = Workload(profile(4, parameters=1e6), servers(1, 2), 4, 1)
    evaluation = evaluate_plan(work, make_plan(work, "even"), "even")
    (tmp_path / "plan.json").write_text(json.dumps(plan_document(evaluation)))
    (tmp_path / "train.py").write_text("")
    given = ("launch", "plan.json", "--module", "train.py:build", "--steps", "3")
    first, *others = stderr_until_slow_imports(tmp_path, *given)
    assert first == "nostall: trains by plan.json, 3 iterations"
    # numba, which simulates the plan, or torch
    assert any(line.startswith("IMPORTS ") for line in others)
