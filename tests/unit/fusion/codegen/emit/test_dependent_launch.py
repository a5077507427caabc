"""Tests of programmatic dependent launch: kernels wait before their first access to memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nostall.fusion.codegen.emit.emit import emit
from nostall.fusion.codegen.emit.program import Program
from nostall.fusion.codegen.generate import generate, schedule_operators
from nostall.fusion.codegen.runtime.kernel import launch_options
from nostall.fusion.codegen.runtime.launch_specs import launch_specs
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.planned_kernel import plan_kernel
from nostall.fusion.graph.graph import Graph
from nostall.tuning.sources.triton_source import compile_triton, pretend_target
from tests.unit.fusion.codegen import oldest_triton
from tests.unit.fusion.codegen.sm90_code import cubin_opcodes
from tests.unit.fusion.pattern_tables import PACKED
from tests.unit.fusion.patterns import (
    attention_backward,
    bias_gelu,
    layer_norm,
    masked_softmax,
    norm_backward,
    pooling,
)

triton = pytest.importorskip("triton")
pytest.importorskip("torch")

pytestmark = pytest.mark.slow

WAIT, TRIGGER = "ACQBULK", "PREEXIT"
MEMORY = ("LD", "ST", "ATOM", "RED", "UTMA", "UBLK", "CCTL")
CONSTANTS = ("LDC",)
"""Loads of kernel arguments, which are allowed before the wait."""

PLANS: dict[str, tuple[Graph, KernelPlan]] = {
    "thread": (bias_gelu((64, 3000), "bfloat16"), KernelPlan("thread", 1, (1024,), 4)),
    "early thread": (
        bias_gelu((64, 3000), "bfloat16"),
        KernelPlan("thread", 1, (1024,), 4, eager_loads=True),
    ),
    "early block": (
        masked_softmax((8, 1, 8, 3000), "float16"),
        KernelPlan("block", 1, (1024,) * 3, 4, eager_loads=True),
    ),
    "block": (layer_norm((64, 5000), "float16"), KernelPlan("block", 1, (1024,) * 5, 8)),
    "warp": (layer_norm((64, 768), "float16"), KernelPlan("warp", 1, (256,) * 3, 1)),
    "split": (layer_norm((8, 65536), "float16"), KernelPlan("split", 1, (1024,), 4, 16)),
    "looped": (layer_norm((64, 5000), "float16"), KernelPlan("looped", 1, (2048,), 8)),
    "copied ahead": (
        layer_norm((64, 12288), "float16"),
        KernelPlan("shared", 1, (4096,), 16, async_copies=True),
    ),
    "two stages": (
        norm_backward((64, 768), "bfloat16"),
        KernelPlan("column", 1, (512, 256), 8, 16),
    ),
    "dots": (attention_backward((8, 4, 24, 32), "bfloat16"), KernelPlan("matrix", 1, (1024,), 4)),
    "sequence": (pooling((64, 100, 64), "float16"), KernelPlan("turned", 1, (512,), 1)),
}


def emit_program(name: str) -> Program:
    if name == "packed":
        graph = PACKED["three"]()
        return generate(graph, graph.operators)
    graph, plan = PLANS[name]
    return emit(plan_kernel(schedule_operators(graph, graph.operators), plan))


def cubins(program: Program, folder: Path, arch: str) -> Iterator[bytes]:
    path = folder / "kernels.py"
    path.write_text(program.source)
    for name, launch in launch_specs(program).items():
        yield compile_triton(path, name, launch, arch).cubin


def early_accesses(codes: list[str]) -> list[str]:
    """Opcodes that access memory before the wait; all such opcodes if there is no wait."""
    before = codes[: codes.index(WAIT)] if WAIT in codes else codes
    return [code for code in before if code.startswith(MEMORY) and not code.startswith(CONSTANTS)]


@pytest.mark.parametrize("name", [*PLANS, "packed"])
def test_kernels_access_no_memory_before_the_previous_kernel_has_ended(
    name: str, tmp_path: Path
) -> None:
    program = emit_program(name)
    assert all(launch.follows for launch in program.launches)
    found = [cubin_opcodes(cubin) for cubin in cubins(program, tmp_path, "sm_90")]
    if oldest_triton.INSTALLATION.is_dir():
        found += [
            cubin_opcodes(cubin) for cubin, _ in oldest_triton.compile_program(program, tmp_path)
        ]
    for codes in found:
        assert early_accesses(codes) == []
        # A kernel that starts early relies on the end of all kernels before its predecessor.
        assert codes.index(TRIGGER) > codes.index(WAIT)


@pytest.mark.parametrize("name", ["early thread", "early block"])
def test_eager_loads_precede_the_start_of_the_next_kernel(name: str, tmp_path: Path) -> None:
    program = emit_program(name)
    found = [cubin_opcodes(cubin) for cubin in cubins(program, tmp_path, "sm_90")]
    if oldest_triton.INSTALLATION.is_dir():
        found += [
            cubin_opcodes(cubin) for cubin, _ in oldest_triton.compile_program(program, tmp_path)
        ]
    for codes in found:
        reads = [at for at, code in enumerate(codes) if code.startswith("LDG")]
        assert len(reads) >= 2 and reads[-1] < codes.index(TRIGGER)


def test_a_late_or_missing_wait_is_detected(tmp_path: Path) -> None:
    program = emit_program("thread")
    call, end = "    _follow()\n", "    tl.store("
    assert program.source.count(call) == 1
    without = program.source.replace(call, "")
    for source in (without, without.replace(end, call + end)):
        (cubin,) = cubins(replace(program, source=source), tmp_path, "sm_90")
        assert early_accesses(cubin_opcodes(cubin))


def test_older_gpus_get_no_dependent_launch_instructions(tmp_path: Path) -> None:
    (cubin,) = cubins(emit_program("thread"), tmp_path, "sm_80")
    assert not {WAIT, TRIGGER} & set(cubin_opcodes(cubin))


class Driver:
    """A Triton driver that reports a fixed target."""

    def __init__(self, backend: str, arch: int | str) -> None:
        self.target = triton.backends.compiler.GPUTarget(backend, arch, 32)

    def get_current_target(self) -> Any:
        return self.target


@pytest.mark.parametrize(
    ("backend", "arch", "early"),
    [("cuda", 80, False), ("cuda", 90, True), ("cuda", 100, True), ("hip", "gfx942", False)],
)
def test_only_kernels_that_wait_are_launched_early(
    backend: str, arch: int | str, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver(backend, arch))
    (launch,) = emit_program("thread").launches
    assert launch_options(launch).get("launch_pdl", False) is early
    assert "launch_pdl" not in launch_options(replace(launch, follows=False))
    assert launch_options(launch)["num_warps"] == launch.num_warps


def test_compiling_for_another_gpu_keeps_the_active_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver("cuda", 80)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    (cubin,) = cubins(emit_program("thread"), tmp_path, "sm_90")
    assert WAIT in cubin_opcodes(cubin)
    assert triton.runtime.driver.active is driver


def test_concurrent_targets_are_serialized_and_keep_driver_utilities() -> None:
    class Config:
        """``triton.runtime.driver`` on a machine with a GPU."""

        def __init__(self) -> None:
            self._active: Any = Driver("cuda", 80)
            self._active.utils = "the GPU's"

        @property
        def active(self) -> Any:
            return self._active

        def set_active(self, driver: Any) -> None:
            self._active = driver

    config, targets = Config(), []
    driver = config.active
    inside, leave = threading.Event(), threading.Event()

    def compile_for(arch: int, *, first: bool) -> None:
        with pretend_target(config, triton.backends.compiler.GPUTarget("cuda", arch, 32)):
            inside.set()
            if first:
                leave.wait(10)
            targets.append((config.active.get_current_target().arch, config.active.utils))

    one = threading.Thread(target=compile_for, args=(90,), kwargs={"first": True})
    one.start()
    assert inside.wait(10)
    other = threading.Thread(target=compile_for, args=(100,), kwargs={"first": False})
    other.start()
    other.join(0.2)  # does not end, because it waits for the first thread
    leave.set()
    one.join(10)
    other.join(10)
    assert targets == [(90, "the GPU's"), (100, "the GPU's")]
    assert config.active is driver
