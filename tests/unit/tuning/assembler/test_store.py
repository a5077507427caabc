"""Cubins that were assembled anew: recorded, delivered, verified again, exported and imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from nostall.ptx.assemble.versions import Assembler, find_assemblers
from nostall.search.orders.random_orders import RandomOrders
from nostall.store import BadBundle, Row, Store, bundle
from nostall.store.artefacts import RECIPE, content_hash
from nostall.store.repair import repair
from nostall.tuning.assembler.job import tune_assembler
from nostall.tuning.assembler.recipes import verify_stored
from nostall.tuning.assembler.recipes.recipe import StoredRecipe
from nostall.tuning.job import TuningResult
from nostall.tuning.records.store_records import import_bundle, record_result, rejection_reason
from nostall.tuning.settings import Settings
from nostall.tuning.sources.source import Source
from tests.unit.tuning.assembler.kernel import PTX, TimedDevice, make_source, open_inline

SETTINGS = Settings("assembler", evaluations=30, objective="gpu", rounds=8, checks=2)
INFO = {"gpu": "Fake"}


@dataclass(frozen=True)
class Tuned:
    source: Source
    result: TuningResult


@pytest.fixture(scope="module")
def installed() -> list[Assembler]:
    return find_assemblers()[:1]


@pytest.fixture(scope="module")
def tuned(installed: list[Assembler]) -> Iterator[Tuned]:
    source = make_source(installed[0])
    with (
        pytest.MonkeyPatch.context() as patch,
        open_inline(source, installed, patch) as setup,
    ):
        result = tune_assembler(setup, RandomOrders(), SETTINGS, TimedDevice(source.cubin))
    assert result.improved
    yield Tuned(source, result)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def row(store: Store, tuned: Tuned) -> Row:
    return record_result(store, tuned.source, SETTINGS, tuned.result, INFO)


def export(store: Store, tmp_path: Path) -> Path:
    path = tmp_path / "bundle"
    bundle.write(store, store.rows(), path)
    return path


def record_with(store: Store, row: Row, recipe: StoredRecipe) -> None:
    """Replace a record by one with another recipe, all hashes being right."""
    contents = store.contents(row)
    data = recipe.to_bytes()
    changed = contents.provenance.model_copy(update={"recipe": content_hash(data)})
    store.remove(row)
    store.record(contents.original, contents.optimised, changed, recipe=data)


def test_the_store_delivers_the_cubin_and_verifies_it_by_its_recipe(
    store: Store, row: Row, tuned: Tuned
) -> None:
    found = store.lookup(tuned.source.cubin, gpu="Fake").cubin
    assert found is not None and found.data == tuned.result.cubin
    assert rejection_reason(store, row) is None
    provenance = store.provenance(row)
    assert provenance.recipe is not None and provenance.settings["strategy"] == "assembler"
    stored = StoredRecipe.from_bytes(store.artefacts.get(provenance.recipe, RECIPE))
    assert stored.ptx == PTX and stored.recipe.original is not None
    assert not any("original order" in note for note in provenance.notes)


def test_a_record_is_imported_after_it_was_made_again(
    store: Store, row: Row, tmp_path: Path, tuned: Tuned
) -> None:
    other = Store(tmp_path / "other")
    (imported,) = import_bundle(other, export(store, tmp_path))
    assert imported == replace(row, source="imported")
    found = other.lookup(tuned.source.cubin, gpu="Fake").cubin
    assert found is not None and found.data == tuned.result.cubin
    assert other.contents(imported) == store.contents(row)


def test_without_its_ptxas_a_record_is_not_imported(
    store: Store, row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = export(store, tmp_path)
    monkeypatch.setattr(verify_stored, "find_assemblers", list)
    other = Store(tmp_path / "other")
    with pytest.raises(BadBundle, match="cannot be made again here: the recipe needs ptxas"):
        import_bundle(other, path)
    assert not other.rows()
    # The machine that tuned the kernel keeps the record when it loses that ptxas.
    assert rejection_reason(store, row) is None


def test_a_recipe_of_another_kernel_is_refused(store: Store, row: Row, tmp_path: Path) -> None:
    """The recipe is consistent, and its PTX computes something else than the original."""
    contents = store.contents(row)
    assert contents.recipe is not None
    stored = StoredRecipe.from_bytes(contents.recipe)
    other = Store(tmp_path / "forged")
    # The original is replaced by the result, of which the PTX is not the source.
    original = contents.optimised
    optimised = contents.original
    changed = contents.provenance.model_copy(
        update={"original": content_hash(original), "optimised": content_hash(optimised)}
    )
    other.record(original, optimised, changed, recipe=contents.recipe)
    with pytest.raises(BadBundle, match="is not that of the recipe"):
        import_bundle(Store(tmp_path / "importing"), export(other, tmp_path))

    swapped = contents.original.replace(b"scale", b"sbale")
    changed = contents.provenance.model_copy(update={"original": content_hash(swapped)})
    third = Store(tmp_path / "third")
    third.record(swapped, contents.optimised, changed, recipe=stored.to_bytes())
    with pytest.raises(BadBundle, match="not that of the original cubin"):
        import_bundle(Store(tmp_path / "importing"), export(third, tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state": "{}"}, "rejects the cubin"),
        ({"candidate_ptx": "0" * 64}, "the order in the recipe gives another PTX"),
        ({"code": "0" * 64}, "is not that of the recipe"),
        ({"original": None}, "made the original from its PTX"),
        ({"arguments": ("--gpu-name=sm_80", "--opt-level", "0")}, "the assembled code"),
    ],
)
def test_a_changed_recipe_is_not_imported(
    store: Store, row: Row, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    recipe = store.contents(row).recipe
    assert recipe is not None
    stored = StoredRecipe.from_bytes(recipe)
    changed = stored.model_copy(update={"recipe": stored.recipe.model_copy(update=change)})
    record_with(store, row, changed)
    with pytest.raises(BadBundle, match=message):
        import_bundle(Store(tmp_path / "importing"), export(store, tmp_path))


def test_files_of_recipes_go_with_their_record(store: Store, row: Row, tuned: Tuned) -> None:
    recipe = store.provenance(row).recipe
    assert recipe is not None
    path = store.artefacts.path(recipe, RECIPE)
    os.utime(path, (0, 0))
    other = make_source(find_assemblers()[0])
    assert other.cubin == tuned.source.cubin
    repair(store)
    store.index.set_aside()
    assert repair(store).rows == (replace(row, source="repaired"),)
    store.remove(store.rows()[0])
    assert not path.exists() and not store.rows()


def test_an_old_recipe_stays_while_a_record_names_it(
    store: Store, row: Row, tuned: Tuned, tmp_path: Path
) -> None:
    recipe = store.provenance(row).recipe
    assert recipe is not None
    os.utime(store.artefacts.path(recipe, RECIPE), (0, 0))
    again = record_result(store, tuned.source, replace(SETTINGS, seed=9), tuned.result, INFO)
    assert again.id != row.id and store.contents(row).recipe == store.contents(again).recipe
    store.remove(again)
    assert rejection_reason(store, row) is None
