"""Kinds of kernels by launch parameters: features, labels, and the file of labelled launches."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="the learners need the extra nostall[learn]")

from benchmarks.learners.kernels import write_launches

from nostall.core.errors import BadInput
from nostall.workload.learning.kernels import (
    COLUMNS,
    KernelLabeller,
    LabelledLaunch,
    Launch,
    features_of,
    read_launches,
)


def launches(seed: int, models: int = 4) -> list[LabelledLaunch]:
    """Products with many registers and shared memory, and elementwise kernels with few."""
    rng = np.random.default_rng(seed)
    rows = []
    for model in range(models):
        for _ in range(8):
            blocks = int(rng.integers(1, 4000))
            product = Launch(
                (blocks, 1, 1), (256, 1, 1), int(rng.integers(160, 255)), 100_000, 90.5
            )
            copy = Launch((blocks, 1, 1), (128, 1, 1), int(rng.integers(16, 40)), 0, 4.25)
            rows.append(LabelledLaunch(product, "matrix product", f"m{model}"))
            rows.append(LabelledLaunch(copy, "memory-bound", f"m{model}"))
    return rows


def test_features_are_logarithms_of_sizes() -> None:
    launch = Launch((8, 2, 1), (32, 4, 1), 64, 1023, 16.0)
    row = dict(zip(COLUMNS, features_of([launch])[0], strict=True))
    assert row["blocks"] == 4 and row["grid x"] == 3 and row["threads"] == 7
    assert row["registers"] == 64 and row["shared memory"] == 10
    assert row["time"] == 4 and row["time of a block"] == 0


def test_kernels_get_their_kind_and_a_probability() -> None:
    labeller = KernelLabeller(launches(0))
    rows = launches(1)
    labels = labeller.label([row.launch for row in rows])
    assert [label.kind for label in labels] == [row.kind for row in rows]
    assert min(label.probability for label in labels) > 0.8
    assert labeller.label([]) == []


def test_launches_survive_a_file(tmp_path: Path) -> None:
    rows, file = launches(0), tmp_path / "kernels.json.gz"
    write_launches(file, rows)
    assert read_launches(file) == rows


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b'{"format": "other"}', mtime=0), "has the format 'other'"),
        (b"text", "does not hold labelled kernels"),
        (gzip.compress(b"[]", mtime=0), "does not hold labelled kernels"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "kernels.json.gz"
    file.write_bytes(content)
    with pytest.raises(BadInput, match=message):
        read_launches(file)


def test_one_kind_or_one_model_cannot_be_learnt_from() -> None:
    with pytest.raises(BadInput, match="of 1 kinds"):
        KernelLabeller([row for row in launches(0) if row.kind == "memory-bound"])
    with pytest.raises(BadInput, match="and 1 models"):
        KernelLabeller(launches(0, models=1))
