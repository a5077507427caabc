"""Files of the store in folders that do not exist yet, exist, or cannot be made."""

from __future__ import annotations

from pathlib import Path

import pytest

from nostall.store.artefacts import CUBIN, Artefacts
from nostall.store.errors import BadStore
from nostall.store.result_files import write_result_file


def test_result_files_are_written_into_new_and_existing_folders(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "record.json"
    for text in (b"{}", b"[1]"):
        write_result_file(path, text)
        assert path.read_bytes() == text + b"\n"
        assert [file.name for file in path.parent.iterdir()] == ["record.json"]


def test_a_file_in_place_of_the_folder_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(BadStore, match="Not a directory; set NOSTALL_HOME"):
        write_result_file(tmp_path / "a" / "b" / "record.json", b"{}")


def test_artefacts_make_their_folder(tmp_path: Path) -> None:
    artefacts = Artefacts(tmp_path / "new" / "objects")
    assert artefacts.get(artefacts.put(b"data", CUBIN), CUBIN) == b"data"
