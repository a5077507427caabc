"""Hash of what a GPU runs and the driver reads of a cubin: no names, no debugging information."""

from __future__ import annotations

import hashlib

from nostall.sass.binary.elf import SHT_CUDA_INFO, SHT_NOBITS, Elf

_SHF_ALLOC = 2
_REGISTERS_SHIFT = 24
"""The upper byte of ``sh_info`` of a text section holds the registers in the older ELF variant."""


def code_sha256(data: bytes) -> str:
    """The sha256 of the loaded sections of a cubin and of its launch attributes.

    Two cubins with the same hash run the same instructions with the same registers and memory.
    Raises :class:`~nostall.core.errors.BadBinary` if ``data`` is not a cubin.
    """
    elf = Elf.parse(data)
    digest = hashlib.sha256()
    for section in sorted(elf.sections, key=lambda s: (s.name, s.index)):
        is_loaded = bool(section.flags & _SHF_ALLOC)
        if not is_loaded and section.type != SHT_CUDA_INFO:
            continue
        registers = section.info >> _REGISTERS_SHIFT if section.name.startswith(".text.") else 0
        digest.update(f"{section.name}\0{section.size}\0{registers}\0".encode())
        if section.type != SHT_NOBITS:
            digest.update(elf.content(section))
    return digest.hexdigest()
