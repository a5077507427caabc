"""Fatbins and host objects: the right image comes out, or a choice is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.corpus import catalogue
from tests.unit.sass.binary.cubin_builder import PROGBITS, Part, elf, text

from nostall.core.errors import BadBinary, BadInput, MissingPart
from nostall.sass.binary import fatbin
from nostall.sass.binary.fatbin import extract, images, is_container
from nostall.tuning.source import load_cubin

NVCC = catalogue.NVCC
ONE = (NVCC / "atomics.sm_80.cubin").read_bytes()
TWO = (NVCC / "atomics.sm_90.cubin").read_bytes()
PATHS = [NVCC / "atomics.fatbin", NVCC / "atomics.plain.fatbin"]


def host_object(content: bytes) -> bytes:
    """An x86 ELF file with device code inside."""
    return elf(Part(".nv_fatbin", PROGBITS, content), machine=62, abi=(0, 0), flags=0)


@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)
def test_each_image_is_the_compilers_cubin(path: Path) -> None:
    data = path.read_bytes()
    assert [(i.arch, i.data) for i in images(data)] == [("sm_80", ONE), ("sm_90", TWO)]
    assert extract(data, "sm_80") == ONE
    assert extract(data, "sm_90") == TWO


def test_several_images_need_a_choice() -> None:
    data = PATHS[0].read_bytes()
    with pytest.raises(BadInput, match="holds 2 images, for: sm_80, sm_90; choose one with --arch"):
        extract(data)
    with pytest.raises(BadInput, match=r"no image for sm_75 in the file; .*: sm_80, sm_90"):
        extract(data, "sm_75")


def test_host_objects() -> None:
    data = host_object(PATHS[0].read_bytes())
    assert is_container(data)
    assert extract(data, "sm_90") == TWO


def test_what_is_no_container_is_left_alone() -> None:
    plain = host_object(b"").replace(b".nv_fatbin", b".xx_fatbin")
    for data in (b"", b"text", ONE, plain, elf(text(name="x.nv_fatbin"))):
        assert not is_container(data)
        assert extract(data, "sm_75") is data


def fake(monkeypatch: pytest.MonkeyPatch, *found: tuple[str, bytes]) -> bytes:
    """A container that holds these images."""
    made = tuple(fatbin.Image(arch, data) for arch, data in found)
    monkeypatch.setattr(fatbin, "images", lambda data: made)
    return b"\x50\xed\x55\xba"


def test_one_image_needs_no_choice_but_must_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    data = fake(monkeypatch, ("sm_90a", TWO))
    assert extract(data) == TWO
    assert extract(data, "sm_90a") == TWO
    assert extract(data, "sm_90") == TWO
    with pytest.raises(BadInput, match="no image for sm_80"):
        extract(data, "sm_80")


def test_the_exact_architecture_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    data = fake(monkeypatch, ("sm_90a", b"special"), ("sm_90", TWO))
    assert extract(data, "sm_90") == TWO
    assert extract(data, "sm_90a") == b"special"


def test_images_of_one_architecture_are_told_apart_by_their_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = (NVCC / "calls.sm_90.cubin").read_bytes()
    data = fake(monkeypatch, ("sm_90", TWO), ("sm_90", other), ("sm_90", b"damaged"))
    assert extract(data, "sm_90", "recursion") == other
    assert extract(data, None, "spin_lock") == TWO
    for kernel in (None, "nothing"):
        with pytest.raises(BadInput, match="3 images for sm_90; choose one by its kernel"):
            extract(data, "sm_90", kernel)


@pytest.mark.parametrize("keep", [4, 16, 64, 3000])
def test_a_damaged_fatbin(keep: int) -> None:
    with pytest.raises(BadBinary):
        extract(PATHS[0].read_bytes()[:keep], "sm_90")


def test_a_fatbin_without_machine_code() -> None:
    """A header with no image behind it."""
    with pytest.raises(BadBinary):
        extract(bytes.fromhex("50ed55ba 0100 1000") + b"\0" * 8)


def test_without_the_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOSTALL_CUOBJDUMP", "/nonexistent")
    with pytest.raises(MissingPart, match="NOSTALL_CUOBJDUMP"):
        extract(PATHS[0].read_bytes(), "sm_90")


def test_a_fatbin_is_a_source() -> None:
    source = load_cubin(PATHS[0], "spin_lock", arch="sm_90")
    assert source.cubin == TWO
    assert dict(source.provenance) == {"compiler": "fatbin file", "arch": "sm_90"}
    with pytest.raises(BadInput, match=r"atomics\.fatbin: the file holds 2 images"):
        load_cubin(PATHS[0], "spin_lock")
    with pytest.raises(BadInput, match="holds 7 kernels"):
        load_cubin(PATHS[0], arch="sm_80")
