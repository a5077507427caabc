"""Each seeded error of the learners' source replaces one line of a module that there is."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="the learners need the extra nostall[learn]")

from benchmarks.learners.source_errors import ERRORS, SourceError


@pytest.mark.parametrize("error", ERRORS.values(), ids=list(ERRORS))
def test_the_line_is_in_its_module_once(error: SourceError) -> None:
    spec = find_spec(error.full_module)
    assert spec is not None and spec.origin is not None
    assert Path(spec.origin).read_text().count(error.right) == 1
