"""Texts of instructions, from nvdisasm's listing without register marks."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from nostall.core.errors import BadBinary
from nostall.sass.binary import toolchain
from nostall.sass.binary.listing import Listing, parse
from nostall.sass.binary.scratch_cubin import scratch_cubin, scratch_name
from tools.mining.functions import CodeFunction

_LINE = re.compile(r"^ +/\*[0-9a-f]{4,}\*/ +(?P<text>.*?) *; +/\* 0x", re.MULTILINE)


@dataclass(slots=True)
class Texts:
    """The instructions of one function as text."""

    texts: list[str]
    labels: list[int]
    """Positions that relative branches name, in instructions."""


def word_texts(flags: int, words: Sequence[bytes]) -> list[str]:
    """The texts of instruction words, without analysis of their control flow.

    ``flags``: as in :func:`.scratch_cubin`.  Raises :class:`BadBinary` if nvdisasm rejects one.
    """
    text = _run_nvdisasm(flags, (b"".join(words),), ("-ndf",))
    texts = [line["text"] for line in _LINE.finditer(text)]
    if len(texts) != len(words):
        raise BadBinary(f"nvdisasm printed {len(texts)} of {len(words)} instructions")
    return texts


def marked_listings(functions: Sequence[CodeFunction]) -> list[Listing]:
    """The listings of functions of one architecture with register marks, which take long."""
    codes = [function.code for function in functions]
    listings = parse(_run_nvdisasm(functions[0].flags, codes, ("-lrm", "narrow")))
    return [listings[scratch_name(number)] for number in range(len(functions))]


def _run_nvdisasm(flags: int, codes: Sequence[bytes], options: tuple[str, ...]) -> str:
    data = scratch_cubin(flags, codes)
    with tempfile.NamedTemporaryFile(suffix=".cubin", prefix="nostall-") as file:
        file.write(data)
        file.flush()
        tool = str(toolchain.find("nvdisasm"))
        return toolchain.run([tool, *options, "-hex", "-c", file.name], "nvdisasm")
