"""Bundles: one file, believed only as far as its hashes go."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from nostall.store import BadBundle, BadStore, Store, bundle
from tests.unit.store.records import ORIGINAL, keep, provenance


def _exported(tmp_path: Path) -> tuple[Store, Path]:
    store = Store(tmp_path / "home")
    keep(store, b"better")
    keep(store, b"another", original=b"second")
    bundle.write(store, store.rows(), tmp_path / "all.nostall")
    return store, tmp_path / "all.nostall"


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    store, path = _exported(tmp_path)
    packed = {p.original: p for p in bundle.read(path)}
    assert set(packed) == {ORIGINAL, b"second"}
    assert packed[ORIGINAL].optimised == b"better"
    assert packed[ORIGINAL].provenance == provenance(ORIGINAL, b"better")
    assert {p.id for p in packed.values()} == {row.id for row in store.rows()}
    before = path.read_bytes()
    bundle.write(store, store.rows()[::-1], path)
    assert path.read_bytes() == before


def _rewritten(path: Path, changes: dict[str, bytes | None]) -> None:
    """The bundle with other members; keys are the ends of names, None leaves a member out."""
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            new = next((v for end, v in changes.items() if name.endswith(end)), data)
            if new is not None:
                archive.writestr(name, new)


@pytest.mark.parametrize(
    ("changes", "text"),
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
def test_a_changed_bundle_is_refused(
    tmp_path: Path, changes: dict[str, bytes | None], text: str
) -> None:
    store, path = _exported(tmp_path)
    _rewritten(path, {k.format(id=store.rows()[0].id): v for k, v in changes.items()})
    with pytest.raises(BadBundle, match=text):
        bundle.read(path)


def test_every_flipped_byte_is_harmless(tmp_path: Path) -> None:
    _, path = _exported(tmp_path)
    whole, truth = path.read_bytes(), bundle.read(path)
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes((whole[at] ^ 0x5A,)) + whole[at + 1 :])
        try:
            found = bundle.read(path)
        except BadBundle:
            continue
        assert found == truth  # a byte that carries nothing, such as a date


@pytest.mark.parametrize("keep_bytes", [0, 10, 500])
def test_a_cut_bundle_is_refused(tmp_path: Path, keep_bytes: int) -> None:
    _, path = _exported(tmp_path)
    path.write_bytes(path.read_bytes()[:keep_bytes])
    with pytest.raises(BadBundle, match="not a bundle, or is damaged"):
        bundle.read(path)


def test_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    _, path = _exported(tmp_path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("\u00e9.cubin", b"")  # other letters than ASCII are marked as UTF-8
    path.write_bytes(path.read_bytes().replace("\u00e9".encode(), b"\xff\xff"))
    with pytest.raises(BadBundle, match="not a bundle, or is damaged"):
        bundle.read(path)


@pytest.mark.parametrize("packing", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_an_unusual_packing_is_refused(tmp_path: Path, packing: int) -> None:
    _, path = _exported(tmp_path)
    with zipfile.ZipFile(path, "w", packing) as archive:
        archive.writestr("manifest.json", b"{}")
    with pytest.raises(BadBundle, match="packed in an unusual way"):
        bundle.read(path)


def test_a_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, path = _exported(tmp_path)
    monkeypatch.setattr(bundle, "MOST_BYTES", 100)
    with pytest.raises(BadBundle, match="at most 100 bytes"):
        bundle.read(path)


def test_places_that_do_not_work(tmp_path: Path) -> None:
    store, _ = _exported(tmp_path)
    with pytest.raises(BadBundle, match="cannot read bundle"):
        bundle.read(tmp_path / "nothing")
    with pytest.raises(BadBundle, match="cannot write"):
        bundle.write(store, store.rows(), tmp_path / "no" / "such" / "folder")
    with pytest.raises(BadStore, match="nothing to export"):
        bundle.write(store, [], tmp_path / "none")


def test_a_damaged_record_is_not_exported(tmp_path: Path) -> None:
    store, _ = _exported(tmp_path)
    store.artefacts.path(store.rows()[0].optimised, "cubin").write_bytes(b"x")
    with pytest.raises(BadStore, match="was changed"):
        bundle.write(store, store.rows(), tmp_path / "new")
