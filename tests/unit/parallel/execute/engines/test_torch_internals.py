"""Private parts of torch: the installed version has all; an error names a missing one."""

from __future__ import annotations

import pytest

from nostall.core.errors import MissingPart

pytest.importorskip("torch")

from nostall.parallel.execute.engines import torch_internals


def test_the_installed_torch_has_every_part() -> None:
    assert torch_internals.missing_part() == ""
    torch_internals.require_parts()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("schedules._Action.no_such", r"schedules\._Action\.no_such"),
        ("_no_such_module.stage_backward_input", r"_no_such_module"),
        ("stage.PipelineStage", r"PipelineStage\(no_such=\)"),
    ],
)
def test_a_missing_part_is_named(path: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_internals, "_PARTS", {path: ("no_such",)})
    torch_internals.missing_part.cache_clear()
    with pytest.raises(MissingPart, match=message) as error:
        torch_internals.require_parts()
    torch_internals.missing_part.cache_clear()
    assert error.value.exit_code == 3 and "--engine p2p" in str(error.value)
