"""The corpus itself: that it is large, broad, whole and small enough to commit."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from tests.corpus import catalogue
from tests.corpus.triton_kernels import ALL, ENTRIES, SKIPPED


def capability(path: Path) -> int:
    found = re.search(r"\.sm_(\d+)a?\.cubin$", path.name)
    assert found, path
    return int(found.group(1))


def test_names_are_unique_and_skips_exist() -> None:
    names = [entry.name(cc) for entry in ENTRIES for cc in entry.capabilities]
    assert len(names) == len(set(names))
    assert {name for _, name in SKIPPED} <= set(names)
    assert all(reason for reason in SKIPPED.values())


def test_the_corpus_is_large_and_broad() -> None:
    if catalogue.every() > 1:
        pytest.skip(f"only a slice is wanted ({catalogue.SLICE})")
    for version in catalogue.versions():
        place = catalogue.folder(version)
        mine = [path for path in catalogue.triton_corpus() if path.parent == place]
        assert len(mine) >= 110
        assert {capability(path) for path in mine} == set(ALL)
    assert len(catalogue.corpus()) >= 200
    assert {capability(path) for path in catalogue.nvcc_corpus()} == set(ALL)


def test_every_cubin_is_the_one_in_the_index() -> None:
    for path, item in catalogue.described():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == item["sha256"], path
        assert item["arch"] == f"sm_{capability(path)}"
        assert item["launch"]["block"][0] % 32 == 0


def test_committed_binaries_are_small() -> None:
    folders = (catalogue.NVCC, catalogue.EXAMPLES_NVCC)
    files = [path for place in folders for path in place.iterdir()]
    sizes = {p.name: p.stat().st_size for p in files if p.suffix in (".cubin", ".fatbin")}
    assert max(sizes.values()) < 60_000
    assert sum(sizes.values()) < 2_500_000
    assert len(catalogue.fatbins()) == 2
    assert len(catalogue.refused()) == 2


@pytest.mark.parametrize("text", ["0", "-3", "many", ""])
def test_a_slice_is_a_number(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(catalogue.SLICE, text)
    with pytest.raises(ValueError, match="whole number"):
        catalogue.every()


def test_a_slice_is_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    version = catalogue.OLD_TRITON_VERSION
    everything = catalogue.wanted(version)
    part = catalogue.wanted(version, 7)
    assert len(part) == -(-len(everything) // 7)
    assert {item[2] for item in part} <= {item[2] for item in everything}
