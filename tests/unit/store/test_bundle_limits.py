"""Limits of bundles: as the reference states them, and as the bytes of all records together."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nostall.store import BadBundle, Store, bundle
from nostall.store.artefacts import content_hash
from nostall.store.store import Contents
from tests.unit.store.records import provenance

REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "store.md"
UNITS = {"": 1, "MiB": 2**20, "GiB": 2**30}


def test_the_reference_states_the_limits() -> None:
    table = REFERENCE.read_text().partition("| Limit | Value |")[2].partition("\n\n")[0]
    numbers = re.findall(r"(?<=[|,+] )([\d,]+) (?:(MiB|GiB)|times|\|)", table)
    stated = [int(number.replace(",", "")) * UNITS[unit] for number, unit in numbers]
    assert stated == [
        bundle.MAX_RECORDS,
        bundle.MAX_CUBIN_BYTES,
        bundle.MAX_RECIPE_BYTES,
        bundle.MAX_JSON_BYTES,
        bundle.FREE_BYTES,
        bundle.MAX_RATIO,
        bundle.MAX_TOTAL_BYTES,
    ]


@given(
    pairs=st.lists(st.tuples(st.integers(0, 3), st.integers(4, 7)), min_size=1, unique=True),
    sizes=st.lists(st.integers(1, 3000), min_size=8, max_size=8),
    slack=st.integers(-40, 40),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_different_files_count_once_and_each_read_counts(
    pairs: list[tuple[int, int]],
    sizes: list[int],
    slack: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The limit on unpacked bytes is of different cubins, that on bytes to read is of all."""
    cubins = [bytes([number]) * size for number, size in enumerate(sizes)]
    folder = tmp_path_factory.mktemp("limits")
    store = Store(folder / "home")
    records = [
        Contents(cubins[a], cubins[b], provenance(cubins[a], cubins[b], kernel=f"k{a}{b}"))
        for a, b in pairs
    ]
    store.record_all(records)
    bundle.write(store, store.rows(), folder / "b")
    different = sum(len(cubins[n]) for n in {n for pair in pairs for n in pair})
    to_read = sum(len(cubins[n]) for pair in pairs for n in pair)
    json_bytes = sum(len(record.provenance.to_bytes()) for record in records)
    for name, needed in (("FREE_BYTES", max(different, json_bytes)), ("MAX_TOTAL_BYTES", to_read)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bundle, "MAX_RATIO", 0)
            patch.setattr(bundle, "FREE_BYTES", 1 << 30)
            patch.setattr(bundle, name, needed + slack)
            # The JSON files count against each limit, too, before the cubins do.
            if slack >= 0 and needed + slack >= json_bytes:
                assert len(list(bundle.read(folder / "b"))) == len(records)
            else:
                with pytest.raises(BadBundle, match="would unpack to"):
                    bundle.read(folder / "b")


def test_members_have_the_earliest_time_that_a_zip_file_can_have(tmp_path: Path) -> None:
    """So a bundle depends on its records only; an earlier time is an error of zipfile."""
    store = Store(tmp_path / "home")
    store.record(b"a", b"b", provenance(b"a", b"b"))
    bundle.write(store, store.rows(), tmp_path / "b")
    with zipfile.ZipFile(tmp_path / "b") as archive:
        times = {info.date_time for info in archive.infolist()}
    assert times == {zipfile.ZipInfo("x").date_time}


def test_a_bundle_keeps_recipes(tmp_path: Path) -> None:
    store = Store(tmp_path / "home")
    recipe = b"recipe" * 100
    made = provenance(b"a", b"b", recipe=content_hash(recipe))
    rows = [store.record(b"a", b"b", made, recipe=recipe)]
    rows.append(store.record(b"a", b"c", provenance(b"a", b"c")))
    assert [store.contents(row).recipe for row in rows] == [recipe, None]
    bundle.write(store, rows, tmp_path / "b")
    found = {record.optimised: record.recipe for record in bundle.read(tmp_path / "b")}
    assert found == {b"b": recipe, b"c": None}
