"""The soak of the store: a short run loses nothing, and a lost or wrong record is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.store import soak
from nostall.store import Store


def test_a_short_soak_loses_nothing(tmp_path: Path) -> None:
    counts = soak.soak(tmp_path / "home", kills=12, processes=3, per_round=9)
    assert counts.kills >= 12
    assert counts.acknowledged > 0 and counts.lookups > 0
    assert (counts.lost, counts.wrong_bytes, counts.leftovers) == (0, 0, 0), counts.examples


@pytest.fixture
def experiment(tmp_path: Path) -> soak.Soak:
    """An experiment whose processes acknowledged two records."""
    made = soak.Soak(tmp_path, 0, 0)
    for key in ("one", "two"):
        soak.record(Store(tmp_path), key)
        made.acknowledged.add(key)
    return made


def test_a_lost_record_is_noticed(experiment: soak.Soak) -> None:
    experiment.check("now")
    assert experiment.counts.lost == 0
    store = Store(experiment.root)
    store.index.remove(store.rows()[0].id)
    experiment.check("now")
    assert (experiment.counts.checked, experiment.counts.lost) == (4, 1)


def test_another_recipe_is_noticed(experiment: soak.Soak, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len({soak.recipe(str(key)) is None for key in range(20)}) == 2
    recipe = soak.recipe
    monkeypatch.setattr(soak, "recipe", lambda key: b"another" if key == "one" else recipe(key))
    experiment.check("now")
    assert experiment.counts.lost == 1


def test_remains_are_noticed(experiment: soak.Soak, monkeypatch: pytest.MonkeyPatch) -> None:
    Store(experiment.root).artefacts.file(b"nobody's", "cubin")
    experiment.age()
    assert experiment.counts.leftovers == 0
    monkeypatch.setattr(Store, "_collect", lambda self: None)
    Store(experiment.root).artefacts.file(b"nobody's", "cubin")
    experiment.age()
    assert experiment.counts.leftovers == 1


@pytest.mark.parametrize("kind", soak.DAMAGES)
def test_records_are_found_after_each_kind_of_damage(experiment: soak.Soak, kind: str) -> None:
    experiment.damage(kind)
    experiment.check(kind)
    assert experiment.counts.lost == 0, experiment.counts.examples
