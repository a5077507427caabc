"""Cubin container: architecture, functions, and the file positions of their machine code.

Parameters of a kernel, as the cubin records them: position, offset and size of each.  Layouts (seen
in cubins of nvcc and Triton, checked against their sources in the tests):

- ``KPARAM_INFO``: u32 index, u16 ordinal, u16 offset, u32 flags with the size in bits 18 to 31
- ``KPARAM_INFO_V2``, for parameters of 16 KB and more: u32, u16 ordinal, u16 offset, u32 size
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

from nostall.core.errors import BadBinary, BadInput, UnsupportedArchitecture
from nostall.sass.binary.attributes import OffsetRecord, offset_records, parse_attributes
from nostall.sass.binary.elf import (
    SHT_CUDA_INFO,
    SHT_NOBITS,
    STO_CUDA_ENTRY,
    STT_FUNC,
    Elf,
    Relocation,
    Section,
    Symbol,
)
from nostall.sass.binary.encoding import WORD_BYTES

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
"""Supported architectures; 90 stands for sm_90 and sm_90a."""
ARCHITECTURE_NAMES = tuple(
    f"sm_{sm}{suffix}" for sm in ARCHITECTURES for suffix in ("", "a") if sm >= 90 or not suffix
)
"""Supported architectures as options name them; the suffix a: with instructions of this one only.
"""

_OLD_ABI, _NEW_ABI = 51, 65
"""Values of EI_OSABI in the two ELF variants of cubins (older and newer CUDA toolkits)."""
_NEW_ABI_VERSION = 8
_EV_CURRENT = 1


@dataclass(frozen=True, slots=True)
class TextSection:
    """The machine code of one function (an entry kernel or a device function)."""

    name: str
    """Name of the function.  Local functions of linked files may share a name: the second one is
    ``NAME#2``."""
    file_offset: int
    """File position of the first instruction word, in bytes."""
    size: int
    """Size in bytes."""
    is_kernel: bool
    """Whether the function is an entry point (``__global__``)."""
    entries: tuple[tuple[int, str], ...]
    """(offset in bytes, name) of each function symbol in this section."""
    records: tuple[OffsetRecord, ...]
    """Offsets into this section that other sections record."""
    pinned: frozenset[int]
    """Offsets of instructions that must not move, because an unreadable record may name them."""


@dataclass(frozen=True, slots=True)
class Cubin:
    """A parsed cubin."""

    elf: Elf
    sm: int
    """Architecture number, such as 90."""
    texts: tuple[TextSection, ...]
    """One section for each function, in the order of the file."""

    @property
    def data(self) -> bytes:
        """The bytes of the file."""
        return self.elf.data

    @classmethod
    def parse(cls, data: bytes) -> Cubin:
        """Parse a cubin of either ELF variant.

        Raises :class:`BadBinary` if ``data`` is not a complete cubin with machine code,
        :class:`UnsupportedArchitecture` if it is for an architecture outside ``ARCHITECTURES``, and
        :class:`BadInput` if it is not bytes, for example a path.
        """
        require_bytes(data, "a cubin")
        elf = Elf.parse(data)
        sm = _read_architecture(elf)
        symbols: dict[int, list[Symbol]] = {}
        for symbol in elf.symbols():
            symbols.setdefault(symbol.section, []).append(symbol)
        relocations: dict[int, list[Relocation]] = {}
        for relocation in elf.relocations():
            relocations.setdefault(relocation.target, []).append(relocation)
        infos: dict[str, list[Section]] = {}
        for section in elf.sections:
            if section.type == SHT_CUDA_INFO:
                infos.setdefault(section.name, []).append(section)
        texts: dict[str, TextSection] = {}
        for section in elf.sections:
            if not _holds_machine_code(section):
                continue
            records = [
                OffsetRecord(r.file_offset, r.offset, 8, f"relocation {r.type}")
                for r in relocations.get(section.index, ())
                if r.offset < section.size
            ]
            text = _text_section(elf, section, symbols.get(section.index, []), records, infos)
            if text.name in texts:
                _check_local(section, symbols.get(section.index, []))
                earlier = sum(base_name(name) == text.name for name in texts)
                text = replace(text, name=f"{text.name}#{earlier + 1}")
            texts[text.name] = text
        if not texts:
            raise BadBinary(
                "the cubin has no machine code (.text section); compile for a real architecture, "
                "for example -arch=sm_90"
            )
        return cls(elf, sm, tuple(texts.values()))


def base_name(name: str) -> str:
    """The name of a function without the number of :attr:`TextSection.name`."""
    return name.partition("#")[0]


def _check_local(section: Section, symbols: list[Symbol]) -> None:
    """Raise :class:`BadBinary` if a further section of one name is not a local function's."""
    own = [s for s in symbols if f".text.{s.name}" == section.name and s.type == STT_FUNC]
    if not own or not all(symbol.is_local for symbol in own):
        raise BadBinary(
            f"section {section.name!r} appears twice, but only local functions may share a name; "
            "the file is damaged"
        )


def require_bytes(value: object, name: str) -> None:
    """Raise :class:`BadInput` if ``value`` is not bytes; ``name`` begins the message."""
    if not isinstance(value, bytes | bytearray | memoryview):
        raise BadInput(
            f"{name} is {value!r} of type {type(value).__name__}; the bytes of a cubin are "
            "required; read the file first, for example Path(name).read_bytes()"
        )


def upgrade_elf_header(data: bytes, sm: int) -> bytes:
    """Copy a cubin and give it the header of the newer ELF variant; a newer cubin is unchanged.

    A current nvdisasm prints no register marks for the older variant: it reports "flow analysis
    is disabled".  The copy is for nvdisasm only.
    """
    if data[7] != _OLD_ABI:
        return data
    copy = bytearray(data)
    copy[7], copy[8] = _NEW_ABI, _NEW_ABI_VERSION
    struct.pack_into("<I", copy, 0x14, _EV_CURRENT)
    struct.pack_into("<I", copy, 0x30, 0x06000000 | (0x04 if sm < 100 else 0x02) | sm << 8)
    return bytes(copy)


def check_architecture(sm: int, subject: str) -> None:
    """Raise :class:`UnsupportedArchitecture` if nostall does not support ``sm``.

    ``subject`` begins the message, for example "the cubin is for".
    """
    if sm not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURE_NAMES)
        raise UnsupportedArchitecture(f"{subject} sm_{sm}; supported are {supported}")


def _read_architecture(elf: Elf) -> int:
    """The architecture number in the ELF flags."""
    if elf.os_abi == _OLD_ABI:
        sm = elf.flags & 0xFF
    elif elf.os_abi == _NEW_ABI:
        sm = elf.flags >> 8 & 0xFF
    else:
        raise BadBinary(
            f"ELF OS/ABI {elf.os_abi} is not a known cubin variant ({_OLD_ABI} or {_NEW_ABI}); the "
            "file may be relocatable device code or a newer format; give a linked cubin"
        )
    check_architecture(sm, "the cubin is for")
    return sm


def _holds_machine_code(section: Section) -> bool:
    """Whether a section is a ``.text`` section that is not empty."""
    if not section.name.startswith(".text.") or section.type == SHT_NOBITS:
        return False
    if section.size % WORD_BYTES:
        raise BadBinary(
            f"section {section.name!r} has {section.size} bytes; machine code must be a multiple "
            f"of {WORD_BYTES} bytes; the file is damaged"
        )
    return section.size > 0


def _text_section(
    elf: Elf,
    section: Section,
    symbols: list[Symbol],
    records: list[OffsetRecord],
    infos: dict[str, list[Section]],
) -> TextSection:
    """Collect what the file says about one ``.text`` section.

    ``symbols`` and ``records`` are those of this section; ``infos`` maps the name of each
    ``.nv.info`` section of the file to the sections of that name.
    """
    name = section.name.removeprefix(".text.")
    functions = [s for s in symbols if s.type == STT_FUNC]
    pinned: set[int] = set()
    infos_of_name = infos.get(f".nv.info.{name}", [])
    if len(infos_of_name) > 1:
        infos_of_name = [info for info in infos_of_name if info.info == section.index]
    for info in infos_of_name:
        info_records, info_pinned = offset_records(elf, info, section.size)
        records = records + info_records
        pinned |= info_pinned
    return TextSection(
        name=name,
        file_offset=section.offset,
        size=section.size,
        is_kernel=any(s.other & STO_CUDA_ENTRY and s.name == name for s in functions),
        entries=tuple(sorted({(s.value, s.name) for s in functions})),
        records=tuple(records),
        pinned=frozenset(pinned),
    )


_KPARAM_INFO, _KPARAM_INFO_V2 = 0x17, 0x45
_RECORD = struct.Struct("<IHHI")

_SIZE_SHIFT = 18


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a kernel."""

    ordinal: int
    """Position in the kernel's parameter list, from 0."""
    offset: int
    """Bytes from the first parameter."""
    size: int
    """Bytes; 8 for a pointer."""


def kernel_parameters(cubin: Cubin, kernel: str) -> tuple[Parameter, ...] | None:
    """The parameters of a kernel in order; None if the cubin has no records of the kernel.

    Raises :class:`BadBinary` if the records are damaged.
    """
    section = next((s for s in cubin.elf.sections if s.name == f".nv.info.{kernel}"), None)
    if section is None:
        return None
    found: list[Parameter] = []
    for attribute in parse_attributes(cubin.elf, section):
        if attribute.code not in (_KPARAM_INFO, _KPARAM_INFO_V2):
            continue
        if len(attribute.payload) != _RECORD.size:
            raise BadBinary(
                f"kernel {kernel!r} has a parameter record of {len(attribute.payload)} bytes; "
                f"records have {_RECORD.size}"
            )
        _, ordinal, offset, last = _RECORD.unpack(attribute.payload)
        size = last if attribute.code == _KPARAM_INFO_V2 else last >> _SIZE_SHIFT
        found.append(Parameter(ordinal, offset, size))
    found.sort(key=lambda parameter: parameter.ordinal)
    if [parameter.ordinal for parameter in found] != list(range(len(found))):
        raise BadBinary(
            f"kernel {kernel!r} has records of the parameters "
            f"{[parameter.ordinal for parameter in found][:20]}; they must be numbered from 0"
        )
    return tuple(found)
