"""Private parts of torch: the installed version has all; one that is missing is named."""

from __future__ import annotations

import pytest

from nostall.core.errors import MissingPart

pytest.importorskip("torch")

from nostall.parallel.execute import private


def test_the_installed_torch_has_every_part() -> None:
    assert private.lacking() == ""
    private.require()


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("schedules._Action.no_such", r"schedules\._Action\.no_such"),
        ("_no_such_module.stage_backward_input", r"_no_such_module"),
        ("stage.PipelineStage", r"PipelineStage\(no_such=\)"),
    ],
)
def test_a_missing_part_is_named(path: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "_PARTS", {path: ("no_such",)})
    private.lacking.cache_clear()
    with pytest.raises(MissingPart, match=said) as told:
        private.require()
    private.lacking.cache_clear()
    assert told.value.exit_code == 3 and "--engine p2p" in str(told.value)
