"""The corpus covers all architectures, matches its index, and is small enough to commit."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from tests.corpus import catalogue
from tests.corpus.triton_kernels import ALL, ENTRIES, SKIPPED


def capability(path: Path) -> int:
    """The architecture number in the file name of a cubin."""
    match = re.search(r"\.sm_(\d+)a?\.cubin$", path.name)
    assert match, path
    return int(match.group(1))


def test_names_are_unique_and_skipped_names_exist() -> None:
    names = [entry.name(cc) for entry in ENTRIES for cc in entry.capabilities]
    assert len(names) == len(set(names))
    assert {name for _, name in SKIPPED} <= set(names)
    assert all(reason for reason in SKIPPED.values())


def test_the_corpus_is_large_and_covers_all_architectures() -> None:
    if catalogue.slice_step() > 1:
        pytest.skip(f"only a slice is selected ({catalogue.SLICE_VARIABLE})")
    for version in catalogue.versions():
        folder = catalogue.folder(version)
        cubins = [path for path in catalogue.triton_corpus() if path.parent == folder]
        assert len(cubins) >= 110
        assert {capability(path) for path in cubins} == set(ALL)
    assert len(catalogue.corpus()) >= 200
    assert {capability(path) for path in catalogue.nvcc_corpus()} == set(ALL)


def test_cubins_have_the_digest_of_their_index_entry() -> None:
    for path, item in catalogue.indexed_cubins():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == item["sha256"], path
        assert item["arch"] == f"sm_{capability(path)}"
        assert item["launch"]["block"][0] % 32 == 0


def test_committed_binaries_are_small() -> None:
    folders = (catalogue.NVCC, catalogue.EXAMPLES_NVCC)
    files = [path for folder in folders for path in folder.iterdir()]
    sizes = {p.name: p.stat().st_size for p in files if p.suffix in (".cubin", ".fatbin")}
    assert max(sizes.values()) < 60_000
    assert sum(sizes.values()) < 2_500_000
    assert len(catalogue.fatbins()) == 2
    assert len(catalogue.unsupported_cubins()) == 2


@pytest.mark.parametrize("text", ["0", "-3", "many", ""])
def test_a_slice_must_be_a_positive_number(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(catalogue.SLICE_VARIABLE, text)
    with pytest.raises(ValueError, match="whole number"):
        catalogue.slice_step()


def test_a_slice_is_every_nth_cubin(monkeypatch: pytest.MonkeyPatch) -> None:
    version = catalogue.OLD_TRITON_VERSION
    entries = catalogue.triton_entries(version)
    part = catalogue.triton_entries(version, 7)
    assert len(part) == -(-len(entries) // 7)
    assert {item[2] for item in part} <= {item[2] for item in entries}


def test_cubins_of_every_slice_exist() -> None:
    installed = catalogue.versions()[1]
    part = {item[2] for item in catalogue.triton_entries(installed, 10_000)}
    assert part >= set(catalogue.IN_EVERY_SLICE)
    assert len(part) <= len(catalogue.IN_EVERY_SLICE) + 1
    built = {path.stem for path in catalogue.triton_corpus()}
    assert built >= set(catalogue.IN_EVERY_SLICE)
