"""Bundles: export and import, and damaged, changed or oversized files."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from nostall.store import BadBundle, BadStore, Store, bundle
from tests.unit.store.records import ORIGINAL, keep, provenance


def _export(tmp_path: Path) -> tuple[Store, Path]:
    """A store with two records, and a bundle of them."""
    store = Store(tmp_path / "home")
    keep(store, b"better")
    keep(store, b"another", original=b"second")
    bundle.write(store, store.rows(), tmp_path / "all.nostall")
    return store, tmp_path / "all.nostall"


def test_a_read_bundle_equals_the_written_one(tmp_path: Path) -> None:
    store, path = _export(tmp_path)
    records = {record.original: record for record in bundle.read(path)}
    assert set(records) == {ORIGINAL, b"second"}
    assert records[ORIGINAL].optimised == b"better"
    assert records[ORIGINAL].provenance == provenance(ORIGINAL, b"better")
    assert {record.id for record in records.values()} == {row.id for row in store.rows()}
    before = path.read_bytes()
    bundle.write(store, store.rows()[::-1], path)
    assert path.read_bytes() == before


def _rewrite(path: Path, changes: dict[str, bytes | None]) -> None:
    """Replace members of a bundle, by the end of their names; None removes a member."""
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            content = next((v for end, v in changes.items() if name.endswith(end)), data)
            if content is not None:
                archive.writestr(name, content)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({".cubin": b"other code"}, "was changed"),
        ({".cubin": None}, "lacks"),
        ({f"{'{id}'}.json": b"{}"}, "was changed"),
        ({"manifest.json": None}, "lacks manifest.json"),
        ({"manifest.json": b"{}"}, "records"),
        ({"manifest.json": b'{"schema_version": 2, "records": []}'}, "schema_version"),
        ({"manifest.json": b'{"records": ["../../etc/passwd"]}'}, "records"),
        ({"manifest.json": b"\xff"}, "manifest"),
    ],
)
def test_a_changed_bundle_is_rejected(
    tmp_path: Path, changes: dict[str, bytes | None], message: str
) -> None:
    store, path = _export(tmp_path)
    _rewrite(path, {k.format(id=store.rows()[0].id): v for k, v in changes.items()})
    with pytest.raises(BadBundle, match=message):
        bundle.read(path)


def test_a_changed_byte_is_rejected_or_has_no_effect(tmp_path: Path) -> None:
    _, path = _export(tmp_path)
    content, expected = path.read_bytes(), bundle.read(path)
    for i in range(0, len(content), 7):
        path.write_bytes(content[:i] + bytes((content[i] ^ 0x5A,)) + content[i + 1 :])
        try:
            records = bundle.read(path)
        except BadBundle:
            continue
        assert records == expected  # the byte has no meaning, such as a date


@pytest.mark.parametrize("length", [0, 10, 500])
def test_a_truncated_bundle_is_rejected(tmp_path: Path, length: int) -> None:
    _, path = _export(tmp_path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(BadBundle, match="not a bundle, or is damaged"):
        bundle.read(path)


def test_a_member_name_that_is_not_utf8_is_rejected(tmp_path: Path) -> None:
    _, path = _export(tmp_path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("\u00e9.cubin", b"")  # zip marks non-ASCII names as UTF-8
    path.write_bytes(path.read_bytes().replace("\u00e9".encode(), b"\xff\xff"))
    with pytest.raises(BadBundle, match="not a bundle, or is damaged"):
        bundle.read(path)


@pytest.mark.parametrize("compression", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_an_unusual_compression_is_rejected(tmp_path: Path, compression: int) -> None:
    _, path = _export(tmp_path)
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("manifest.json", b"{}")
    with pytest.raises(BadBundle, match="has an unusual compression"):
        bundle.read(path)


def test_an_oversized_member_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, path = _export(tmp_path)
    monkeypatch.setattr(bundle, "MAX_MEMBER_BYTES", 100)
    with pytest.raises(BadBundle, match="allowed are 100 bytes"):
        bundle.read(path)


def test_unusable_paths_and_empty_exports(tmp_path: Path) -> None:
    store, _ = _export(tmp_path)
    with pytest.raises(BadBundle, match="cannot read bundle"):
        bundle.read(tmp_path / "nothing")
    with pytest.raises(BadBundle, match="cannot write"):
        bundle.write(store, store.rows(), tmp_path / "no" / "such" / "folder")
    with pytest.raises(BadStore, match="nothing to export"):
        bundle.write(store, [], tmp_path / "none")


def test_a_damaged_record_is_not_exported(tmp_path: Path) -> None:
    store, _ = _export(tmp_path)
    store.artefacts.path(store.rows()[0].optimised, "cubin").write_bytes(b"x")
    with pytest.raises(BadStore, match="was changed"):
        bundle.write(store, store.rows(), tmp_path / "new")
