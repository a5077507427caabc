"""Files of typed values: what is read equals what was written, and reading runs no code."""

from __future__ import annotations

import os
import pickle
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tools.typed_file import read_typed, write_typed

from nostall.core.errors import BadInput


@dataclass(slots=True)
class Part:
    """Everything that the files of mining hold."""

    names: Counter[tuple[str, int]] = field(default_factory=Counter[tuple[str, int]])
    by_number: dict[int, Counter[str]] = field(default_factory=dict[int, Counter[str]])
    keys: set[bytes] = field(default_factory=set[bytes])
    template: tuple[tuple[int, int], ...] | None = None


@given(
    st.dictionaries(st.tuples(st.text(), st.integers(0, 99)), st.integers(0, 1 << 40)),
    st.dictionaries(st.integers(), st.dictionaries(st.text(), st.integers(0, 9))).filter(
        lambda values: all(abs(key) < 1 << 62 for key in values)
    ),
    st.sets(st.binary()),
    st.none() | st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9))).map(tuple),
)
def test_what_is_read_equals_what_was_written(
    tmp_path_factory: pytest.TempPathFactory,
    names: dict[tuple[str, int], int],
    by_number: dict[int, dict[str, int]],
    keys: set[bytes],
    template: tuple[tuple[int, int], ...] | None,
) -> None:
    path = tmp_path_factory.mktemp("typed") / "file"
    part = Part(Counter(names), {k: Counter(v) for k, v in by_number.items()}, keys, template)
    write_typed(path, (3, part))
    number, read = read_typed(path, tuple[int, Part])
    assert (number, read) == (3, part)
    assert isinstance(read.names, Counter)
    assert all(isinstance(value, Counter) for value in read.by_number.values())


class _Attack:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.marker),))


def test_a_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(pickle.dumps(_Attack(tmp_path / "ran")))
    with pytest.raises(BadInput, match=r"holds something else .*; delete it"):
        read_typed(tmp_path / "file", Part)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\x01", b"\xa3abc", b"\x81\xa5names\x01"])
def test_damaged_files_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(BadInput, match="file"):
        read_typed(tmp_path / "file", Part)
    with pytest.raises(BadInput, match="cannot read"):
        read_typed(tmp_path / "none", Part)
