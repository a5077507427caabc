"""What is written on the command line of `nostall fuse`."""

from __future__ import annotations

from pathlib import Path

import pytest

from nostall.core.errors import BadInput
from nostall.tuning.fusing.inputs import NumberInput, TensorInput, named, parse_inputs, torch_dtype


def test_tensors_and_numbers_in_one_line() -> None:
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
    ("text", "said"),
    [
        ("", "input '' is not understood"),
        ("8y8", "'8y8' is not understood; write 4096x5000:f16"),
        ("8x8:f17", "dtype 'f17' is unknown; allowed are f64, "),
        ("=x", "'=x' is no number"),
        ("-3x4", "'-3x4' is not understood"),
        ("4294967296x4294967296", "more elements than can be counted"),
    ],
)
def test_what_is_no_input_is_said(text: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        parse_inputs(text)


@pytest.mark.parametrize("target", ["f.py", "f:x", "f.py:", "f.py:a-b", ""])
def test_what_names_no_function_is_said(target: str) -> None:
    with pytest.raises(BadInput, match=r"write path\.py:FUNCTION"):
        named(target)


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no file"):
        named(f"{tmp_path}/f.py:norm")
