"""Kernels that the assembler search was not developed with: results, configurations, options."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.harness.schema import Options
from benchmarks.kernels.unseen import unseen_entries
from benchmarks.ptx.assembler_suite import tried_options

from benchmarks.kernels import suite
from nostall.core import Buffer

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_the_kernels_compute_what_pytorch_does() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.benchmarks.kernels.interpret_kernels"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count(": ok") == 39


def test_each_kernel_has_up_to_six_configurations_whose_launches_fit() -> None:
    for entry in unseen_entries():
        assert len(entry.options) <= 6
        for options in entry.options:
            with suite.import_file(entry.file) as module:
                launch = suite._make_launch(module, entry, options)
            assert launch.num_warps == options.num_warps
            assert any(isinstance(a, Buffer) and a.role == "out" for a in launch.args)


@pytest.mark.parametrize("name", ["sgemm", "stencil", "row_softmax"])
def test_a_file_of_ptx_is_assembled_with_its_launch(name: str) -> None:
    (entry,) = (entry for entry in unseen_entries() if entry.name == name)
    source = suite.build(entry, None)
    assert source.kernel == name
    assert source.ptx is not None
    assert source.launch is not None
    assert source.launch.threads == 256


def test_a_kernel_without_committed_configurations_tries_its_own() -> None:
    triton = unseen_entries()[0]
    ptx = next(entry for entry in unseen_entries() if not entry.options)
    assert tried_options({}, triton, 2) == triton.options
    assert tried_options({}, ptx, 2) == [None]
    assert all(isinstance(options, Options) for options in triton.options)
