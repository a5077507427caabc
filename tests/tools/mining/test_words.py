"""Texts of words and targets of branches equal those of a listing of whole functions."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
from tools.mining.functions import read_source
from tools.mining.words import WordTexts

from tools.mining import listing

CORPUS = Path(__file__).resolve().parents[2] / "corpus" / "nvcc"
EVERYTHING = 1 << 20
_LINE = re.compile(r"^ +/\*[0-9a-f]{4,}\*/ +(.*?) *; +/\* 0x|^(\.L_x_\d+):", re.MULTILINE)
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_REUSE_AND_TARGET = re.compile(r"\.reuse|`\([^)]*\)|(?<=RET\.REL\.NODEC R)\d.*")


@pytest.mark.parametrize(
    "name",
    [
        "atomics.sm_75",
        "calls.sm_90",
        "calls.sm_120",
        *(pytest.param(f"calls.sm_{sm}", marks=pytest.mark.slow) for sm in (80, 89, 100)),
    ],
)
def test_words_equal_a_full_listing(name: str) -> None:
    sm = int(name.rpartition("_")[2])
    functions = read_source(CORPUS / f"{name}.cubin", 0, EVERYTHING, EVERYTHING).sample[sm]
    for function, found in zip(functions, WordTexts(sm).texts(functions), strict=True):
        text = listing._run_nvdisasm(function.flags, [function.code], ("-ndf",))
        texts: list[str] = []
        labels: dict[str, int] = {}
        for line, label in _LINE.findall(text):
            if label:
                labels[label] = len(texts)
            else:
                texts.append(line)
        named = {labels[name] for line in texts for name in _TARGET.findall(line)}
        assert named <= set(found.labels)  # nvdisasm names some functions that a CALL enters
        assert [_REUSE_AND_TARGET.sub("", t) for t in found.texts] == [
            _REUSE_AND_TARGET.sub("", t) for t in texts
        ]


def test_a_rejected_word_has_no_text() -> None:
    sample = read_source(CORPUS / "atomics.sm_90.cubin", 0, EVERYTHING, EVERYTHING).sample[90]
    words = WordTexts(90)
    words._list(sample[0], [(0xFFF, 0)], [struct.pack("<QQ", 0xFFF, 0)])
    assert words._texts == {(0xFFF, 0): ""}
