"""Texts of instructions, from nvdisasm's listing without register marks.

nvdisasm analyses its whole input and needs memory for all of it: 3.4 GB and 95 s for a cubin of
10 MB.  It also takes time for each call and for each long symbol name.  One scratch cubin has the
functions that are needed, from several cubins and under short names, for nvdisasm only, so a call
has a bounded amount of work.
"""

from __future__ import annotations

import re
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from nostall.core.errors import BadBinary
from nostall.sass.binary import toolchain
from nostall.sass.binary.elf import (
    ELF_HEADER,
    ELF_SECTION,
    ELF_SYMBOL,
    EM_CUDA,
    SHT_PROGBITS,
    SHT_STRTAB,
    SHT_SYMTAB,
    STO_CUDA_ENTRY,
    STT_FUNC,
)
from nostall.sass.binary.listing import Listing, parse
from tools.mining.functions import CodeFunction

_ABI, _ABI_VERSION, _EXECUTABLE = 65, 8, 2
_ALLOCATED_AND_EXECUTABLE = 6
_GLOBAL = 1 << 4
_REGISTERS_SHIFT = 24
MAX_REGISTERS = 255


def scratch_name(number: int) -> str:
    """The name of function ``number`` of a scratch cubin."""
    return f"f{number}"


def scratch_cubin(flags: int, codes: Sequence[bytes]) -> bytes:
    """A cubin whose functions have the machine code ``codes``.

    ``flags`` are the ELF flags of the newer cubin variant, which name the architecture.
    Relocations are left out, so an operand that the linker patches has the value in the file.
    """
    names = [scratch_name(number) for number in range(len(codes))]
    strings = bytearray(b"\0")
    places: dict[str, int] = {}
    for text in (".strtab", ".symtab", *names, *(f".text.{name}" for name in names)):
        places[text] = len(strings)
        strings += text.encode() + b"\0"
    symbols = bytearray(ELF_SYMBOL.size)
    for number, (name, code) in enumerate(zip(names, codes, strict=True)):
        symbols += ELF_SYMBOL.pack(
            places[name], _GLOBAL | STT_FUNC, STO_CUDA_ENTRY, 3 + number, 0, len(code)
        )
    data = bytearray(ELF_HEADER.size)
    headers = bytearray(ELF_SECTION.size)
    tables = ((".strtab", SHT_STRTAB, strings, 0, 0, 0), (".symtab", SHT_SYMTAB, symbols, 1, 1, 24))
    for name, kind, content, link, info, entry_size in tables:
        headers += ELF_SECTION.pack(
            places[name], kind, 0, 0, len(data), len(content), link, info, 8, entry_size
        )
        data += content + bytes(-len(content) % 128)
    data += bytes(-len(data) % 128)
    for number, (name, code) in enumerate(zip(names, codes, strict=True)):
        info = MAX_REGISTERS << _REGISTERS_SHIFT | 1 + number
        headers += ELF_SECTION.pack(
            places[f".text.{name}"],
            SHT_PROGBITS,
            _ALLOCATED_AND_EXECUTABLE,
            0,
            len(data),
            len(code),
            2,
            info,
            128,
            0,
        )
        data += code + bytes(-len(code) % 128)
    ident = struct.pack("<4sBBBBB7x", b"\x7fELF", 2, 1, 1, _ABI, _ABI_VERSION)
    data[: ELF_HEADER.size] = ELF_HEADER.pack(
        *(ident, _EXECUTABLE, EM_CUDA, 1, 0, 0, len(data), flags),
        *(ELF_HEADER.size, 0, 0, ELF_SECTION.size, 3 + len(codes), 1),
    )
    return bytes(data + headers)


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
