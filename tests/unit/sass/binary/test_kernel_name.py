"""Names of kernels in cubins, and the hash of what a GPU runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.kernels.examples import EXAMPLES
from tests.unit.tuning.assembler.kernel import PTX

from nostall.core.errors import BadBinary
from nostall.ptx.assemble.command import plain_command
from nostall.ptx.assemble.ptxas import run_ptxas
from nostall.ptx.assemble.versions import Assembler, find_assemblers
from nostall.sass import Program, validate
from nostall.sass.binary.code_hash import code_sha256, rename_kernel
from nostall.sass.binary.cubin import Cubin

EACH = pytest.mark.parametrize("assembler", find_assemblers(), ids=lambda a: a.version)


def assemble(assembler: Assembler, folder: Path, ptx: str, *options: str) -> bytes:
    run = run_ptxas(assembler, ptx, (*plain_command(ptx).arguments(), *options), folder)
    assert run.status == "assembled", run.detail
    return run.cubin


@EACH
def test_a_renamed_kernel_gets_its_name_back(assembler: Assembler, tmp_path: Path) -> None:
    original = assemble(assembler, tmp_path, PTX)
    renamed = assemble(assembler, tmp_path, PTX.replace("entry scale(", "entry cutlass_scale("))
    assert code_sha256(renamed) != code_sha256(original)
    restored = rename_kernel(renamed, "cutlass_scale", "scale")
    assert code_sha256(restored) == code_sha256(original)
    assert len(restored) == len(renamed)
    (text,) = Cubin.parse(restored).texts
    assert (text.name, text.is_kernel) == ("scale", True)
    assert validate(restored).safe
    assert Program.from_cubin(restored).kernel("scale").instructions


@EACH
def test_the_hash_ignores_debugging_information_only(assembler: Assembler, tmp_path: Path) -> None:
    plain = assemble(assembler, tmp_path, PTX)
    assert code_sha256(assemble(assembler, tmp_path, PTX, "-lineinfo")) == code_sha256(plain)
    other = PTX.replace("0f41400000", "0f41400001")
    assert code_sha256(assemble(assembler, tmp_path, other)) != code_sha256(plain)
    limit = PTX.replace(".reqntid 128", ".reqntid 64")
    assert code_sha256(assemble(assembler, tmp_path, limit)) != code_sha256(plain)


def test_names_that_do_not_fit_are_refused() -> None:
    data = (EXAMPLES / "nvcc" / "dot_product.sm_90.cubin").read_bytes()
    (text,) = [text for text in Cubin.parse(data).texts if text.is_kernel]
    assert rename_kernel(data, text.name, text.name) == data
    with pytest.raises(BadBinary, match="longer name"):
        rename_kernel(data, text.name, f"{text.name}_longer")
    with pytest.raises(BadBinary, match="no kernel 'another_kernel'"):
        rename_kernel(data, "another_kernel", "k")
