"""Numbers of foreach calls: equal ones are one number, and a zero keeps its sign."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="lists of tensors need the extra nostall[torch]")

from nostall.fusion.lists.calls import _frozen


def test_equal_numbers_are_one_number() -> None:
    assert _frozen([0.5, 0.5, 0.5]) == 0.5
    assert _frozen([0.5, 0.25]) == (0.5, 0.25)


@pytest.mark.parametrize("numbers", [[0.0, -0.0], [1, 1.0], [1, True]])
def test_numbers_that_differ_in_sign_or_type_stay_apart(numbers: list[float]) -> None:
    assert isinstance(_frozen(numbers), tuple)
