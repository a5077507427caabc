"""Each form's word, with any fields, is what nvdisasm prints for it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from benchmarks.sass.distances.microkernels.words import FORMS, branch, word

from nostall.sass.binary import toolchain
from nostall.sass.binary.encoding import WORD_BYTES, Control, encode

_ROW = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")


def disassembled(payloads: Sequence[int], folder: Path) -> list[str]:
    """Text of each word, by nvdisasm."""
    control = Control(stall=5, yields=False)
    file = folder / "words.bin"
    file.write_bytes(b"".join(encode(p, control).to_bytes(WORD_BYTES, "little") for p in payloads))
    tool = str(toolchain.find("nvdisasm"))
    rows = dict(_ROW.findall(toolchain.run([tool, "-b", "SM90a", str(file)], "nvdisasm")))
    texts = {int(offset, 16): text for offset, text in rows.items()}
    return [texts.get(at * WORD_BYTES, "") for at in range(len(payloads))]


def random_fields(names: Sequence[str], rng: np.random.Generator) -> dict[str, int]:
    """Values that every form allows: multiples of 4 for registers, so that tuples are aligned."""
    limits = {"u": 14, "p": 6, "i": 1 << 20}
    return {
        name: int(rng.integers(1, limits.get(name[0], 60))) * (1 if name[0] in "pi" else 4)
        for name in names
    }


@pytest.mark.parametrize("seed", range(2))
def test_forms_with_random_fields_are_what_nvdisasm_prints(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    forms = [form for text, form in FORMS.items() if text != "BRA"]
    fields = [random_fields(form.fields, rng) for form in forms]
    texts = disassembled(
        [word(form.text, **values) for form, values in zip(forms, fields, strict=True)], tmp_path
    )
    for form, values, text in zip(forms, fields, texts, strict=True):
        shown = {k: hex(v) if k == "i" else v for k, v in values.items()}
        assert text.replace("IMAD.SHL", "IMAD") == form.text.format(**shown)


def test_guards_and_branches(tmp_path: Path) -> None:
    payloads = [
        word("MOV R{d}, R{b}", "!P3", d=4, b=5),
        word("UMOV UR{ud}, UR{ub}", "P1", ud=4, ub=5),
        branch(3, "P6"),
        branch(-4),
    ]
    assert disassembled(payloads, tmp_path) == [
        "@!P3 MOV R4, R5",
        "@UP1 UMOV UR4, UR5",
        "@P6 BRA 0x60",
        "BRA 0x0",
    ]


def test_a_value_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="256 does not fit into 8 bits"):
        word("MOV R{d}, R{b}", d=256, b=0)
