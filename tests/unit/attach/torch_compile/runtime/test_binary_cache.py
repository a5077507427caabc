"""Binaries that another process left: found without Triton's front end, and only where they are."""

from __future__ import annotations

import ctypes
import gc
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from nostall.attach.torch_compile.runtime import (  # noqa: E402
    binary_cache,
    custom_op,
)
from nostall.attach.torch_compile.runtime import launcher as launching  # noqa: E402
from nostall.attach.torch_compile.store.records import BinariesRecord, Kept  # noqa: E402
from nostall.fusion.codegen.emit.emit import emit  # noqa: E402
from nostall.fusion.codegen.runtime.kernel import clear_source_cache  # noqa: E402
from nostall.fusion.codegen.runtime.stitched_graph import schedule_operators  # noqa: E402
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan  # noqa: E402
from tests.unit.fusion.patterns import layer_norm  # noqa: E402


class Gpu:
    """Triton's driver up to its last calls.  Every launch fills the kernel's results, its last
    tensors, with one byte, and is written down with what its launcher was made from."""

    def __init__(self) -> None:
        self.loaded: list[bytes] = []
        self.launchers: list[tuple[Any, ...]] = []
        self.launches: list[tuple[Any, ...]] = []
        self.gives: Callable[[int], int] = lambda launcher: 60
        self.results: list[int] = []
        """Bytes of each."""
        self.utils = self

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[Any, ...]:
        self.loaded.append(cubin)
        return object(), len(self.loaded), 32, 0, 1024

    def unload_module(self, module: Any) -> None: ...

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 5

    def get_current_target(self) -> Any:
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        number = len(self.launchers)
        self.launchers.append((dict(source.signature), dict(source.constants), metadata))

        def run(*arguments: Any) -> None:
            self.launches.append((number, *arguments))
            given = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments[9:]]
            tensors = [address for address in given if address > 1 << 20]
            for address, size in zip(tensors[-len(self.results) :], self.results, strict=True):
                ctypes.memset(address, self.gives(number), size)

        return run


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Gpu]:
    found = Gpu()
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(triton.runtime.driver, "_active", found)
    monkeypatch.setattr(launching, "_stream_of", lambda device: 5)
    yield found
    # Triton unloads what is dropped, by the driver of that moment.
    custom_op.resolve.cache_clear()
    clear_source_cache()
    gc.collect()


@pytest.fixture
def kernel(gpu: Gpu) -> str:
    graph = layer_norm((64, 768), "float16")
    program = emit(schedule_operators(graph, graph.operators), KernelPlan("looped", 1, (1024,), 4))
    name = Kept().put(program)
    shapes = [(one.shape, getattr(torch, one.dtype)) for one in Kept().kernel(name)[0].outputs]
    gpu.results = [math.prod(shape) * dtype.itemsize for shape, dtype in shapes]
    return name


def process(kernel: str, monkeypatch: pytest.MonkeyPatch, *, front: bool = True) -> Any:
    """What a new process makes of the kernel, called twice; ``front``: whether Triton's front end
    may be asked."""
    custom_op.resolve.cache_clear()
    clear_source_cache()
    with monkeypatch.context() as patch:
        if not front:
            patch.setattr(custom_op, "load_source", lambda *_: pytest.fail("Triton was asked"))
        launcher = custom_op.resolve(kernel).launcher(None)
        inputs = [torch.ones(s).as_strided(s, t).to(d) for s, t, d in launcher.inputs]
        return [launcher(inputs)[0].clone() for _ in range(2)]


def test_the_next_process_runs_the_same_binary_without_a_front_end(
    gpu: Gpu, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = process(kernel, monkeypatch)
    made, direct, cubin = gpu.launchers[0], gpu.launches[-1], gpu.loaded[0]
    gpu.launchers, gpu.launches, gpu.loaded = [], [], []
    again = process(kernel, monkeypatch, front=False)
    assert all(torch.equal(one, first[0]) for one in (*first, *again))
    assert gpu.launchers == [made] and gpu.loaded == [cubin]
    assert len(gpu.launches) == 2
    number, *arguments = gpu.launches[-1]
    alike = [a == b for a, b in zip(arguments, direct[1:], strict=True)]
    addresses = [at for at, argument in enumerate(arguments) if at >= 9 and argument > 1 << 20]
    # The function's handle is the loader's; tensors lie elsewhere.
    assert number == 0 and all(same or at in (4, *addresses) for at, same in enumerate(alike))


def test_what_gives_other_results_as_it_would_be_found_is_not_left(
    gpu: Gpu, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.gives = lambda launcher: 60 + launcher
    process(kernel, monkeypatch)
    assert len(gpu.launchers) == 2  # as it would be found, too
    assert not (Kept().folder / "binaries").exists()


def test_nothing_is_left_for_one_size_of_many(
    gpu: Gpu, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = custom_op.resolve(kernel).launcher(64)
    inputs = [torch.ones(s).as_strided(s, t).to(d) for s, t, d in launcher.inputs]
    launcher(inputs)
    assert len(gpu.launchers) == 1 and not (Kept().folder / "binaries").exists()
    process(kernel, monkeypatch)
    assert len(gpu.launchers) == 3 and (Kept().folder / "binaries").exists()


@pytest.mark.parametrize("change", ["cache", "record", "variables", "hook", "debug", "torch"])
def test_triton_is_asked_where_the_binary_may_be_another(
    gpu: Gpu, kernel: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: str
) -> None:
    process(kernel, monkeypatch)
    (place,) = (Kept().folder / "binaries").iterdir()
    if change == "cache":
        shutil.rmtree(tmp_path / "triton")
    elif change == "record":
        place.write_bytes(place.read_bytes()[:-9])
    elif change == "variables":
        monkeypatch.setenv("DISABLE_PTXAS_OPT", "1")
    elif change == "hook":
        monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **_: None)
    elif change == "debug":
        monkeypatch.setattr(triton.knobs.runtime, "debug", True)
    else:
        monkeypatch.setattr(torch, "__version__", "3.0")
    with pytest.raises(pytest.fail.Exception, match="Triton was asked"):
        process(kernel, monkeypatch, front=False)


def test_constants_that_are_not_plain_are_not_told(
    gpu: Gpu, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    process(kernel, monkeypatch)
    (place,) = (Kept().folder / "binaries").iterdir()
    (known,) = BinariesRecord.read(place.read_bytes()).binaries
    (found,) = binary_cache.again(BinariesRecord(binaries=(known,)))
    assert binary_cache.told([found]) == BinariesRecord(binaries=(known,))
    for wrong in ({(0,): object()}, {(0,): torch.float32}):
        found.src.constants = wrong
        assert binary_cache.told([found]) is None
    found.src.constants, found.src.signature = {}, {"x": ("*fp16", "i32")}
    assert binary_cache.told([found]) is None
