"""The suite's missing_cells: what is measured in which order, from where, and what is kept of it."""

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
from benchmarks.sass.kill_resume import Synthetic
from benchmarks.sass.suite import measure_cells, missing_cells

from benchmarks.harness import gpu_pool
from nostall.gpu import Device, Kernel, MeasurementPlan


class Inline:
    """A GPU's process that is this one; what goes there and back can be sent."""

    def __init__(self, gpu: str) -> None:
        self.gpu = gpu

    def call(self, function: Callable[[Any], Any], job: Any, seconds: float) -> Any:
        return pickle.loads(pickle.dumps(function(pickle.loads(pickle.dumps(job)))))

    def close(self) -> None: ...


@contextmanager
def pretended(kernel: Kernel, plan: MeasurementPlan) -> Iterator[Device]:
    yield Synthetic(kernel.cubin)


def asked(**changes: object) -> argparse.Namespace:
    given = {
        "seeds": 2,
        "strategy": ["anneal", "sip"],
        "kernel": ["*"],
        "skip": [],
        "seconds": 0.6,
        "policy": None,
    }
    return argparse.Namespace(**{**given, **changes})


def test_the_matrix_goes_seed_by_seed_from_the_fastest_configuration() -> None:
    suite = entries()
    tried = tuple(
        Configuration(**o.model_dump(), us=100.0 - number)
        for number, o in enumerate(suite[1].options)
    )
    cells = missing_cells(suite, {suite[1].name: tried}, asked(skip=["transpose"]), set())
    kernels = [suite[1].name, "dot_product"]
    wanted = [(k, s, n) for n in range(2) for k in kernels for s in ("anneal", "sip")]
    assert [cell.key for cell in cells] == wanted
    assert cells[0].options == suite[1].options[-1] and cells[0].baseline == tried
    assert cells[-1].options is None and cells[-1].baseline is None
    again = missing_cells(
        suite, {suite[1].name: tried}, asked(skip=["transpose"]), {wanted[0], wanted[5]}
    )
    assert [cell.key for cell in again] == [
        key for key in wanted if key not in (wanted[0], wanted[5])
    ]


def test_a_matrix_over_two_gpus_becomes_one_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_pool, "_GpuWorker", Inline)
    out, suite = tmp_path / "suite.json", entries()
    names = [entry.name for entry in suite]
    cells = missing_cells(suite, {}, asked(seeds=1), set(), pretended)
    assert len(cells) == 4
    # sip needs floating-point work, which a transposition has none of
    tried = [cell for cell in cells if (cell.entry.name == "transpose") == (cell.strategy == "sip")]
    measure_cells(tried, names, ["0", "1"], monotonic() + 600, out)
    (made,) = read(out).records
    assert (made.kernel, made.strategy, made.seed) == ("dot_product", "anneal", 0)
    assert "('transpose', 'sip', 0): left out" in capsys.readouterr().out
    assert made.modelled is not None and 10 <= len(made.modelled.us) <= 300
    assert made.candidates > 12 and made.faults == made.details["fates"]["fault"] > 0
    measure_cells(cells, names, ["0"], monotonic() - 1, out)
    assert read(out).records == (made,)
    assert "4 of 4 are left" in capsys.readouterr().out
