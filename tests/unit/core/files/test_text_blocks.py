"""Text of files in blocks, compared with Python's own gzip and codecs, and pointers to files."""

from __future__ import annotations

import codecs
import gzip
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nostall.core.errors import BadInput
from nostall.core.files.text_blocks import TextBlocks


class Refused(BadInput):
    """The class of errors that the tests ask for."""


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\ufeff"), max_size=60)


@given(
    texts=st.lists(TEXTS, min_size=1, max_size=3),
    encoding=st.sampled_from(("utf-8", "utf-8-sig", "utf-16-le", "utf-16-be")),
    is_packed=st.booleans(),
    padding=st.integers(0, 3),
    chunk=st.integers(1, 7),
)
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_text_is_that_of_gzip_and_codecs(
    texts: list[str], encoding: str, is_packed: bool, padding: int, chunk: int, tmp_path: Path
) -> None:
    marks = {"utf-16-le": codecs.BOM_UTF16_LE, "utf-16-be": codecs.BOM_UTF16_BE}
    data = marks.get(encoding, b"") + "".join(texts).encode(encoding)
    path, packed = tmp_path / "text", data
    if is_packed:  # several members, and zeros at the end, which gzip permits
        half = len(data) // 2
        packed = gzip.compress(data[:half]) + gzip.compress(data[half:]) + b"\0" * padding
    path.write_bytes(packed)
    read: list[int] = []
    text = TextBlocks(path, read.append, chunk=chunk)
    assert b"".join(text).decode() == "".join(texts)
    assert text.damage is None
    assert text.size == len("".join(texts).encode())
    if packed:
        assert read == sorted(read) and read[-1] == len(packed)
    if not is_packed:
        assert len(read) == -(-len(packed) // chunk)


def test_half_a_character_at_the_end_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(codecs.BOM_UTF16_LE + "ab\ud83d".encode("utf-16-le", "surrogatepass") + b"c\0")
    assert b"".join(TextBlocks(path)).decode().startswith("ab\ufffd")


@pytest.mark.parametrize("chunk", [1, 2, 5, 1 << 20])
def test_unpaired_surrogates_are_replaced_in_every_block(tmp_path: Path, chunk: int) -> None:
    path = tmp_path / "text"
    wrong = b"\x00\xd8a\x00" * 4
    path.write_bytes(codecs.BOM_UTF16_LE + wrong)
    expected = wrong.decode("utf-16-le", errors="replace")
    assert b"".join(TextBlocks(path, chunk=chunk)).decode() == expected


@pytest.mark.parametrize("kept", [0.3, 0.9])
def test_a_cut_stream_gives_its_beginning_and_the_damage(tmp_path: Path, kept: float) -> None:
    path, data = tmp_path / "text.gz", b"".join(b"%d\n" % i for i in range(20_000))
    packed = gzip.compress(data)
    path.write_bytes(packed[: int(len(packed) * kept)])
    text = TextBlocks(path)
    found = b"".join(text)
    assert data.startswith(found) and 0 < len(found) < len(data)
    assert text.damage is not None and f"after {len(found)} unpacked bytes" in text.damage


@pytest.mark.parametrize(
    ("content", "remedy"),
    [
        (
            "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 12345\n",
            "12,345 bytes that are not here; run 'git lfs pull'",
        ),
        ("/annex/objects/SHA256E-s3--abc.csv\n", "run 'git annex get'"),
    ],
)
def test_a_pointer_in_place_of_a_file_is_refused(tmp_path: Path, content: str, remedy: str) -> None:
    path = tmp_path / "text"
    path.write_text(content)
    with pytest.raises(Refused, match=remedy):
        list(TextBlocks(path, error=Refused))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="No such file or directory; check the path"):
        list(TextBlocks(tmp_path / "none", error=Refused))
