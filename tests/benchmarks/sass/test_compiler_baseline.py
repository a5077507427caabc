"""The compiler baseline: which builds are timed, how, and how failed builds are recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.harness.schema import Configuration, Options
from benchmarks.kernels.suite import Entry, build, entries
from benchmarks.sass.build_comparison import FEW_ROUNDS, FINALISTS, MANY_ROUNDS, time_builds
from benchmarks.sass.compiler_baseline import fastest, time_configurations, try_build

from benchmarks.sass import build_comparison
from nostall.core.launch import Buffer, LaunchSpec
from nostall.gpu.driver import DriverError, LoadedKernel
from nostall.tuning.sources.source import Source


def source(cubin: bytes, **launch: Any) -> Source:
    return Source(cubin, "k", LaunchSpec(**launch), "o", {})


class FakeTimer:
    """A timer that returns the first byte of each build and records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def __call__(self, sources: Sequence[Source], rounds: int) -> list[float | str]:
        self.calls.append((len(sources), rounds))
        return [float(s.cubin[0]) if s.cubin[0] < 99 else "it faults" for s in sources]


def test_equal_builds_are_timed_once_and_failures_are_kept() -> None:
    tried = [Options(num_warps=w, num_stages=s) for w in (1, 2, 4, 8) for s in range(1, 7)]
    built = [
        "too much shared memory" if o.num_stages == 6 else source(bytes([99 - o.num_warps]))
        for o in tried
    ]
    times = FakeTimer()
    found = time_configurations(tried, built, times)
    assert [c.options for c in found] == tried
    assert times.calls == [(1, FEW_ROUNDS)] * 4 + [(4, MANY_ROUNDS)]
    assert {c.failure for c in found if c.us is None} == {"too much shared memory"}
    best = fastest(found)
    assert best is not None and (best.num_warps, best.num_stages, best.us) == (8, 1, 91.0)
    assert fastest([c for c in found if c.us is None]) is None


def test_one_binary_with_two_launches_is_two_builds() -> None:
    tried = [Options(num_warps=4, num_stages=1), Options(num_warps=4, num_stages=2)]
    times = FakeTimer()
    time_configurations(tried, [source(b"a"), source(b"a", grid=(2, 1, 1))], times)
    assert times.calls == [(1, FEW_ROUNDS)] * 2 + [(2, MANY_ROUNDS)]


def test_only_the_fastest_run_long_and_a_fault_is_no_finalist() -> None:
    times = FakeTimer()
    found = time_builds([source(bytes([n])) for n in (9, 200, 7, 6, 5, 4)], times)
    assert found == [9.0, "it faults", 7.0, 6.0, 5.0, 4.0]
    assert times.calls[-1] == (FINALISTS, MANY_ROUNDS)


@dataclass
class _Event:
    at: float = 0.0


class FakeCuda:
    """A fake driver: a kernel takes as many microseconds as its first byte says."""

    def __init__(self, ordinal: int = 0) -> None:
        self.now, self.allocated, self.alive = 0.0, 0, 0
        self.stream = None

    def load(self, cubin: bytes, kernel: str, shared: int = 0) -> LoadedKernel:
        self.alive += kernel == "k"
        return LoadedKernel(cubin, cubin[0])

    def unload(self, loaded: LoadedKernel) -> None:
        self.alive -= 1

    def missing_parameters(self, loaded: LoadedKernel, passed: int) -> list[int]:
        return []

    def launch(self, loaded: LoadedKernel, spec: LaunchSpec, arguments: Any) -> None:
        if spec.block[0] > 512:
            raise DriverError("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "cuLaunchKernel")
        if spec.grid[0] == 13:
            raise DriverError("CUDA_ERROR_ILLEGAL_ADDRESS", "cuStreamSynchronize")

    def graph(self, loaded: LoadedKernel, spec: LaunchSpec, arguments: Any, times: int) -> float:
        return times * loaded.function * 1e-6

    def replay(self, graph: float) -> None:
        self.now += graph

    def destroy_graph(self, graph: float) -> None: ...

    def event(self) -> _Event:
        return _Event()

    def record(self, event: _Event) -> None:
        event.at = self.now

    def seconds(self, start: _Event, end: _Event) -> float:
        return end.at - start.at

    def synchronize(self) -> None: ...

    def allocate(self, size: int) -> int:
        self.allocated += size
        return self.allocated

    def memory(self) -> tuple[int, int]:
        return 1 << 30, 1 << 30

    def load_helper(self, ptx: str, entry: str) -> LoadedKernel:
        return LoadedKernel(ptx, entry)

    def call(self, *launch: Any) -> None: ...

    def upload_word(self, target: int, word: int) -> None: ...

    def free(self, pointer: int) -> None: ...

    def copy(self, target: int, source: int, size: int) -> None: ...

    def fill(self, target: int, byte: int, size: int) -> None: ...


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    fake = FakeCuda()
    monkeypatch.setattr(build_comparison, "Cuda", lambda: fake)
    monkeypatch.setattr(build_comparison, "_timer", None)
    yield fake


def test_builds_with_other_launches_share_their_buffers(cuda: FakeCuda) -> None:
    args = (Buffer(name="x", dtype="f32", shape=(1000,)),)
    builds = [source(bytes([us]), args=args, grid=(us, 1, 1)) for us in (40, 3)]
    assert build_comparison._time_in_process(builds, 5) == [40.0, 3.0]
    before = cuda.allocated
    assert build_comparison._time_in_process([source(b"\x07", args=args)], 1) == [7.0]
    assert cuda.allocated == before and cuda.alive == 0


def test_a_build_that_cannot_be_launched_costs_no_process(cuda: FakeCuda) -> None:
    message = build_comparison._time_in_process([source(b"\x07", block=(1024, 1, 1))], 1)
    assert message == ["cuLaunchKernel: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"]
    with pytest.raises(Exception, match="ILLEGAL_ADDRESS"):
        build_comparison._time_in_process([source(b"\x07", grid=(13, 1, 1))], 1)


def test_the_suite_is_as_described() -> None:
    suite = entries()
    names = [entry.name for entry in suite]
    assert len(set(names)) == len(names) == 28
    for size in ("published", "filling"):
        mine = [e for e in suite if e.size == size]
        assert {e.kernel for e in mine} == {
            "gemm_leakyrelu", "batched_gemm", "fused_feedforward",
            "fused_attention", "flash_attention", "softmax", "rmsnorm",
        }  # fmt: skip
        products = {e.kernel for e in mine if e.instructions}
        assert all({e.instructions for e in mine if e.kernel == k} == {"mma", "wgmma"}
                   for k in products)  # fmt: skip
    for entry in suite:
        if entry.problem:
            assert 20 <= len(set(entry.options)) == len(entry.options)
    assert [e.name for e in suite if not e.problem] == ["transpose", "dot_product"]


@pytest.mark.parametrize("instructions", ["mma", "wgmma"])
def test_a_build_multiplies_as_its_entry_says(instructions: Any) -> None:
    entry = next(e for e in entries() if e.instructions == instructions)
    built = build(entry, entry.options[0])
    assert ("wgmma.mma_async" in (built.ptx or "")) == (instructions == "wgmma")
    assert built.launch is not None and built.launch.flops == 2.0 * np.prod(entry.problem)


@pytest.mark.slow
def test_a_wrong_tile_returns_an_error_text() -> None:
    first = entries()[0]
    narrow = replace(first, instructions="wgmma")
    message = try_build(narrow, Options(tile=(32, 32, 64), num_warps=4, num_stages=3))
    assert isinstance(message, str) and "compiles to mma" in message
    message = try_build(narrow, Options(tile=(256, 256, 64), num_warps=8, num_stages=5))
    assert isinstance(message, str) and "shared memory" in message


def test_a_cubin_has_no_options() -> None:
    entry = next(e for e in entries() if e.name == "dot_product")
    assert isinstance(entry, Entry) and not entry.options
    assert build(entry).launch is not None


def test_configurations_of_earlier_files_still_read() -> None:
    old = {"num_warps": 4, "num_stages": 2, "us": 3.0, "failure": ""}
    assert Configuration.model_validate(old).options == Options(num_warps=4, num_stages=2)


def test_the_inductor_kernel_is_taken_from_its_folder(tmp_path: Path) -> None:
    launch = LaunchSpec(grid=(8, 1, 1))
    (tmp_path / "inductor.sm_90.cubin").write_bytes(
        next(e for e in entries() if e.name == "dot_product").file.read_bytes()
    )
    (tmp_path / "inductor.json").write_text(launch.model_dump_json())
    entry = entries(tmp_path)[-1]
    assert entry.name == "inductor" and build(entry).launch == launch
