"""The measured suite: order of the cells, their baselines, and the records in the file."""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from benchmarks.harness.schema import Configuration, read
from benchmarks.kernels.suite import entries
from benchmarks.sass.robustness.kill_resume import Synthetic
from benchmarks.sass.suite import measure_cells, missing_cells

from benchmarks.harness import gpu_pool
from nostall.gpu import Device, Kernel, MeasurementPlan


class InlineWorker:
    """A fake GPU process in this process; jobs and results are pickled as in a real one."""

    def __init__(self, gpu: str) -> None:
        self.gpu = gpu

    def call(self, function: Callable[[Any], Any], job: Any, seconds: float) -> Any:
        return pickle.loads(pickle.dumps(function(pickle.loads(pickle.dumps(job)))))

    def close(self) -> None: ...


@contextmanager
def fake_device(kernel: Kernel, plan: MeasurementPlan) -> Iterator[Device]:
    yield Synthetic(kernel.cubin)


def make_options(**changes: object) -> argparse.Namespace:
    defaults = {
        "seeds": 2,
        "strategy": ["anneal", "sip"],
        "kernel": ["*"],
        "skip": [],
        "seconds": 0.6,
        "policy": None,
    }
    return argparse.Namespace(**{**defaults, **changes})


def test_cells_are_ordered_by_seed_and_start_from_the_fastest_configuration() -> None:
    suite = entries()
    tried = tuple(
        Configuration(**o.model_dump(), us=100.0 - number)
        for number, o in enumerate(suite[1].options)
    )
    cells = missing_cells(suite, {suite[1].name: tried}, make_options(skip=["transpose"]), set())
    kernels = [suite[1].name, "dot_product"]
    keys = [(k, s, n) for n in range(2) for k in kernels for s in ("anneal", "sip")]
    assert [cell.key for cell in cells] == keys
    assert cells[0].options == suite[1].options[-1] and cells[0].baseline == tried
    assert cells[-1].options is None and cells[-1].baseline is None
    remaining = missing_cells(
        suite, {suite[1].name: tried}, make_options(skip=["transpose"]), {keys[0], keys[5]}
    )
    assert [cell.key for cell in remaining] == [
        key for key in keys if key not in (keys[0], keys[5])
    ]


@pytest.mark.slow
def test_records_of_two_gpus_are_in_one_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_pool, "_GpuWorker", InlineWorker)
    out, suite = tmp_path / "suite.json", entries()
    names = [entry.name for entry in suite]
    cells = missing_cells(suite, {}, make_options(seeds=1), set(), fake_device)
    assert len(cells) == 4
    # sip needs no floating-point work, which a transposition does not have
    tried = [cell for cell in cells if (cell.entry.name == "transpose") == (cell.strategy == "sip")]
    measure_cells(tried, names, ["0", "1"], monotonic() + 600, out)
    record, other = sorted(read(out).records, key=lambda each: each.kernel)
    assert (record.kernel, record.strategy, record.seed) == ("dot_product", "anneal", 0)
    assert (other.kernel, other.strategy) == ("transpose", "sip")
    capsys.readouterr()
    assert record.modelled is not None and 10 <= len(record.modelled.us) <= 300
    assert record.candidates > 12 and record.faults == record.details["fates"]["fault"] > 0
    measure_cells(cells, names, ["0"], monotonic() - 1, out)
    assert sorted(read(out).records, key=lambda each: each.kernel) == [record, other]
    assert "4 of 4 are left" in capsys.readouterr().out
