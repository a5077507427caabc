"""The verifier accepts the machine code that needed a new in-order rule."""

from __future__ import annotations

from pathlib import Path

import pytest

from nostall.sass import validate

CUBINS = sorted((Path(__file__).parent / "reordered").glob("*.cubin"))


@pytest.mark.parametrize("path", CUBINS, ids=lambda path: path.stem)
def test_it_is_accepted(path: Path) -> None:
    verdict = validate(path.read_bytes())
    assert verdict.checked > 400
    assert verdict.findings == ()
