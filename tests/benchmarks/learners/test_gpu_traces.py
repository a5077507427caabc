"""Kernels of the corpus' models: tensors of the builders, and the compact form of a trace."""

from __future__ import annotations

import numpy as np
import torch
from benchmarks.learners.gpu_traces import compact, finite_tensors, record


def test_new_tensors_are_finite_and_on_the_device_of_the_context() -> None:
    with finite_tensors():
        with torch.device("meta"):
            assert torch.empty(2, 3).is_meta and torch.zeros(2).is_meta
        values = torch.empty(1000)
        assert float(values.min()) >= 0 and float(values.max()) <= 0.05
        assert torch.empty(2, dtype=torch.long).dtype == torch.long


def test_launches_of_one_kernel_with_the_same_parameters_are_one_row() -> None:
    arguments = {
        "grid": [2, 1, 1], "block": [128, 1, 1], "registers per thread": 32, "shared memory": 0,
    }  # fmt: skip
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "dur": 2.5, "args": arguments}
    events = [
        {**kernel, "ts": 10.0},
        {**kernel, "ts": 20.0},
        {**kernel, "ts": 30.0, "args": {**arguments, "registers per thread": 40}},
        {"ph": "X", "cat": "gpu_memcpy", "name": "HtoD", "ts": 40.0, "dur": 1.0, "args": {}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 9.0},
    ]
    names = {"relu": 0}
    row = compact(events, names)
    assert names == {"relu": 0, "gemm": 1}
    assert row["kernels"] == [
        [1, (2, 1, 1), (128, 1, 1), 32, 0, 2, 5.0],
        [1, (2, 1, 1), (128, 1, 1), 40, 0, 1, 2.5],
    ]
    assert row["copies"] == {"HtoD": [1, 1.0]} and row["microseconds"] == 31.0


def test_a_step_is_recorded_without_kernels_on_a_cpu() -> None:
    def builder(rng: np.random.Generator) -> object:
        weights = torch.nn.Parameter(torch.empty(4, 4))
        return lambda: (weights @ weights).sum()

    events = record(builder, np.random.default_rng(0), "cpu", False)
    assert any(event.get("name") == "aten::mm" for event in events)
    assert compact(events, {})["kernels"] == []
