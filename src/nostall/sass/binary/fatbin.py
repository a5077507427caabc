"""Extract cubins and PTX from a fatbin, or from a host object, program or library with one.

NVIDIA's ``cuobjdump`` unpacks the images, so compressed images need no code here.
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

_FATBIN_MAGIC = bytes.fromhex("50ed55ba")
_ELF_MAGIC = b"\x7fELF"
_HOST_SECTION = b".nv_fatbin\0"
_IMAGE_NAME = re.compile(r"\.(\d+)\.(sm_\d+[a-z]?)\.cubin$")

_PTX_LINE = re.compile(
    r"^Extracting PTX file.*?: ([^\s/]+\.(sm_\d+[a-z]?)\.ptx)(.*)$", re.MULTILINE
)
"""Line of cuobjdump: the file it writes, and the options of ptxas."""


@dataclass(frozen=True, slots=True)
class Image:
    """One cubin of a container; ``arch`` is its full architecture name, such as ``sm_90a``."""

    arch: str
    data: bytes


@dataclass(frozen=True, slots=True)
class PtxImage:
    """One PTX text of a container."""

    arch: str
    """Full name of the architecture, such as ``sm_90a``."""
    text: str
    options: tuple[str, ...]
    """Options of ptxas that the compiler recorded."""


def is_container(data: bytes) -> bool:
    """Whether the bytes are a fatbin, or a host ELF file with a fatbin section."""
    if data.startswith(_FATBIN_MAGIC):
        return True
    machine = int.from_bytes(data[18:20], "little")
    return data.startswith(_ELF_MAGIC) and machine != EM_CUDA and _HOST_SECTION in data


def extract(data: bytes, arch: str | None = None, kernel: str | None = None) -> bytes:
    """Extract the cubin for ``arch`` from a container.

    If several cubins are for ``arch``, the one that contains ``kernel`` is returned.  Bytes that
    are not a container are returned unchanged.  Raises :class:`BadInput` if the choice leaves no
    image or several.
    """
    if not is_container(data):
        return data
    all_images = images(data)
    candidates = [i for i in all_images if arch is None or i.arch == arch]
    candidates = candidates or [
        i for i in all_images if arch is not None and i.arch.rstrip("af") == arch
    ]
    if len(candidates) > 1 and kernel is not None:
        candidates = [i for i in candidates if _has_kernel(i, kernel)] or candidates
    if len(candidates) == 1:
        return candidates[0].data
    available = ", ".join(i.arch for i in all_images)
    if not candidates:
        raise BadInput(f"the file has no image for {arch}; it has images for: {available}")
    if arch is None and len({i.arch for i in candidates}) > 1:
        raise BadInput(
            f"the file has {len(all_images)} images, for: {available}; choose one with --arch ARCH"
        )
    raise BadInput(
        f"the file has {len(candidates)} images for {candidates[0].arch}; choose one by its kernel "
        "if the command has --kernel, or unpack the file with `cuobjdump -xelf all`"
    )


def images(data: bytes) -> tuple[Image, ...]:
    """All cubins of a container, in the order of the file."""
    if len(data) > MAX_BYTES:
        raise BadBinary(f"the file has {len(data)} bytes; at most {MAX_BYTES} are allowed")
    with tempfile.TemporaryDirectory(prefix="nostall-") as name:
        folder = Path(name)
        (folder / "input").write_bytes(data)
        tool = str(toolchain.find("cuobjdump"))
        toolchain.run([tool, "-xelf", "all", "input"], "cuobjdump", cwd=folder)
        numbered: list[tuple[int, Image]] = []
        for path in folder.glob("*.cubin"):
            match = _IMAGE_NAME.search(path.name)
            if match is None:
                continue
            if path.stat().st_size > MAX_BYTES:
                raise BadBinary(
                    f"image {match[1]} unpacks to {path.stat().st_size} bytes; at most {MAX_BYTES} "
                    "are allowed"
                )
            numbered.append((int(match[1]), Image(match[2], path.read_bytes())))
    if not numbered:
        raise BadBinary(
            "the file has no machine code (only PTX, or nothing); compile for a real "
            "architecture, for example -gencode arch=compute_90,code=sm_90"
        )
    return tuple(image for _, image in sorted(numbered, key=lambda item: item[0]))


def ptx_images(data: bytes) -> tuple[PtxImage, ...]:
    """All PTX texts of a container, in the order of the file; none if it holds machine code only.

    Raises :class:`BadBinary` if the container is damaged or too large.
    """
    if len(data) > MAX_BYTES:
        raise BadBinary(f"the file has {len(data)} bytes; at most {MAX_BYTES} are allowed")
    found: list[PtxImage] = []
    with tempfile.TemporaryDirectory(prefix="nostall-") as name:
        folder = Path(name)
        (folder / "input").write_bytes(data)
        tool = str(toolchain.find("cuobjdump"))
        output = toolchain.run([tool, "-xptx", "all", "input"], "cuobjdump", cwd=folder)
        for file, arch, options in _PTX_LINE.findall(output):
            path = folder / file
            if not path.is_file() or path.stat().st_size > MAX_BYTES:
                continue
            text = path.read_text("utf-8", "replace")
            found.append(PtxImage(arch, text, tuple(options.split())))
    return tuple(found)


def _has_kernel(image: Image, kernel: str) -> bool:
    try:
        return any(t.is_kernel and t.name == kernel for t in Cubin.parse(image.data).texts)
    except BadBinary:
        return False
