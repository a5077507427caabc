"""Tests of the parser for `nostall fuse` arguments."""

from __future__ import annotations

from pathlib import Path

import pytest

from nostall.core.errors import BadInput
from nostall.tuning.fusing.inputs import (
    NumberInput,
    TensorInput,
    parse_inputs,
    parse_target,
    torch_dtype,
)


def test_tensors_and_numbers_are_parsed() -> None:
    assert parse_inputs("4096x5000:f16, 5000:bfloat16,8,scalar:i64,=0.1,=3,=True") == [
        TensorInput((4096, 5000), "float16"),
        TensorInput((5000,), "bfloat16"),
        TensorInput((8,), "float32"),
        TensorInput((), "int64"),
        NumberInput(0.1),
        NumberInput(3),
        NumberInput(True),
    ]
    assert parse_inputs("=True")[0] != NumberInput(False)
    assert torch_dtype("e4m3") == "float8_e4m3fn"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "input '' is invalid"),
        ("8y8", "'8y8' is invalid; write 4096x5000:f16"),
        ("8x8:f17", "dtype 'f17' is unknown; allowed are f64, "),
        ("=x", "'=x' is not a number"),
        ("-3x4", "'-3x4' is invalid"),
        ("4294967296x4294967296", "more than 2\\^62 elements"),
    ],
)
def test_invalid_inputs_are_rejected(text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        parse_inputs(text)


@pytest.mark.parametrize("target", ["f.py", "f:x", "f.py:", "f.py:a-b", ""])
def test_invalid_targets_are_rejected(target: str) -> None:
    with pytest.raises(BadInput, match=r"write path\.py:FUNCTION"):
        parse_target(target)


def test_missing_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no file"):
        parse_target(f"{tmp_path}/f.py:norm")
