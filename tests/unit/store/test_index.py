"""Damage of the index: it is an error, never an empty or a wrong answer, and it can be repaired."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nostall.store import BadStore, Store, Verification
from nostall.store.errors import DamagedIndex
from nostall.store.repair import repair
from tests.unit.store.records import GPU, ORIGINAL, keep, provenance

SECOND = b"second"


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store with several records; tests copy it."""
    store = Store(tmp_path_factory.mktemp("filled") / "home")
    for number in range(4):
        keep(store, f"better {number}".encode(), low=1.01 + number / 100)
    keep(store, b"faster", original=SECOND)
    return store


def _copy(store: Store, folder: Path) -> Store:
    return Store(Path(shutil.copytree(store.root, folder / "copy")))


@pytest.mark.parametrize("content", [b"", b"\0" * 4096, b"SQLite format 3\0", b"text"])
def test_a_file_without_a_table_is_damage(filled: Store, tmp_path: Path, content: bytes) -> None:
    store = _copy(filled, tmp_path)
    store.index.path.write_bytes(content)
    with pytest.raises(DamagedIndex, match="nostall store repair"):
        store.rows()
    with pytest.raises(DamagedIndex):
        store.lookup(ORIGINAL, gpu=GPU)
    with pytest.raises(DamagedIndex):
        keep(store, b"more")
    assert sorted(store.artefacts.names("json")) == sorted(filled.artefacts.names("json"))


def test_a_table_of_another_program_is_damage(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with closing(sqlite3.connect(store.index.path)) as database, database:
        database.execute("CREATE TABLE notes (text TEXT)")
    with pytest.raises(DamagedIndex):
        store.rows()


def test_a_deleted_index_is_damage(filled: Store, tmp_path: Path) -> None:
    store = _copy(filled, tmp_path)
    store.index.path.unlink()
    with pytest.raises(DamagedIndex, match="missing"):
        store.rows()
    with pytest.raises(DamagedIndex, match="missing"):
        keep(store, b"more")


def test_repair_finds_all_records(filled: Store, tmp_path: Path) -> None:
    store = _copy(filled, tmp_path)
    store.index.path.write_bytes(b"")
    result = repair(store)
    assert result.unusable == ()
    assert result.damaged is not None and result.damaged.read_bytes() == b""
    assert {r.id for r in store.rows()} == {r.id for r in filled.rows()}
    assert {r.source for r in store.rows()} == {"repaired"}
    for original in (ORIGINAL, SECOND):
        cubin, expected = (s.lookup(original, gpu=GPU).cubin for s in (store, filled))
        assert cubin is not None and expected is not None and cubin.data == expected.data


def test_repair_of_a_right_index_changes_nothing(filled: Store, tmp_path: Path) -> None:
    store = _copy(filled, tmp_path)
    assert repair(store).damaged is None
    assert store.rows() == filled.rows()
    assert repair(Store(tmp_path / "new")).rows == ()


def test_repair_leaves_out_records_with_damaged_files(filled: Store, tmp_path: Path) -> None:
    store = _copy(filled, tmp_path)
    one, *others = store.rows()
    store.artefacts.path(one.optimised, "cubin").write_bytes(b"x")
    store.index.path.unlink()
    result = repair(store)
    assert {row.id for row in result.rows} == {row.id for row in others}
    (reason,) = result.unusable
    assert one.id[:12] in reason and "was changed" in reason


def test_repair_leaves_out_records_that_the_verifier_refused(filled: Store, tmp_path: Path) -> None:
    """A file that was put into the folder by hand: ``record`` refuses it."""
    store = _copy(filled, tmp_path)
    unsafe = Verification(safe=False, checked=9, nostall="0.1.0", nvdisasm="V13.5.37")
    forged = provenance(ORIGINAL, b"worse", verified=unsafe, low=1.5)
    id = store.artefacts.put(forged.to_bytes(), "json")
    store.artefacts.put(b"worse", "cubin")
    store.index.path.unlink()
    result = repair(store)
    assert {row.id for row in result.rows} == {row.id for row in filled.rows()}
    (reason,) = result.unusable
    assert id[:12] in reason and "does not say safe" in reason


def test_a_row_that_disappeared_is_found_by_repair(filled: Store, tmp_path: Path) -> None:
    store = _copy(filled, tmp_path)
    with closing(sqlite3.connect(store.index.path)) as database, database:
        database.execute("DELETE FROM records WHERE original = ?", (filled.rows()[-1].original,))
    repair(store)
    assert {r.id for r in store.rows()} == {r.id for r in filled.rows()}
    kept = {row for row in store.rows() if row.source == "tuned"}
    assert len(kept) in (1, 4)


def test_a_damaged_page_that_no_query_of_all_rows_reads_is_repaired(
    filled: Store, tmp_path: Path
) -> None:
    """The pages of SQLite's own indices are read by some queries only."""
    content = filled.index.path.read_bytes()
    pages = len(content) // 4096
    damaged = 0
    for page in range(1, pages):
        store = _copy(filled, tmp_path / str(page))
        start = page * 4096
        store.index.path.write_bytes(content[:start] + bytes(4096) + content[start + 4096 :])
        try:
            store.index.check()
        except DamagedIndex:
            damaged += 1
        repair(store)
        store.index.check()
        assert {row.id for row in store.rows()} == {row.id for row in filled.rows()}
        assert store.lookup(ORIGINAL, gpu=GPU).cubin is not None
    assert damaged == pages - 1 > 1


def test_repair_does_not_touch_the_index_of_a_newer_version(filled: Store, tmp_path: Path) -> None:
    store = _copy(filled, tmp_path)
    with closing(sqlite3.connect(store.index.path)) as database, database:
        database.execute("PRAGMA user_version = 2")
    with pytest.raises(BadStore, match="upgrade nostall"):
        repair(store)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("id", "../../../etc/passwd"),
        ("original", "../" * 20 + "etc/passwd"),
        ("optimised", "/etc/passwd"),
        ("optimised", "A" * 64),
        ("optimised", "a" * 64 + "\n"),
        ("kernel", "k\x1b]0;title\x07"),
        ("kernel", b"bytes"),
        ("gpu", "NVIDIA \u202e H200"),
        ("kind", "guessed"),
        ("source", "elsewhere"),
        ("ratio", float("inf")),
        ("ratio", "fast"),
        ("low", -1.0),
        ("created", "now\n"),
    ],
)
def test_values_that_a_row_cannot_have(
    filled: Store, tmp_path: Path, column: str, value: object
) -> None:
    store = _copy(filled, tmp_path)
    row = store.rows()[0]
    with closing(sqlite3.connect(store.index.path)) as database, database:
        database.execute(f"UPDATE records SET {column} = ? WHERE id = ?", (value, row.id))
    with pytest.raises(DamagedIndex, match=column) as caught:
        store.rows()
    assert str(caught.value).isprintable()
    repair(store)
    assert {r.id for r in store.rows()} == {r.id for r in filled.rows()}


@pytest.mark.parametrize(
    "name", ["../../outside", "", "a" * 63, "a" * 65, "A" * 64, "a" * 63 + "/"]
)
def test_a_name_without_the_form_of_a_hash_is_no_path(filled: Store, name: str) -> None:
    for use in (filled.artefacts.path, filled.artefacts.get, filled.artefacts.remove):
        with pytest.raises(BadStore, match="is not a sha256"):
            use(name, "cubin")


def test_a_suffix_is_no_path(filled: Store) -> None:
    with pytest.raises(BadStore):
        filled.artefacts.path("a" * 64, "cubin/../../x")


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_no_damage_gives_a_wrong_answer(
    filled: Store, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever the bytes of the index, a look-up finds the right cubin or nothing."""
    store = _copy(filled, tmp_path_factory.mktemp("damaged"))
    content = bytearray(store.index.path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(content) - 1))
        patch = data.draw(st.binary(min_size=1, max_size=40))
        content[start : start + len(patch)] = patch
    store.index.path.write_bytes(content[: data.draw(st.integers(0, len(content)))] or content)
    right = {original: filled.lookup(original, gpu=GPU).cubin for original in (ORIGINAL, SECOND)}
    known = {filled.artefacts.get(row.optimised, "cubin") for row in filled.rows()}
    for original, expected in right.items():
        try:
            found = store.lookup(original, gpu=GPU).cubin
        except BadStore:
            continue
        assert expected is not None
        assert found is None or (
            found.data in known and found.row.original == expected.row.original
        )
    try:
        repair(store)
    except BadStore as error:
        assert "upgrade nostall" in str(error)
        return
    assert {row.id for row in store.rows()} == {row.id for row in filled.rows()}
