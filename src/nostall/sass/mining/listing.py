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
from nostall.sass.mining.functions import CodeFunction

_LINE = re.compile(
    r"^\t\.section\t\.text\.(?P<section>[^,]+),"
    r"|^(?P<label>\.L_x_\d+):"
    r"|^ +/\*[0-9a-f]{4,}\*/ +(?P<text>.*?) *; +/\* 0x",
    re.MULTILINE,
)


@dataclass(slots=True)
class Texts:
    """The instructions of one function as text."""

    texts: list[str]
    labels: list[int]
    """Positions of labels, in instructions."""


def plain_texts(functions: Sequence[CodeFunction]) -> list[Texts]:
    """The instructions of functions of one architecture, without analysis of their control flow.

    Raises :class:`BadBinary` if nvdisasm rejects one of them, or lists too few instructions.
    """
    return _parse_plain(_run_nvdisasm(functions, ("-ndf",)), len(functions))


def marked_listings(functions: Sequence[CodeFunction]) -> list[Listing]:
    """The listings of functions of one architecture with register marks, which take long."""
    listings = parse(_run_nvdisasm(functions, ("-lrm", "narrow")))
    return [listings[scratch_name(number)] for number in range(len(functions))]


def _run_nvdisasm(functions: Sequence[CodeFunction], options: tuple[str, ...]) -> str:
    data = scratch_cubin(functions[0].flags, [f.code for f in functions])
    with tempfile.NamedTemporaryFile(suffix=".cubin", prefix="nostall-") as file:
        file.write(data)
        file.flush()
        tool = str(toolchain.find("nvdisasm"))
        return toolchain.run([tool, *options, "-hex", "-c", file.name], "nvdisasm")


def _parse_plain(text: str, count: int) -> list[Texts]:
    """The functions of a listing of a scratch cubin with ``count`` functions."""
    by_name = {scratch_name(number): Texts([], []) for number in range(count)}
    current = Texts([], [])
    for line in _LINE.finditer(text):
        if line["text"] is not None:
            current.texts.append(line["text"])
        elif line["label"] is not None:
            current.labels.append(len(current.texts))
        else:
            current = by_name[line["section"]]
    if not all(t.texts for t in by_name.values()):
        raise BadBinary("nvdisasm printed no instructions for a function")
    return list(by_name.values())
