"""Options of the backend: parsing, validation, and the old keys."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from nostall.attach.torch_compile.options import Options, parse_options
from nostall.attach.torch_compile.rewrite.compilers import inductor_patches
from nostall.core.errors import BadInput


def test_options_with_the_prefix_are_nostalls_and_all_others_inductors() -> None:
    given = {"nostall.fuse": "all", "nostall.seconds": 2, "max_autotune": True}
    options, inductor = parse_options(given)
    assert (options.fuse, options.seconds) == ("all", 2)
    assert inductor == {"max_autotune": True}
    assert inductor_patches("max-autotune-no-cudagraphs", inductor)["max_autotune"] is True


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("nostall.fuse", "some", "'reductions' or 'all'"),
        ("nostall.background", 1, "True or False"),
        ("nostall.seconds", 0, "above 0"),
        ("nostall.tuned_plans", -1, "at least 0"),
        ("nostall.speed", 1, "known are nostall.fuse"),
    ],
)
def test_an_invalid_option_is_an_error_that_names_what_is_allowed(
    name: str, value: Any, message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        parse_options({name: value})


def test_old_keys_are_accepted() -> None:
    options, _ = parse_options({"nostall.extent": "all", "nostall.rest": "eager"})
    assert options == Options(fuse="all", fallback="eager")
    assert parse_options({"nostall.race": 0})[0] == Options(tuned_plans=0)


def test_an_option_by_its_old_and_its_new_key_is_an_error() -> None:
    with pytest.raises(BadInput, match=r"nostall\.fuse is set twice"):
        parse_options({"nostall.extent": "all", "nostall.fuse": "all"})
