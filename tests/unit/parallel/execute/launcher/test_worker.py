"""The process of one rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

pytest.importorskip("torch")

from nostall.parallel.execute.run_config import RunConfig

WAITS = """
import datetime, runpy, torch.distributed
from nostall.parallel.execute.parts import any_plan

def wait(path):
    print("waits", flush=True)
    torch.distributed.TCPStore("127.0.0.1", 0, 2, True, datetime.timedelta(seconds=60))

any_plan.load_any_plan = wait
runpy.run_module("nostall.parallel.execute.launcher.worker", run_name="__main__")
"""


@pytest.mark.slow
def test_an_interrupt_ends_a_rank_that_waits_for_another(tmp_path: Path) -> None:
    config = tmp_path / "run_config.json"
    run = RunConfig("plan.json", "m.py:build", 1, "cpu", "auto", check=False, deadline=60.0)
    config.write_text(json.dumps(asdict(run)))
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS, config], stdout=subprocess.PIPE,
        env={**os.environ, "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
    )  # fmt: skip
    with process:
        assert process.stdout is not None and process.stdout.readline() == b"waits\n"
        time.sleep(0.5)
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.wait(60)
    assert process.returncode == -signal.SIGINT and time.monotonic() - begin < 10
