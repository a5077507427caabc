"""What the store hands out, and everything that makes it hand out nothing."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from pydantic import ValidationError

from nostall.core import ContractBroken
from nostall.store import BadStore, Row, Store, Verification
from nostall.store.artefacts import name
from tests.unit.store.records import GPU, ORIGINAL, keep, modelled, provenance

Damage = Callable[[Store, Row], None]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "home")


def given(store: Store, gpu: str | None = GPU, **more: object) -> bytes | None:
    found = store.lookup(ORIGINAL, gpu=gpu, **more).found  # type: ignore[arg-type]
    return None if found is None else found.data


def test_the_exact_bytes_on_the_same_gpu(store: Store) -> None:
    row = keep(store, b"better")
    found = store.lookup(ORIGINAL, architecture="sm_90", gpu=GPU).found
    assert found is not None
    assert (found.data, found.row) == (b"better", row)
    assert found.path.read_bytes() == b"better"
    assert found.path.name == f"{row.optimised}.cubin"
    assert store.artefacts.get(row.original, "cubin") == ORIGINAL
    assert store.provenance(row) == provenance(ORIGINAL, b"better")


def test_looking_up_makes_nothing(store: Store) -> None:
    assert store.lookup(ORIGINAL, gpu=GPU).found is None
    assert store.rows() == []
    assert not store.root.exists()


def test_other_bytes_are_no_mismatch_but_unknown(store: Store) -> None:
    keep(store, b"better")
    looked = store.lookup(b"originaX", gpu=GPU)
    assert looked.found is None
    assert looked.refused == ()


@pytest.mark.parametrize(
    ("gpu", "architecture", "kernel", "reason"),
    [
        ("NVIDIA H100", None, None, "measured on NVIDIA H200; this is NVIDIA H100"),
        (None, None, None, "NOSTALL_GPU"),
        (GPU, "sm_80", None, "for sm_90, not sm_80"),
        (GPU, None, "other", "for kernel 'k', not 'other'"),
    ],
)
def test_elsewhere_the_original_stays(
    store: Store, gpu: str | None, architecture: str | None, kernel: str | None, reason: str
) -> None:
    keep(store, b"better")
    looked = store.lookup(ORIGINAL, gpu=gpu, architecture=architecture, kernel=kernel)
    assert looked.found is None
    assert reason in looked.refused[0]


def _damaged_artefact(store: Store, row: Row) -> None:
    store.artefacts.path(row.optimised, "cubin").write_bytes(b"bettes")


def _missing_artefact(store: Store, row: Row) -> None:
    store.artefacts.path(row.optimised, "cubin").unlink()


def _damaged_provenance(store: Store, row: Row) -> None:
    path = store.artefacts.path(row.id, "json")
    path.write_bytes(path.read_bytes().replace(b"H200", b"H100"))


def _row_of_another_gpu(store: Store, row: Row) -> None:
    _execute(store, "UPDATE records SET gpu = 'NVIDIA B200'")


def _row_to_another_file(store: Store, row: Row) -> None:
    other = store.artefacts.put(b"evil", "cubin")
    _execute(store, f"UPDATE records SET optimised = '{other}'")


def _execute(store: Store, statement: str) -> None:
    with closing(sqlite3.connect(store.index.path)) as database, database:
        database.execute(statement)


@pytest.mark.parametrize(
    "damage",
    [
        _damaged_artefact,
        _missing_artefact,
        _damaged_provenance,
        _row_of_another_gpu,
        _row_to_another_file,
    ],
)
def test_damage_gives_the_original(store: Store, damage: Damage) -> None:
    row = keep(store, b"better")
    damage(store, row)
    for gpu in (GPU, "NVIDIA B200"):
        looked = store.lookup(ORIGINAL, gpu=gpu)
        assert looked.found is None
        assert len(looked.refused) == 1


def test_an_unsafe_record_is_not_handed_out(store: Store) -> None:
    keep(store, b"better")
    unsafe = Verification(safe=False, checked=9, nostall="0.1.0", nvdisasm="V13.5.37")
    doubtful = provenance(ORIGINAL, b"worse", verified=unsafe, low=1.5)
    with pytest.raises(ContractBroken, match="refused"):
        store.record(ORIGINAL, b"worse", doubtful)
    # As a forger would: files and a row that agree with each other.
    id = store.artefacts.put(doubtful.to_bytes(), "json")
    store.artefacts.put(b"worse", "cubin")
    _execute(
        store,
        f"INSERT INTO records SELECT '{id}', original, '{doubtful.optimised}', kernel, "
        f"architecture, kind, gpu, {doubtful.ratio}, 1.5, created, source FROM records",
    )
    looked = store.lookup(ORIGINAL, gpu=GPU)
    assert looked.found is not None and looked.found.data == b"better"
    assert "does not say safe" in looked.refused[0]


def test_the_surest_gain_is_taken(store: Store) -> None:
    for low, data in ((1.01, b"one"), (1.07, b"seven"), (1.03, b"three")):
        keep(store, data, low=low)
    assert given(store) == b"seven"
    row = next(r for r in store.rows() if r.low == 1.07)
    _damaged_artefact(store, row)
    assert given(store) == b"three"


def test_modelled_records_only_when_told(store: Store) -> None:
    store.record(ORIGINAL, b"thought", modelled(ORIGINAL, b"thought"))
    assert given(store) is None
    assert given(store, gpu=None, modelled=True) == b"thought"
    keep(store, b"known")
    assert given(store, modelled=True) == b"known"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"gpu": None}, "needs its GPU"),
        ({"comparison": None}, "needs its GPU and its comparison"),
        ({"verified": {"safe": "perhaps"}}, "safe"),
    ],
)
def test_a_record_says_everything(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        provenance(ORIGINAL, b"better", **changes)


def test_a_record_is_about_the_bytes_that_come_with_it(store: Store) -> None:
    with pytest.raises(ContractBroken, match="other cubins"):
        store.record(ORIGINAL, b"other", provenance(ORIGINAL, b"better"))
    assert store.rows() == []


def test_recording_twice_is_recording_once(store: Store) -> None:
    assert keep(store, b"better") == keep(store, b"better")
    assert len(store.rows()) == 1


def test_several_records_appear_together_or_not_at_all(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [(o, b"better", provenance(o, b"better")) for o in (ORIGINAL, b"second")]
    put = store.artefacts.put

    def full(data: bytes, suffix: str) -> str:
        if data == b"second":
            raise BadStore("the disk is full")
        return put(data, suffix)

    with monkeypatch.context() as patch:
        patch.setattr(store.artefacts, "put", full)
        with pytest.raises(BadStore, match="full"):
            store.record_all(found)
    assert store.rows() == []
    assert store.record_all(found) == sorted(
        store.rows(), key=lambda row: row.original != name(ORIGINAL)
    )


def test_recording_again_repairs_a_damaged_file(store: Store) -> None:
    row = keep(store, b"better")
    _damaged_artefact(store, row)
    keep(store, b"better")
    assert given(store) == b"better"


def test_removing_keeps_what_others_need(store: Store) -> None:
    one, two = keep(store, b"one"), keep(store, b"two")
    store.remove(one)
    assert store.rows() == [two]
    assert not store.artefacts.path(one.optimised, "cubin").exists()
    assert not store.artefacts.path(one.id, "json").exists()
    assert given(store) == b"two"
    store.remove(two)
    assert [p for p in (store.root / "objects").rglob("*") if p.is_file()] == []


def test_records_are_found_by_the_start_of_their_names(store: Store) -> None:
    one, two = keep(store, b"one"), keep(store, b"two")
    assert store.find(one.id[:12]) == [one]
    assert store.find(one.original[:8]) == store.rows()
    assert {r.id for r in store.rows()} == {one.id, two.id}
    for prefix in ("", "nothing", "%", "_"):
        with pytest.raises(BadStore, match="no record"):
            store.find(prefix)


def test_a_newer_or_foreign_index_is_refused(store: Store) -> None:
    keep(store, b"better")
    _execute(store, "PRAGMA user_version = 2")
    with pytest.raises(BadStore, match="upgrade nostall"):
        store.rows()
    with pytest.raises(BadStore, match="upgrade nostall"):
        keep(store, b"more")
    for path in store.root.glob("index.sqlite-*"):
        path.unlink()
    store.index.path.write_bytes(b"no database at all" * 100)
    with pytest.raises(BadStore, match="move this file away"):
        store.rows()


def test_a_store_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadStore, match="NOSTALL_HOME"):
        keep(Store(tmp_path / "file" / "home"), b"better")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_store_that_is_read_only_is_read(store: Store) -> None:
    keep(store, b"better")
    folders = [store.root, *(p for p in store.root.rglob("*") if p.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        assert given(store) == b"better"
    finally:
        for folder in folders:
            folder.chmod(0o755)


def test_where_it_lives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path))
    assert Store().root == tmp_path
    monkeypatch.delenv("NOSTALL_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert Store().root == Path("/home/somebody/.cache/nostall")
