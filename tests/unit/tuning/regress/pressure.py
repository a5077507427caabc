"""A kernel that holds many values at once, and two binaries of it: the newer one spills."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

from nostall.ptx.assemble.command import Command, plain_command
from nostall.ptx.assemble.ptxas import run_ptxas
from nostall.ptx.assemble.versions import Assembler
from nostall.tuning.regress.job import Case, newer_binary, older_by_cubin
from nostall.tuning.sources.source import Source
from tests.unit.tuning.assembler.kernel import LAUNCH

VALUES = 48
LIMITED = "--maxrregcount=32"
"""An option of the compiler that makes ptxas spill; the directive .maxnreg overrides it."""
_LOADS = "".join(f"\tld.global.f32 %f{n}, [%rd3+{4096 * n}];\n" for n in range(VALUES))
_SUMS = "".join(
    f"\tmul.rn.f32 %f{VALUES}, %f{n}, %f{(n + 1) % VALUES};\n"
    f"\tst.global.f32 [%rd5+{4096 * n}], %f{VALUES};\n"
    for n in range(VALUES)
)
PTX = f"""\
.version 8.0
.target sm_80
.address_size 64

.visible .entry pressure(
	.param .u64 pressure_param_0,
	.param .u64 pressure_param_1
)
{{
	.reg .b32 	%r<3>;
	.reg .f32 	%f<{VALUES + 1}>;
	.reg .b64 	%rd<6>;
	ld.param.u64 	%rd1, [pressure_param_0];
	mov.u32 	%r1, %tid.x;
	mul.wide.u32 	%rd2, %r1, 4;
	add.s64 	%rd3, %rd1, %rd2;
	ld.param.u64 	%rd4, [pressure_param_1];
	add.s64 	%rd5, %rd4, %rd2;
{_LOADS}{_SUMS}	ret;
}}
"""


def assemble(assembler: Assembler, *options: str, ptx: str = PTX) -> bytes:
    """The cubin of the kernel."""
    with TemporaryDirectory() as folder:
        run = run_ptxas(assembler, ptx, plain_command(ptx, options).arguments(), Path(folder))
    assert run.status == "assembled", run.detail
    return run.cubin


def make_source(assembler: Assembler, *options: str) -> Source:
    """The kernel as a compiler with these options makes it."""
    provenance = {"compiler": "test", "ptxas": assembler.version}
    provenance["ptxas_options"] = " ".join(options)
    cubin = assemble(assembler, *options)
    return Source(cubin, "pressure", LAUNCH, "k.ptx", MappingProxyType(provenance), PTX)


def make_case(assembler: Assembler) -> Case:
    """The compiler got an option that makes it spill."""
    source = make_source(assembler, LIMITED)
    command, newer = newer_binary(source, assembler)
    assert command == Command((LIMITED,), "sm_80")
    return Case(source, command, older_by_cubin(source, assemble(assembler), "old.cubin"), newer)


def without_ptx(case: Case) -> Case:
    """The same binaries, known as cubins only."""
    newer = replace(case.newer, assembler=None)
    return replace(case, source=replace(case.source, ptx=None), command=None, newer=newer)
