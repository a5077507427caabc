"""Files that hold several cubins: fatbins, and host objects, programs and libraries with one.

The vendor's ``cuobjdump`` takes them apart, so compressed images need no code of ours.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from nostall.core.errors import BadBinary, BadInput
from nostall.sass.binary import toolchain
from nostall.sass.binary.cubin import Cubin
from nostall.sass.binary.elf import EM_CUDA, MAX_BYTES

_MAGIC = bytes.fromhex("50ed55ba")
_ELF = b"\x7fELF"
_HOST_SECTION = b".nv_fatbin\0"
_IMAGE = re.compile(r"\.(\d+)\.(sm_\d+[a-z]?)\.cubin$")


@dataclass(frozen=True, slots=True)
class Image:
    """One cubin of a container; ``arch`` is its full name, such as ``sm_90a``."""

    arch: str
    data: bytes


def is_container(data: bytes) -> bool:
    """Whether the bytes are a fatbin or a host ELF file that carries one."""
    if data.startswith(_MAGIC):
        return True
    machine = int.from_bytes(data[18:20], "little")
    return data.startswith(_ELF) and machine != EM_CUDA and _HOST_SECTION in data


def extract(data: bytes, arch: str | None = None, kernel: str | None = None) -> bytes:
    """The one cubin of a container that is for ``arch`` and, where that leaves several, holds
    ``kernel``; bytes that are no container are returned as they are.

    Raises :class:`BadInput` when no image or several images remain.
    """
    if not is_container(data):
        return data
    found = images(data)
    chosen = [i for i in found if arch is None or i.arch == arch]
    chosen = chosen or [i for i in found if arch is not None and i.arch.rstrip("af") == arch]
    if len(chosen) > 1 and kernel is not None:
        chosen = [i for i in chosen if _holds(i, kernel)] or chosen
    if len(chosen) == 1:
        return chosen[0].data
    there = ", ".join(i.arch for i in found)
    if not chosen:
        raise BadInput(f"there is no image for {arch} in the file; it holds images for: {there}")
    if arch is None and len({i.arch for i in chosen}) > 1:
        raise BadInput(
            f"the file holds {len(found)} images, for: {there}; choose one with --arch ARCH"
        )
    raise BadInput(
        f"the file holds {len(chosen)} images for {chosen[0].arch}; choose one by its kernel with "
        "--kernel NAME, or take the file apart with `cuobjdump -xelf all`"
    )


def images(data: bytes) -> tuple[Image, ...]:
    """All cubins of a container, in the file's order."""
    if len(data) > MAX_BYTES:
        raise BadBinary(f"the file has {len(data)} bytes; at most {MAX_BYTES} are read")
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        place = Path(folder)
        (place / "input").write_bytes(data)
        tool = str(toolchain.find("cuobjdump"))
        toolchain.run([tool, "-xelf", "all", "input"], "cuobjdump", cwd=place)
        found: list[tuple[int, Image]] = []
        for path in place.glob("*.cubin"):
            name = _IMAGE.search(path.name)
            if name is None:
                continue
            if path.stat().st_size > MAX_BYTES:
                raise BadBinary(f"image {name[1]} unpacks to more than {MAX_BYTES} bytes")
            found.append((int(name[1]), Image(name[2], path.read_bytes())))
    if not found:
        raise BadBinary(
            "the file holds no machine code (only PTX, or nothing); compile for a real "
            "architecture, for example -gencode arch=compute_90,code=sm_90"
        )
    return tuple(image for _, image in sorted(found, key=lambda item: item[0]))


def _holds(image: Image, kernel: str) -> bool:
    try:
        return any(t.is_kernel and t.name == kernel for t in Cubin.parse(image.data).texts)
    except BadBinary:
        return False
