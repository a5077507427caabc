"""Sources with PTX: files, containers and entries of Triton's cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nostall.core import BadInput, LaunchSpec
from nostall.ptx.assemble.versions import Assembler, find_assemblers
from nostall.sass.binary import fatbin
from nostall.sass.binary.code_hash import code_sha256
from nostall.tuning.assembler.commands import find_command
from nostall.tuning.sources import ptx_source
from nostall.tuning.sources.ptx_source import load_binary, load_ptx, parse_options
from tests.unit.tuning.assembler.kernel import LAUNCH, PTX, make_source


@pytest.fixture(scope="module")
def installed() -> list[Assembler]:
    return find_assemblers()[:1]


def test_a_ptx_file_is_assembled_with_the_options_of_its_build(
    tmp_path: Path, installed: list[Assembler]
) -> None:
    path = tmp_path / "k.ptx"
    path.write_text(PTX)
    source = load_ptx(path, None, LAUNCH, None, "--fmad=false -O1", installed)
    assert (source.kernel, source.ptx, source.launch) == ("scale", PTX, LAUNCH)
    assert source.provenance["arch"] == "sm_80"
    found = find_command(source, installed)
    assert found.reproduces and found.command.options == ("--fmad=false", "-O1")
    plain = load_ptx(path, None, LAUNCH, None, "", installed)
    assert code_sha256(plain.cubin) != code_sha256(source.cubin)
    other = load_ptx(path, "scale", LAUNCH, "sm_90", "", installed)
    assert other.provenance["arch"] == "sm_90" and find_command(other, installed).reproduces


@pytest.mark.parametrize(
    ("text", "kernel", "message"),
    [
        (PTX, "other", "name one of: scale"),
        ("nothing", None, "k.ptx"),
        (PTX.replace("sqrt.approx.f32", "sqrt.wrong.f32"), None, "no installed ptxas assembles"),
    ],
)
def test_a_file_that_cannot_be_assembled_is_an_error_that_names_it(
    text: str, kernel: str | None, message: str, tmp_path: Path, installed: list[Assembler]
) -> None:
    path = tmp_path / "k.ptx"
    path.write_text(text)
    with pytest.raises(BadInput, match=message) as caught:
        load_ptx(path, kernel, LAUNCH, None, "", installed)
    assert "k.ptx" in str(caught.value)


@pytest.mark.parametrize(
    "text", ["-o /tmp/x", "--gpu-name=sm_80", "@file", "fmad", "'open", "-optf x"]
)
def test_options_that_name_files_or_the_architecture_are_refused(text: str) -> None:
    with pytest.raises(BadInput, match="ptxas option"):
        parse_options(text)


def test_the_ptx_of_a_container_is_that_of_the_kernel_and_the_architecture(
    tmp_path: Path, installed: list[Assembler], monkeypatch: pytest.MonkeyPatch
) -> None:
    cubin = make_source(installed[0]).cubin
    path = tmp_path / "k.fatbin"
    path.write_bytes(cubin)
    images = [
        fatbin.PtxImage("sm_75", PTX, ()),
        fatbin.PtxImage("sm_80", PTX.replace("scale", "other"), ()),
        fatbin.PtxImage("sm_80", PTX, ("-arch=sm_80", "--fmad=false")),
    ]
    monkeypatch.setattr(ptx_source.fatbin, "is_container", lambda data: True)
    monkeypatch.setattr(ptx_source.fatbin, "extract", lambda data, arch, kernel: data)
    monkeypatch.setattr(ptx_source.fatbin, "ptx_images", lambda data: tuple(images))
    source = load_binary(path)
    assert source.ptx == PTX and source.provenance["ptxas_options"] == "--fmad=false"
    assert load_binary(path, options="-O2").provenance["ptxas_options"] == "-O2"
    del images[2]
    assert load_binary(path).ptx is None


def write_entry(folder: Path, installed: list[Assembler]) -> Path:
    """An entry of Triton's cache."""
    folder.mkdir()
    (folder / "scale.cubin").write_bytes(make_source(installed[0]).cubin)
    (folder / "scale.ptx").write_text(PTX)
    metadata = {"name": "scale", "num_warps": 8, "shared": 64, "num_ctas": 1}
    metadata |= {"enable_fp_fusion": True, "triton_version": "3.9.0", "ptx_options": None}
    (folder / "scale.json").write_text(json.dumps(metadata))
    return folder


def test_an_entry_of_the_triton_cache_has_its_ptx_and_the_compiled_launch(
    tmp_path: Path, installed: list[Assembler]
) -> None:
    folder = write_entry(tmp_path / "entry", installed)
    for path in (folder, folder / "scale.cubin"):
        source = load_binary(path, launch=LaunchSpec(grid=(4, 1, 1), args=LAUNCH.args))
        assert source.ptx == PTX and source.provenance["compiler"] == "triton 3.9.0"
        assert source.launch is not None
        assert (source.launch.block, source.launch.shared) == ((256, 1, 1), 64)
        assert [arg.name for arg in source.launch.args] == [
            "x",
            "global_scratch",
            "profile_scratch",
        ]
    again = load_binary(folder, launch=source.launch)
    assert again.launch == source.launch
    (folder / "scale.json").unlink()
    assert load_binary(folder).ptx is None
    (folder / "more.cubin").write_bytes(b"")
    with pytest.raises(BadInput, match="holds 2 cubins"):
        load_binary(folder)
