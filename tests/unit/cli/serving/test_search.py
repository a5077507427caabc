"""What ``nostall serving search`` prints, with a search that finds what the test says."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from nostall.cli.serving import search
from nostall.serving.attention.rules import Kind
from nostall.serving.attention.winners import on_gpu
from nostall.serving.batch.batch_file import dump_batch
from nostall.serving.batch.examples import example


@pytest.mark.parametrize(
    ("kind", "is_unused"), [("verify", True), ("decode and verify", False), ("decode", False)]
)
def test_a_plan_that_the_plug_in_does_not_use_is_named(
    kind: Kind,
    is_unused: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    compared = SimpleNamespace(ratio=1.02, low=1.01, high=1.03)
    found = SimpleNamespace(comparison=compared, evaluations=7)
    stored = tmp_path / "plan.json"
    monkeypatch.setattr(
        on_gpu,
        "search_on_gpu",
        lambda *given: on_gpu.Outcome(kind, found, stored),  # type: ignore[arg-type]
    )
    batch = tmp_path / "batch.json"
    batch.write_text(dump_batch(example("decode")))
    search.search(batch)
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{kind}: 7 plans; rule / best: 1.020" in printed
    assert ("does not use plans of verify" in printed) is is_unused
