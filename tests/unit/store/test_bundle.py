"""Bundles: export and import, and damaged, changed or oversized files."""

from __future__ import annotations

import json
import random
import tracemalloc
import zipfile
from pathlib import Path

import pytest
from pydantic import ValidationError

from nostall.store import BadBundle, BadStore, Store, bundle
from nostall.store.artefacts import content_hash
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
        list(bundle.read(path))


def test_a_changed_byte_is_rejected_or_has_no_effect(tmp_path: Path) -> None:
    _, path = _export(tmp_path)
    content, expected = path.read_bytes(), list(bundle.read(path))
    for i in range(0, len(content), 7):
        path.write_bytes(content[:i] + bytes((content[i] ^ 0x5A,)) + content[i + 1 :])
        try:
            records = list(bundle.read(path))
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
    monkeypatch.setattr(bundle, "MAX_CUBIN_BYTES", 5)
    with pytest.raises(BadBundle, match="allowed are 5 bytes"):
        list(bundle.read(path))


def _forge(path: Path, records: list[bytes], cubins: list[bytes], ids: list[str] | None) -> Path:
    """Write a bundle with these provenance files and cubins, without the checks of ``write``."""
    ids = [content_hash(raw) for raw in records] if ids is None else ids
    manifest = {"format": "nostall bundle", "schema_version": 1, "records": ids}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("manifest.json", json.dumps(manifest))
        for suffix, contents in (("json", records), ("cubin", cubins)):
            for data in contents:
                archive.writestr(f"{content_hash(data)}.{suffix}", data)
    return path


def test_a_bundle_that_unpacks_to_far_more_than_its_size_is_not_read(tmp_path: Path) -> None:
    original, optimised = bytes(24 << 20), b"\1" + bytes(24 << 20)
    raw = provenance(original, optimised).to_bytes()
    path = _forge(tmp_path / "bomb", [raw], [original, optimised], None)
    assert path.stat().st_size < 200_000
    tracemalloc.start()
    try:
        with pytest.raises(BadBundle, match=r"would unpack to 50331649 bytes; allowed are \d+ "):
            bundle.read(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_many_records_of_the_same_cubins_are_limited_by_the_bytes_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [provenance(b"a", b"b", kernel=f"k{n}").to_bytes() for n in range(8)]
    path = _forge(tmp_path / "many", records, [b"a", b"b"], None)
    assert len(list(bundle.read(path))) == 8
    monkeypatch.setattr(bundle, "MAX_TOTAL_BYTES", 15)
    monkeypatch.setattr(bundle, "MAX_RATIO", 0)
    with pytest.raises(BadBundle, match="would unpack to"):
        bundle.read(path)


def test_an_id_may_occur_once(tmp_path: Path) -> None:
    raw = provenance(b"a", b"b").to_bytes()
    path = _forge(tmp_path / "twice", [raw], [b"a", b"b"], [content_hash(raw)] * 20_000)
    with pytest.raises(BadBundle, match=r"manifest\.json claims"):
        bundle.read(path)
    _forge(path, [raw], [b"a", b"b"], [content_hash(raw)] * 2)
    with pytest.raises(BadBundle, match="each may occur once"):
        bundle.read(path)


def test_records_are_read_one_at_a_time(tmp_path: Path) -> None:
    size, count = 1 << 20, 12
    rng = random.Random(5)
    pairs = [(rng.randbytes(size), rng.randbytes(size)) for _ in range(count)]
    path = _forge(
        tmp_path / "large",
        [provenance(a, b).to_bytes() for a, b in pairs],
        [cubin for pair in pairs for cubin in pair],
        None,
    )
    tracemalloc.start()
    try:
        assert sum(len(record.original) for record in bundle.read(path)) == size * count
        assert tracemalloc.get_traced_memory()[1] < 8 * size
    finally:
        tracemalloc.stop()


def test_an_exported_bundle_of_repetitive_cubins_can_be_imported(tmp_path: Path) -> None:
    store = Store(tmp_path / "home")
    keep(store, bytes(3 << 20), original=bytes(2 << 20))
    bundle.write(store, store.rows(), tmp_path / "b")
    (record,) = bundle.read(tmp_path / "b")
    assert len(record.optimised) == 3 << 20


def test_an_export_that_no_import_would_accept_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, path = _export(tmp_path)
    before = path.read_bytes()
    monkeypatch.setattr(bundle, "MAX_TOTAL_BYTES", 10)
    with pytest.raises(BadBundle, match="export fewer of them"):
        bundle.write(store, store.rows(), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


BAD_VALUES: dict[str, str] = {
    "ratio": "1e999",
    "kernel": r'"k\u001b[2J"',
    "origin": r'"\u202e"',
    "architecture": '"sm_90; rm"',
    "gpu": r'"a\nb"',
    "created": '"yesterday"',
    "original": '"../../../../etc/passwd"',
    "device": r'{"gpu": "\u009b1m"}',
    "toolchain": r'{"\u0007": "x"}',
    "notes": r'["\u001b"]',
    "settings": '{"seconds": Infinity}',
    "launch": r'{"args": [{"name": "\u001b"}]}',
    "comparison": '{"ratio": NaN}',
    "checks": "-1",
}


@pytest.mark.parametrize("field", BAD_VALUES)
def test_values_that_a_provenance_cannot_have(field: str, tmp_path: Path) -> None:
    fields = json.loads(provenance(b"a", b"b").to_bytes())
    text = json.dumps({**fields, field: "PLACE"}).replace('"PLACE"', BAD_VALUES[field])
    path = _forge(tmp_path / "bad", [text.encode()], [b"a", b"b"], None)
    with pytest.raises(BadBundle, match=field) as caught:
        bundle.read(path)
    assert str(caught.value).isprintable()


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    fields = json.loads(provenance(b"a", b"b").to_bytes())
    for depth in (30, 100_000):
        deep = '{"a":' * depth + "1" + "}" * depth
        text = json.dumps({**fields, "settings": "PLACE"}).replace('"PLACE"', deep)
        path = _forge(tmp_path / "deep", [text.encode()], [b"a", b"b"], None)
        with pytest.raises(BadBundle):
            bundle.read(path)


def _nested(levels: int, kind: str) -> object:
    value: object = 1
    for _ in range(levels):
        value = {"a": value} if kind == "objects" else [value]
    return value


@pytest.mark.parametrize("kind", ["objects", "lists"])
def test_settings_are_nested_up_to_20_levels(kind: str) -> None:
    """The settings themselves are one level, and the number at the end is another."""
    assert provenance(b"a", b"b", settings={"a": _nested(18, kind)})
    with pytest.raises(ValidationError, match="nested more than 20 levels"):
        provenance(b"a", b"b", settings={"a": _nested(19, kind)})


def test_numbers_and_texts_have_a_largest_size() -> None:
    assert provenance(b"a", b"b", checks=2**63 - 1, kernel="k" * (1 << 16))
    for field, value in (("checks", 2**63), ("checks", -1), ("kernel", "k" * ((1 << 16) + 1))):
        with pytest.raises(ValidationError, match=field):
            provenance(b"a", b"b", **{field: value})


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
