"""Words for the steps of a search, in place of the names of the search's operators."""

from __future__ import annotations

import pytest

from nostall.report.tune.change_words import change_words, setting_words


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("reorder sigma=1", "a small change of the order"),
        ("reorder sigma=3 all", "a medium change of the order"),
        ("reorder sigma=8 hot", "a large change of the order, in the blocks that take the time"),
        ("reorder sigma=2", "a change of the order"),
        ("immigrant sigma=3", "a new order, not made from an earlier one"),
        ("random order sigma=3", "a new order, not made from an earlier one"),
        ("recombine 3", "blocks of two earlier candidates together"),
        ("portfolio 12", "a setting that is tried for every kernel"),
        ("moves lever x1", "1 setting changed: ptxas version, options, registers or cache hints"),
        ("moves lever x2", "2 settings changed: ptxas version, options, registers or cache hints"),
        ("annealed", "annealed"),
    ],
)
def test_an_operator_of_the_search_has_words(name: str, words: str) -> None:
    assert change_words(name) == words


def test_a_number_of_hints_says_what_they_are() -> None:
    assert setting_words("16 hints") == "other cache hints at 16 loads or stores"
    assert setting_words("at most 128 registers") == "at most 128 registers"
