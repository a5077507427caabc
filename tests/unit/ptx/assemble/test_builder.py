"""Builds of candidates with an installed ptxas: outcomes, options, messages and the pool."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic, sleep

import pytest
from tests.unit.ptx.assemble.toy_space import PTX, ToyCheck, ToyState, make_space

from nostall.core.errors import BadInput, MissingPart
from nostall.ptx.assemble.builder import Builder, BuildSpec, new_codes
from nostall.ptx.assemble.command import Command, plain_command, triton_commands
from nostall.ptx.assemble.pool import BuildPool
from nostall.ptx.assemble.ptxas import Resources, read_messages, read_resources, run_ptxas
from nostall.ptx.assemble.versions import Assembler, find_assembler, find_assemblers

WGMMA_LOSS = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
    "serialized due to insufficient register resources for the wgmma pipeline in the function 'f'"
)


@pytest.fixture(scope="module")
def spec() -> BuildSpec:
    assemblers = tuple(find_assemblers())
    return BuildSpec(PTX, "scale", plain_command(PTX), assemblers, make_space, ToyCheck)


@pytest.fixture
def builder(spec: BuildSpec) -> Iterator[Builder]:
    built = Builder(spec)
    yield built
    built.close()


def test_another_order_is_built_with_its_resources(builder: Builder) -> None:
    build = builder.build(ToyState(exchanged=True))
    assert build.status == "built" and build.cubin[:4] == b"\x7fELF"
    assert build.resources is not None and 4 <= build.resources.registers <= 255
    assert build.resources.spill_bytes == 0 and build.codes == {}
    assert set(build.phase_seconds) == {"render", "prove", "assemble"}


def test_equal_states_give_equal_builds(builder: Builder) -> None:
    first, second = (builder.build(ToyState(exchanged=True)) for _ in range(2))
    assert replace(first, phase_seconds={}) == replace(second, phase_seconds={})


def test_options_follow_those_of_the_compiler(spec: BuildSpec) -> None:
    spec = replace(spec, command=Command(("-lineinfo", "--fmad=false"), "sm_80"))
    arguments = spec.arguments(ToyState(options=("-O1",)))
    assert arguments == ("-lineinfo", "--fmad=false", "-v", "--gpu-name=sm_80", "-O1")


def test_each_installed_assembler_builds(spec: BuildSpec, builder: Builder) -> None:
    builds = [builder.build(ToyState(assembler=a.version)) for a in spec.assemblers]
    assert [b.status for b in builds] == ["built"] * len(spec.assemblers)
    assert builder.build(ToyState()).cubin == builds[0].cubin


def test_a_candidate_that_is_not_proved_is_not_assembled(builder: Builder) -> None:
    build = builder.build(ToyState(extra="	mov.u32 	%r2, %r1;\n"))
    assert (build.status, build.cubin, build.detail) == ("unproved", b"", "other lines")
    assert "assemble" not in build.phase_seconds


def test_an_unknown_option_is_an_error_with_the_message(builder: Builder) -> None:
    build = builder.build(ToyState(options=("--no-such-option",)))
    assert build.status == "error" and "no-such-option" in build.detail


def test_a_run_that_takes_too_long_is_a_timeout(tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    run = run_ptxas(Assembler(slow, "0"), PTX, (), tmp_path, timeout=0.2)
    assert run.status == "timeout" and run.seconds < 10 and "0.2 s" in run.detail


def test_a_missing_assembler_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingPart, match="cannot be started"):
        run_ptxas(Assembler(tmp_path / "none", "0"), PTX, (), tmp_path)
    with pytest.raises(MissingPart, match=r"ptxas 1\.2\.3 is not installed"):
        find_assembler("1.2.3")


def test_a_state_with_an_unknown_assembler_is_refused(builder: Builder) -> None:
    with pytest.raises(BadInput, match=r"'1\.2\.3'"):
        builder.build(ToyState(assembler="1.2.3"))


def fake_ptxas(path: Path, message: str) -> Assembler:
    """An assembler that prints ``message`` for PTX whose order is not the original's."""
    path.write_text(
        "#!/bin/sh\nfor last; do true; done\necho cubin > $last\n"
        "grep -n mul.f32 kernel.ptx | head -1 | grep -q 40A && "
        f'echo "{message}" >&2\nexit 0\n'
    )
    path.chmod(0o755)
    return Assembler(path, "0")


def test_a_loss_of_asynchronous_execution_drops_the_candidate(
    spec: BuildSpec, tmp_path: Path
) -> None:
    assembler = fake_ptxas(tmp_path / "ptxas", WGMMA_LOSS)
    builder = Builder(replace(spec, assemblers=(assembler,)))
    assert builder.build(ToyState()).status == "built"
    build = builder.build(ToyState(exchanged=True))
    assert (build.status, build.cubin, build.codes) == ("serialized", b"", {"C7510": 1})
    assert "1 x C7510" in build.detail
    builder.close()


def test_codes_that_the_original_has_do_not_count() -> None:
    assert new_codes([WGMMA_LOSS], [WGMMA_LOSS]) == {}
    assert new_codes([WGMMA_LOSS, WGMMA_LOSS], [WGMMA_LOSS]) == {"C7510": 1}


def test_the_verbose_output_is_read() -> None:
    output = (
        "ptxas info    : 0 bytes gmem\nptxas info    : Compiling entry function 'f' for 'sm_90a'\n"
        "    192 bytes stack frame, 324 bytes spill stores, 252 bytes spill loads\n"
        "ptxas info    : Used 96 registers, used 1 barriers, 192 bytes cumulative stack size, "
        f"1024 bytes smem\n{WGMMA_LOSS}\n"
    )
    resources = read_resources(output)["f"]
    assert (resources.registers, resources.spill_bytes) == (96, 576)
    assert (resources.stack_bytes, resources.shared_bytes) == (192, 1024)
    assert read_messages(output) == (WGMMA_LOSS,)


def test_a_kernel_has_its_own_resources_not_those_of_others_in_its_file() -> None:
    output = "\n".join(
        (
            "ptxas info    : Compiling entry function 'small' for 'sm_90'",
            "ptxas info    : Function properties for small",
            "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads",
            "ptxas info    : Used 14 registers, used 0 barriers",
            "ptxas info    : Compiling entry function 'large' for 'sm_90'",
            "ptxas info    : Function properties for large",
            "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads",
            "ptxas info    : Used 96 registers, used 0 barriers, 64 bytes smem",
            "ptxas info    : Function properties for called",
            "    24 bytes stack frame, 20 bytes spill stores, 20 bytes spill loads",
        )
    )
    found = read_resources(output)
    assert found == {"small": Resources(14, 0, 0, 0), "large": Resources(96, 40, 24, 64)}
    assert read_resources("ptxas info    : 0 bytes gmem") == {}


def test_tritons_own_options_are_kept() -> None:
    commands = triton_commands(PTX, {"enable_fp_fusion": "False", "ptx_options": "-O2"})
    assert all("--fmad=false" in c.options and c.options[-1] == "-O2" for c in commands)
    assert len({c.options for c in commands}) == len(commands) == 2
    assert all("--fmad=false" not in c.options for c in triton_commands(PTX, {}))


def build_hash(builder: Builder, state: ToyState) -> str:
    return builder.build(state).ptx_sha256


def test_all_workers_of_a_pool_start_before_the_first_task(spec: BuildSpec, tmp_path: Path) -> None:
    make = partial(started_builder, spec, tmp_path)
    with BuildPool(make, build_hash, workers=2):
        end = monotonic() + 60
        while len(list(tmp_path.iterdir())) < 2 and monotonic() < end:
            sleep(0.05)
        assert len(list(tmp_path.iterdir())) == 2


def started_builder(spec: BuildSpec, folder: Path) -> Builder:
    """The builder of a worker, which leaves a file when it starts."""
    (folder / str(os.getpid())).touch()
    return Builder(spec)


def test_the_pool_gives_results_in_the_order_of_its_tasks(spec: BuildSpec) -> None:
    states = [ToyState(exchanged=n % 2 == 0, options=("-O1",) * (n % 3)) for n in range(6)]
    with BuildPool(partial(Builder, spec), build_hash, workers=2) as pool:
        hashes = pool.map(states)
    builder = Builder(spec)
    assert hashes == [builder.build(state).ptx_sha256 for state in states]
    builder.close()
