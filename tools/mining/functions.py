"""The functions of a source, each one once, as machine code with the positions where blocks begin.

A function is known by a keyed hash of its code.  The hash is also its place in a random order: the
functions with the smallest hashes are a random sample, which needs no list of all functions.
"""

from __future__ import annotations

import heapq
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path

from nostall.core.errors import BadBinary, UnsupportedArchitecture
from nostall.sass.binary.cubin import (
    ARCHITECTURES,
    Cubin,
    TextSection,
    base_name,
    upgrade_elf_header,
)
from nostall.sass.binary.elf import SHT_CUDA_INFO
from nostall.sass.binary.encoding import WORD_BYTES
from nostall.sass.binary.subset import cut
from tools.mining.archive import images

_CUDA_API_VERSION = 0x37
"""Attribute with the CUDA version as a u32: 124 for CUDA 12.4."""


@dataclass(frozen=True, slots=True, order=True)
class CodeFunction:
    """One function, without the file that it comes from."""

    key: bytes
    """Keyed hash of the machine code."""
    sm: int = field(compare=False)
    flags: int = field(compare=False)
    """ELF flags of the newer cubin variant."""
    cuda: str = field(compare=False)
    """CUDA version, such as ``12.4``, or ``unknown``."""
    code: bytes = field(compare=False)
    starts: tuple[int, ...] = field(compare=False)
    """Positions that records of the cubin name, in instructions: control may enter there."""
    cubin: bytes = field(compare=False, default=b"")
    """A cubin with this function alone, if it was asked for."""

    @property
    def size(self) -> int:
        """The number of instructions."""
        return len(self.code) // WORD_BYTES


@dataclass(slots=True)
class Contents:
    """What a source contains."""

    sample: dict[int, list[CodeFunction]] = field(default_factory=dict[int, list[CodeFunction]])
    """Architecture -> the functions of the sample, in random order."""
    functions: Counter[int] = field(default_factory=Counter[int])
    """Architecture -> number of functions in the source."""
    distinct: Counter[int] = field(default_factory=Counter[int])
    """Architecture -> number of functions with different machine code."""
    unsupported: Counter[int] = field(default_factory=Counter[int])
    """Architecture that nostall does not support -> number of cubins."""
    without_code: int = 0
    """Cubins without machine code."""
    unreadable: Counter[str] = field(default_factory=Counter[str])
    """Reason -> number of cubins that could not be read."""


def read_source(
    path: Path, seed: int, limit: int, max_size: int, *, with_cubins: bool = False
) -> Contents:
    """Read a source and draw a random sample of its functions.

    ``limit``: functions of the sample for each architecture.  ``max_size``: instructions of the
    largest function that is drawn.  ``with_cubins``: each function has a cubin of its own.
    """
    contents = Contents()
    seen: set[bytes] = set()
    heaps: dict[int, list[tuple[int, CodeFunction]]] = {}
    for image in images(path, frozenset(ARCHITECTURES)):
        if image.problem:
            contents.unreadable[image.problem] += 1
            continue
        if not image.data:
            contents.unsupported[image.sm] += 1
            continue
        for function, cubin, name in _functions(image.data, seed, contents):
            contents.functions[function.sm] += 1
            if function.key in seen:
                continue
            seen.add(function.key)
            contents.distinct[function.sm] += 1
            heap = heaps.setdefault(function.sm, [])
            order = -int.from_bytes(function.key, "big")
            if function.size > max_size or (len(heap) == limit and order < heap[0][0]):
                continue
            drawn = (
                replace(function, cubin=cut(cubin.elf, (base_name(name),)))
                if with_cubins
                else function
            )
            (heapq.heappush if len(heap) < limit else heapq.heappushpop)(heap, (order, drawn))
    for sm, heap in heaps.items():
        contents.sample[sm] = sorted(function for _, function in heap)
    return contents


def _functions(
    data: bytes, seed: int, contents: Contents
) -> Iterator[tuple[CodeFunction, Cubin, str]]:
    """(function, its cubin, its name) of one image; ``contents`` counts what is unreadable."""
    try:
        cubin = Cubin.parse(data)
    except UnsupportedArchitecture:
        contents.unsupported[_stated_architecture(data)] += 1
        return
    except BadBinary as error:
        if "no machine code" in str(error):
            contents.without_code += 1
        else:
            contents.unreadable[str(error)[:80]] += 1
        return
    header = upgrade_elf_header(data[:64], cubin.sm)
    (flags,) = struct.unpack_from("<I", header, 0x30)
    cuda = _cuda_version(cubin)
    for text in cubin.texts:
        code = data[text.file_offset : text.file_offset + text.size]
        digest = blake2b(code, digest_size=12, key=f"{seed} {cubin.sm}".encode())
        function = CodeFunction(digest.digest(), cubin.sm, flags, cuda, code, _starts(text))
        yield function, cubin, text.name


def _starts(text: TextSection) -> tuple[int, ...]:
    offsets = {offset for offset, _ in text.entries}
    offsets |= {record.offset for record in text.records if record.is_branch_target}
    return tuple(sorted(offset // WORD_BYTES for offset in offsets))


def _stated_architecture(data: bytes) -> int:
    flags = int.from_bytes(data[0x30:0x34], "little")
    return flags >> 8 & 0xFF if data[7] == 65 else flags & 0xFF


def _cuda_version(cubin: Cubin) -> str:
    """The CUDA version that the attributes of a cubin state."""
    for section in cubin.elf.sections:
        if section.type == SHT_CUDA_INFO:
            content = cubin.elf.content(section)
            at = 0
            while at + 4 <= len(content):
                form, code, value = struct.unpack_from("<BBH", content, at)
                if form == 4 and code == _CUDA_API_VERSION and at + 8 <= len(content):
                    (version,) = struct.unpack_from("<I", content, at + 4)
                    return f"{version // 10}.{version % 10}"
                at += 4 + (value if form == 4 else 0)
    return "unknown"
