"""Launches of compiled kernels: their arguments, constants, scratch buffers and variants."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from nostall.core import BadLaunch, Buffer, Constant, LaunchSpec, LaunchVariant, Scalar
from nostall.tuning.sources import kernel_file
from nostall.tuning.sources.source import Source
from nostall.tuning.sources.triton_source import compile_triton, load_launch

triton = pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[4]


def count_parameters(source: Source, tmp_path: Path) -> int:
    """Number of parameters of a kernel, from the records of its cubin (attribute 0x17)."""
    path = tmp_path / "counted.cubin"
    path.write_bytes(source.cubin)
    with path.open("rb") as file:
        info = ELFFile(file).get_section_by_name(f".nv.info.{source.kernel}").data()
    count = offset = 0
    while offset < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, offset)
        count += attribute == 0x17
        offset += 4 + (size if form == 4 else 0)
    return count


def passed_arguments(launch: LaunchSpec | None) -> list[Buffer | Scalar]:
    """The arguments that are not compiled in."""
    assert launch is not None
    return [arg for arg in launch.args if not isinstance(arg, Constant)]


def test_the_launch_has_the_parameters_of_the_machine_code(kernels: Path, tmp_path: Path) -> None:
    for name in ("scale", "scale@strided", "fixed", "tuned"):
        source = compile_triton(kernels, name, None, "sm_80")
        assert count_parameters(source, tmp_path) == len(passed_arguments(source.launch)), name


def test_a_scalar_of_one_is_folded_and_scratch_is_appended(kernels: Path) -> None:
    launch = compile_triton(kernels, "scale", None, "sm_80").launch
    assert launch is not None
    assert [arg.name for arg in launch.args] == [
        "y", "x", "n", "stride", "factor", "BLOCK", "global_scratch", "profile_scratch",
    ]  # fmt: skip
    assert launch.args[3] == Constant(name="stride", constant=1)
    assert launch.args[-1] == Scalar(name="profile_scratch", dtype="u64", value=0)
    assert launch.block == (64, 1, 1)


def test_descriptors_get_a_scratch_buffer() -> None:
    path = ROOT / "tests" / "corpus" / "kernels" / "memory.py"
    launch = compile_triton(path, "descriptor_copy", None, "sm_90").launch
    assert launch is not None
    scratch = launch.args[-2]
    assert isinstance(scratch, Buffer)
    assert scratch.role == "scratch"
    assert scratch.shape[0] % launch.blocks == 0


def test_do_not_specialize_is_respected(kernels: Path) -> None:
    launch = compile_triton(kernels, "fixed", None, "sm_80").launch
    assert launch is not None
    assert launch.args[2] == Scalar(name="n", dtype="i32", value=1)
    assert launch.args[3] == Constant(name="stride", constant=1)


def test_variants_and_dict_entries_of_launches(kernels: Path) -> None:
    for name, stride in (("scale@strided", 2), ("scale@dict", 3)):
        launch = compile_triton(kernels, name, None, "sm_80").launch
        assert launch is not None
        assert launch.args[3] == Scalar(name="stride", dtype="i32", value=stride)


def test_arguments_may_be_in_any_order(kernels: Path) -> None:
    source = compile_triton(kernels, "scale", None, "sm_80")
    with kernel_file.import_file(kernels) as loaded:
        launch = loaded.launch()
    reversed_args = launch.model_copy(update={"args": launch.args[::-1]})
    assert compile_triton(kernels, "scale", reversed_args, "sm_80").launch == source.launch


def test_variants_of_a_launch_must_fit_the_compiled_kernel(kernels: Path) -> None:
    """Values that are compiled in are omitted; properties that the compiler used must hold."""

    def compiled(**values: int) -> LaunchSpec:
        base = load_launch(kernels, "scale")
        shape = LaunchVariant(grid=(4, 1, 1), values=dict(values), buffers={"x": (512,)})
        launch = base.model_copy(update={"shapes": (shape,)})
        source = compile_triton(kernels, "scale", launch, "sm_80")
        assert source.launch is not None
        return source.launch

    launch = compiled(n=999, stride=1)
    assert LaunchSpec.model_validate(launch.model_dump()) == launch
    (shape,) = launch.shapes
    assert (shape.grid, shape.values) == ((4, 1, 1), {"n": 999})
    assert launch.with_variant(shape).args[2] == Scalar(name="n", dtype="i32", value=999)
    for values in ({"stride": 2}, {"n": 1}):
        with pytest.raises(BadLaunch, match="compiled for"):
            compiled(**values)
