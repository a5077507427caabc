"""The store: look-ups, and everything that makes a record unusable."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from pydantic import ValidationError

from nostall.core import ContractBroken
from nostall.store import BadStore, ComparisonRecord, Provenance, Row, Store, Verification
from nostall.store.artefacts import content_hash
from nostall.store.store import Contents
from tests.unit.store.records import GPU, ORIGINAL, keep, modelled, provenance

Damage = Callable[[Store, Row], None]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "home")


def lookup(store: Store, gpu: str | None = GPU, **more: object) -> bytes | None:
    cubin = store.lookup(ORIGINAL, gpu=gpu, **more).cubin  # type: ignore[arg-type]
    return None if cubin is None else cubin.data


def test_look_up_on_the_same_gpu(store: Store) -> None:
    row = keep(store, b"better")
    cubin = store.lookup(ORIGINAL, architecture="sm_90", gpu=GPU).cubin
    assert cubin is not None
    assert (cubin.data, cubin.row) == (b"better", row)
    assert cubin.path.read_bytes() == b"better"
    assert cubin.path.name == f"{row.optimised}.cubin"
    assert store.artefacts.get(row.original, "cubin") == ORIGINAL
    assert store.provenance(row) == provenance(ORIGINAL, b"better")


def test_a_look_up_creates_no_files(store: Store) -> None:
    assert store.lookup(ORIGINAL, gpu=GPU).cubin is None
    assert store.rows() == []
    assert not store.root.exists()


def test_an_unknown_original_has_no_rejections(store: Store) -> None:
    keep(store, b"better")
    result = store.lookup(b"originaX", gpu=GPU)
    assert result.cubin is None
    assert result.rejections == ()


@pytest.mark.parametrize(
    ("gpu", "architecture", "kernel", "reason"),
    [
        ("NVIDIA H100", None, None, "measured on NVIDIA H200; this is NVIDIA H100"),
        (None, None, None, "NOSTALL_GPU"),
        (GPU, "sm_80", None, "for sm_90, not sm_80"),
        (GPU, None, "other", "for kernel 'k', not 'other'"),
    ],
)
def test_records_for_another_gpu_architecture_or_kernel_are_rejected(
    store: Store, gpu: str | None, architecture: str | None, kernel: str | None, reason: str
) -> None:
    keep(store, b"better")
    result = store.lookup(ORIGINAL, gpu=gpu, architecture=architecture, kernel=kernel)
    assert result.cubin is None
    assert reason in result.rejections[0]


def _damaged_artefact(store: Store, row: Row) -> None:
    store.artefacts.path(row.optimised, "cubin").write_bytes(b"bettes")


def _missing_artefact(store: Store, row: Row) -> None:
    store.artefacts.path(row.optimised, "cubin").unlink()


def _damaged_provenance(store: Store, row: Row) -> None:
    path = store.artefacts.path(row.id, "json")
    path.write_bytes(path.read_bytes().replace(b"H200", b"H100"))


def _row_for_another_gpu(store: Store, row: Row) -> None:
    _execute(store, "UPDATE records SET gpu = 'NVIDIA B200'")


def _row_to_another_file(store: Store, row: Row) -> None:
    sha256 = store.artefacts.put(b"evil", "cubin")
    _execute(store, f"UPDATE records SET optimised = '{sha256}'")


def _execute(store: Store, statement: str) -> None:
    with closing(sqlite3.connect(store.index.path)) as database, database:
        database.execute(statement)


@pytest.mark.parametrize(
    "damage",
    [
        _damaged_artefact,
        _missing_artefact,
        _damaged_provenance,
        _row_for_another_gpu,
        _row_to_another_file,
    ],
)
def test_damaged_records_are_rejected(store: Store, damage: Damage) -> None:
    row = keep(store, b"better")
    damage(store, row)
    for gpu in (GPU, "NVIDIA B200"):
        result = store.lookup(ORIGINAL, gpu=gpu)
        assert result.cubin is None
        assert len(result.rejections) == 1


def test_an_unsafe_record_is_rejected(store: Store) -> None:
    keep(store, b"better")
    unsafe = Verification(safe=False, checked=9, nostall="0.1.0", nvdisasm="V13.5.37")
    forged = provenance(ORIGINAL, b"worse", verified=unsafe, low=1.5)
    with pytest.raises(ContractBroken, match="refused"):
        store.record(ORIGINAL, b"worse", forged)
    # A forged record: its files and its row agree with each other.
    id = store.artefacts.put(forged.to_bytes(), "json")
    store.artefacts.put(b"worse", "cubin")
    _execute(
        store,
        f"INSERT INTO records SELECT '{id}', original, '{forged.optimised}', kernel, "
        f"architecture, kind, gpu, {forged.ratio}, 1.5, created, source FROM records",
    )
    result = store.lookup(ORIGINAL, gpu=GPU)
    assert result.cubin is not None and result.cubin.data == b"better"
    assert "does not say safe" in result.rejections[0]


def test_the_record_with_the_largest_lower_bound_is_used(store: Store) -> None:
    for low, data in ((1.01, b"one"), (1.07, b"seven"), (1.03, b"three")):
        keep(store, data, low=low)
    assert lookup(store) == b"seven"
    row = next(r for r in store.rows() if r.low == 1.07)
    _damaged_artefact(store, row)
    assert lookup(store) == b"three"


def _interval(ratio: float, low: float, high: float) -> ComparisonRecord:
    return ComparisonRecord(
        ratio=ratio,
        low=low,
        high=high,
        null_low=0.999,
        null_high=1.001,
        triples=200,
        verdict="faster",
    )


def test_the_lower_bound_counts_and_not_the_ratio_or_the_date(store: Store) -> None:
    """A noisy measurement has a large ratio, and its lower bound is small."""
    noisy, sure = _interval(2.0, 1.01, 3.0), _interval(1.3, 1.2, 1.4)
    keep(store, b"sure", comparison=sure, ratio=1.3, created="2026-11-21T00:00:00+00:00")
    keep(store, b"noisy", comparison=noisy, ratio=2.0, created="2026-11-22T00:00:00+00:00")
    assert lookup(store) == b"sure"
    assert [row.low for row in store.index.find_original(content_hash(ORIGINAL))] == [1.2, 1.01]


def test_of_equal_lower_bounds_the_newest_record_counts(store: Store) -> None:
    for day in (21, 23, 22):
        keep(store, f"day {day}".encode(), created=f"2026-11-{day}T00:00:00+00:00")
    assert lookup(store) == b"day 23"


def test_a_measured_record_comes_before_a_modelled_one_with_a_larger_ratio(store: Store) -> None:
    store.record(ORIGINAL, b"thought", modelled(ORIGINAL, b"thought"))
    keep(store, b"known", low=1.01)
    ranked = [(row.kind, row.low) for row in store.index.find_original(content_hash(ORIGINAL))]
    assert ranked == [("measured", 1.01), ("modelled", 1.5)]


def test_what_was_measured_here_comes_before_claims_of_others(store: Store) -> None:
    for source in ("imported", "repaired"):
        claim = provenance(ORIGINAL, source.encode(), low=50.0)
        store.record(ORIGINAL, source.encode(), claim, source)  # type: ignore[arg-type]
    assert lookup(store) in (b"imported", b"repaired")
    keep(store, b"own", low=1.01)
    assert lookup(store) == b"own"
    chain = provenance(ORIGINAL, b"chain", low=60.0, dependent_launch=True)
    store.record(ORIGINAL, b"chain", chain, "imported")
    found = store.lookup(ORIGINAL, gpu=GPU, dependent=True).cubin
    assert found is not None and found.data == b"own"
    keep(store, b"own chain", low=1.02, dependent_launch=True)
    found = store.lookup(ORIGINAL, gpu=GPU, dependent=True).cubin
    assert found is not None and found.data == b"own chain"


def test_records_for_dependent_launches_are_used_only_where_these_can_be_made(
    store: Store,
) -> None:
    keep(store, b"chain", low=1.2, dependent_launch=True)
    rejected = store.lookup(ORIGINAL, gpu=GPU)
    assert rejected.cubin is None
    assert "dependent launches" in rejected.rejections[0]
    keep(store, b"isolated", low=1.3)
    assert lookup(store) == b"isolated"
    chain = store.lookup(ORIGINAL, gpu=GPU, dependent=True).cubin
    assert chain is not None
    assert (chain.data, chain.dependent) == (b"chain", True)
    keep(store, b"slower", original=b"other")
    other = store.lookup(b"other", gpu=GPU, dependent=True).cubin
    assert other is not None
    assert (other.data, other.dependent) == (b"slower", False)


def test_modelled_records_are_used_only_if_allowed(store: Store) -> None:
    store.record(ORIGINAL, b"thought", modelled(ORIGINAL, b"thought"))
    assert lookup(store) is None
    assert lookup(store, gpu=None, modelled=True) == b"thought"
    keep(store, b"known")
    assert lookup(store, modelled=True) == b"known"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu": None}, "needs its GPU"),
        ({"comparison": None}, "needs its GPU and its comparison"),
        ({"verified": {"safe": "perhaps"}}, "safe"),
    ],
)
def test_an_incomplete_provenance_is_rejected(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        provenance(ORIGINAL, b"better", **changes)


@pytest.mark.parametrize("verdict", ["same", "slower"])
def test_only_a_faster_cubin_is_recorded(verdict: str) -> None:
    comparison = _interval(1.3, 1.2, 1.4).model_copy(update={"verdict": verdict})
    with pytest.raises(ValidationError, match=f"the comparison says '{verdict}', not 'faster'"):
        provenance(ORIGINAL, b"better", comparison=comparison)
    forged = (
        provenance(ORIGINAL, b"better").to_bytes().replace(b'"faster"', f'"{verdict}"'.encode())
    )
    with pytest.raises(BadStore, match="not 'faster'"):
        Provenance.from_bytes(forged, "forged")


def test_an_original_is_no_optimised_cubin_of_itself() -> None:
    with pytest.raises(ValidationError, match="the same file"):
        provenance(ORIGINAL, ORIGINAL)


def test_a_provenance_must_name_the_recorded_cubins(store: Store) -> None:
    with pytest.raises(ContractBroken, match="other files"):
        store.record(ORIGINAL, b"other", provenance(ORIGINAL, b"better"))
    assert store.rows() == []


def test_recording_twice_adds_one_record(store: Store) -> None:
    assert keep(store, b"better") == keep(store, b"better")
    assert len(store.rows()) == 1


def test_several_records_become_visible_together_or_not_at_all(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [Contents(o, b"better", provenance(o, b"better")) for o in (ORIGINAL, b"second")]
    put = store.artefacts.put

    def put_on_full_disk(data: bytes, suffix: str) -> str:
        if data == b"second":
            raise BadStore("the disk is full")
        return put(data, suffix)

    with monkeypatch.context() as patch:
        patch.setattr(store.artefacts, "put", put_on_full_disk)
        with pytest.raises(BadStore, match="full"):
            store.record_all(records)
    assert store.rows() == []
    assert store.record_all(records) == sorted(
        store.rows(), key=lambda row: row.original != content_hash(ORIGINAL)
    )


def test_recording_again_replaces_a_damaged_file(store: Store) -> None:
    row = keep(store, b"better")
    _damaged_artefact(store, row)
    keep(store, b"better")
    assert lookup(store) == b"better"


def test_removing_a_record_keeps_files_that_other_records_need(store: Store) -> None:
    one, two = keep(store, b"one"), keep(store, b"two")
    store.remove(one)
    assert store.rows() == [two]
    assert not store.artefacts.path(one.optimised, "cubin").exists()
    assert not store.artefacts.path(one.id, "json").exists()
    assert lookup(store) == b"two"
    store.remove(two)
    assert [p for p in (store.root / "objects").rglob("*") if p.is_file()] == []


def test_records_are_found_by_a_prefix_of_id_or_original(store: Store) -> None:
    one, two = keep(store, b"one"), keep(store, b"two")
    assert store.find(one.id[:12]) == [one]
    assert store.find(one.original[:8]) == store.rows()
    assert {r.id for r in store.rows()} == {one.id, two.id}
    for prefix in ("", "nothing", "%", "_"):
        with pytest.raises(BadStore, match="no record"):
            store.find(prefix)


def test_a_newer_or_invalid_index_is_rejected(store: Store) -> None:
    keep(store, b"better")
    _execute(store, "PRAGMA user_version = 2")
    with pytest.raises(BadStore, match="upgrade nostall"):
        store.rows()
    with pytest.raises(BadStore, match="upgrade nostall"):
        keep(store, b"more")
    for path in store.root.glob("index.sqlite-*"):
        path.unlink()
    store.index.path.write_bytes(b"no database at all" * 100)
    with pytest.raises(BadStore, match=r"file is not a database.*store repair"):
        store.rows()


def test_an_unwritable_store_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadStore, match="NOSTALL_HOME"):
        keep(Store(tmp_path / "file" / "home"), b"better")


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write to read-only folders")
def test_a_read_only_store_can_be_read(store: Store) -> None:
    keep(store, b"better")
    folders = [store.root, *(p for p in store.root.rglob("*") if p.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        assert lookup(store) == b"better"
    finally:
        for folder in folders:
            folder.chmod(0o755)


def test_the_location_of_the_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path))
    assert Store().root == tmp_path
    monkeypatch.delenv("NOSTALL_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert Store().root == Path("/home/somebody/.cache/nostall")
