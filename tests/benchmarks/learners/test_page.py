"""The page of the learners, and the splits that hide kinds."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="the learners need the extra nostall[learn]")

from benchmarks.learners.hidden_kinds import development_splits, held_out_splits, hidden_pool, load
from benchmarks.learners.page import PAGE, text


def test_the_page_is_what_the_command_writes() -> None:
    assert PAGE.read_text() == text(), "run `python -m benchmarks page learners`"


def test_kinds_of_the_tests_are_hidden_in_no_development_split() -> None:
    documents = load()
    pool = set(hidden_pool(sorted({d.kind for d in documents})))
    assert len(documents) == 400 and len(pool) == 8
    for split in development_splits(documents):
        assert not pool & set(split.kinds.tolist())
        assert not (split.is_labelled & split.is_new).any()
    numbers = []
    for split in held_out_splits(documents):
        assert set(split.hidden) <= pool
        assert 0.4 < np.mean(split.is_labelled[~split.is_new]) < 0.6
        numbers.append(len(split.hidden))
    assert set(numbers) == {1, 2, 3, 4}
