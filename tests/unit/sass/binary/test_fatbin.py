"""Fatbins and host objects: the chosen image is extracted, an ambiguous choice is an error."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.corpus import catalogue
from tests.unit.sass.binary.cubin_builder import PROGBITS, SectionSpec, elf, text

from nostall.core.errors import BadBinary, BadInput, MissingPart
from nostall.sass.binary import fatbin
from nostall.sass.binary.fatbin import extract, images, is_container
from nostall.tuning.sources.source import load_cubin

NVCC = catalogue.NVCC
SM_80_CUBIN = (NVCC / "atomics.sm_80.cubin").read_bytes()
SM_90_CUBIN = (NVCC / "atomics.sm_90.cubin").read_bytes()
PATHS = [NVCC / "atomics.fatbin", NVCC / "atomics.plain.fatbin"]


def host_object(content: bytes) -> bytes:
    """An x86 ELF file with device code inside."""
    return elf(SectionSpec(".nv_fatbin", PROGBITS, content), machine=62, abi=(0, 0), flags=0)


@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)
def test_images_equal_the_cubins_of_the_compiler(path: Path) -> None:
    data = path.read_bytes()
    assert [(i.arch, i.data) for i in images(data)] == [
        ("sm_80", SM_80_CUBIN),
        ("sm_90", SM_90_CUBIN),
    ]
    assert extract(data, "sm_80") == SM_80_CUBIN
    assert extract(data, "sm_90") == SM_90_CUBIN


def test_several_images_require_an_architecture() -> None:
    data = PATHS[0].read_bytes()
    with pytest.raises(BadInput, match="has 2 images, for: sm_80, sm_90; choose one with --arch"):
        extract(data)
    with pytest.raises(BadInput, match=r"no image for sm_75; .*: sm_80, sm_90"):
        extract(data, "sm_75")


def test_an_image_of_a_host_object_is_extracted() -> None:
    data = host_object(PATHS[0].read_bytes())
    assert is_container(data)
    assert extract(data, "sm_90") == SM_90_CUBIN


def test_bytes_that_are_no_container_are_returned_unchanged() -> None:
    plain = host_object(b"").replace(b".nv_fatbin", b".xx_fatbin")
    for data in (b"", b"text", SM_80_CUBIN, plain, elf(text(name="x.nv_fatbin"))):
        assert not is_container(data)
        assert extract(data, "sm_75") is data


def fake_fatbin(monkeypatch: pytest.MonkeyPatch, *contents: tuple[str, bytes]) -> bytes:
    """A container for which ``images`` returns these (architecture, cubin)."""
    fakes = tuple(fatbin.Image(arch, data) for arch, data in contents)
    monkeypatch.setattr(fatbin, "images", lambda data: fakes)
    return b"\x50\xed\x55\xba"


def test_a_single_image_needs_no_choice_but_must_match(monkeypatch: pytest.MonkeyPatch) -> None:
    data = fake_fatbin(monkeypatch, ("sm_90a", SM_90_CUBIN))
    assert extract(data) == SM_90_CUBIN
    assert extract(data, "sm_90a") == SM_90_CUBIN
    assert extract(data, "sm_90") == SM_90_CUBIN
    with pytest.raises(BadInput, match="no image for sm_80"):
        extract(data, "sm_80")


def test_the_exact_architecture_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    data = fake_fatbin(monkeypatch, ("sm_90a", b"special"), ("sm_90", SM_90_CUBIN))
    assert extract(data, "sm_90") == SM_90_CUBIN
    assert extract(data, "sm_90a") == b"special"


def test_the_kernel_chooses_among_images_of_one_architecture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = (NVCC / "calls.sm_90.cubin").read_bytes()
    data = fake_fatbin(monkeypatch, ("sm_90", SM_90_CUBIN), ("sm_90", other), ("sm_90", b"damaged"))
    assert extract(data, "sm_90", "recursion") == other
    assert extract(data, None, "spin_lock") == SM_90_CUBIN
    for kernel in (None, "nothing"):
        with pytest.raises(BadInput, match="3 images for sm_90; choose one by its kernel"):
            extract(data, "sm_90", kernel)


@pytest.mark.parametrize("keep", [4, 16, 64, 3000])
def test_a_damaged_fatbin_is_rejected(keep: int) -> None:
    with pytest.raises(BadBinary):
        extract(PATHS[0].read_bytes()[:keep], "sm_90")


def test_a_fatbin_without_machine_code_is_rejected() -> None:
    """A header without an image."""
    with pytest.raises(BadBinary):
        extract(bytes.fromhex("50ed55ba 0100 1000") + b"\0" * 8)


def test_a_missing_cuobjdump_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOSTALL_CUOBJDUMP", "/nonexistent")
    with pytest.raises(MissingPart, match="NOSTALL_CUOBJDUMP"):
        extract(PATHS[0].read_bytes(), "sm_90")


def test_load_cubin_reads_fatbins() -> None:
    source = load_cubin(PATHS[0], "spin_lock", arch="sm_90")
    assert source.cubin == SM_90_CUBIN
    assert dict(source.provenance) == {"compiler": "fatbin file", "arch": "sm_90"}
    with pytest.raises(BadInput, match=r"atomics\.fatbin: the file has 2 images"):
        load_cubin(PATHS[0], "spin_lock")
    with pytest.raises(BadInput, match="holds 7 kernels"):
        load_cubin(PATHS[0], arch="sm_80")


def test_ptx_of_a_container_comes_with_the_options_of_ptxas() -> None:
    """``nvcc -Xptxas -O1,--fmad=false -gencode arch=compute_90,code=[sm_90,compute_90]``."""
    data = (Path(__file__).parent / "ptx.fatbin").read_bytes()
    (image,) = fatbin.ptx_images(data)
    assert image.arch == "sm_90" and ".entry _Z3addPf" in image.text
    assert image.options == ("-arch=sm_90", "-O1", "--fmad=false")
    assert fatbin.ptx_images(PATHS[0].read_bytes()) == ()
