"""Binaries that another process recorded are loaded without Triton's front end, if still valid."""

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
    launcher,
)
from nostall.attach.torch_compile.store.kernel_store import KernelStore  # noqa: E402
from nostall.attach.torch_compile.store.records import BinariesRecord  # noqa: E402
from nostall.fusion.codegen.emit.emit import emit  # noqa: E402
from nostall.fusion.codegen.generate import schedule_operators  # noqa: E402
from nostall.fusion.codegen.runtime.kernel import clear_source_cache  # noqa: E402
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan  # noqa: E402
from nostall.fusion.codegen.tiling.planned_kernel import plan_kernel  # noqa: E402
from tests.unit.fusion.patterns import layer_norm  # noqa: E402


class Gpu:
    """A Triton driver without a GPU, which records loaded binaries, launchers and launches.

    Each launch fills the kernel's results, its last tensors, with one byte.
    """

    def __init__(self) -> None:
        self.loaded: list[bytes] = []
        self.launchers: list[tuple[Any, ...]] = []
        self.launches: list[tuple[Any, ...]] = []
        # The byte that a launcher (by its index) writes.
        self.written_byte: Callable[[int], int] = lambda launcher: 60
        # Sizes of the results in bytes.
        self.result_sizes: list[int] = []
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
        index = len(self.launchers)
        self.launchers.append((dict(source.signature), dict(source.constants), metadata))

        def run(*arguments: Any) -> None:
            self.launches.append((index, *arguments))
            values = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments[9:]]
            addresses = [value for value in values if value > 1 << 20]
            results = addresses[-len(self.result_sizes) :]
            for address, size in zip(results, self.result_sizes, strict=True):
                ctypes.memset(address, self.written_byte(index), size)

        return run


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Gpu]:
    fake = Gpu()
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(triton.runtime.driver, "_active", fake)
    monkeypatch.setattr(launcher, "_current_stream", lambda device: 5)
    yield fake
    # Triton unloads binaries without references by the driver that is active then.
    custom_op.load_op.cache_clear()
    clear_source_cache()
    gc.collect()


@pytest.fixture
def kernel(gpu: Gpu) -> str:
    graph = layer_norm((64, 768), "float16")
    program = emit(
        plan_kernel(schedule_operators(graph, graph.operators), KernelPlan("looped", 1, (1024,), 4))
    )
    name = KernelStore().put(program)
    outputs = KernelStore().load_kernel(name)[0].outputs
    shapes = [(output.shape, getattr(torch, output.dtype)) for output in outputs]
    gpu.result_sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in shapes]
    return name


def run_twice(kernel: str, monkeypatch: pytest.MonkeyPatch, *, front_end: bool = True) -> Any:
    """Results of two calls of the kernel as in a new process.

    ``front_end``: whether Triton's front end may be used.
    """
    custom_op.load_op.cache_clear()
    clear_source_cache()
    with monkeypatch.context() as patch:
        if not front_end:
            patch.setattr(custom_op, "load_source", lambda *_: pytest.fail("Triton was used"))
        call = custom_op.load_op(kernel).launcher(None)
        return [call(inputs(call))[0].clone() for _ in range(2)]


def inputs(call: launcher.Launcher) -> list[Any]:
    return [torch.ones(s).as_strided(s, t).to(d) for s, t, d in call.inputs]


def test_the_next_process_runs_the_same_binary_without_tritons_front_end(
    gpu: Gpu, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run_twice(kernel, monkeypatch)
    launcher_arguments, direct, cubin = gpu.launchers[0], gpu.launches[-1], gpu.loaded[0]
    gpu.launchers, gpu.launches, gpu.loaded = [], [], []
    again = run_twice(kernel, monkeypatch, front_end=False)
    assert all(torch.equal(result, first[0]) for result in (*first, *again))
    assert gpu.launchers == [launcher_arguments] and gpu.loaded == [cubin]
    assert len(gpu.launches) == 2
    index, *arguments = gpu.launches[-1]
    equal = [a == b for a, b in zip(arguments, direct[1:], strict=True)]
    # Only the function's handle (argument 4) and addresses of tensors may differ.
    addresses = [i for i, argument in enumerate(arguments) if i >= 9 and argument > 1 << 20]
    assert index == 0 and all(same or i in (4, *addresses) for i, same in enumerate(equal))


def test_a_loaded_binary_that_returns_other_results_is_not_recorded(
    gpu: Gpu, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.written_byte = lambda launcher: 60 + launcher
    run_twice(kernel, monkeypatch)
    assert len(gpu.launchers) == 2  # the second one belongs to the loaded binary
    assert not (KernelStore().folder / "binaries").exists()


def test_binaries_of_a_single_dynamic_size_are_not_recorded(
    gpu: Gpu, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = custom_op.load_op(kernel).launcher(64)
    call(inputs(call))
    assert len(gpu.launchers) == 1 and not (KernelStore().folder / "binaries").exists()
    run_twice(kernel, monkeypatch)
    assert len(gpu.launchers) == 3 and (KernelStore().folder / "binaries").exists()


@pytest.mark.parametrize("change", ["cache", "record", "variables", "hook", "debug", "torch"])
def test_triton_is_used_if_it_might_take_another_binary(
    gpu: Gpu, kernel: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: str
) -> None:
    run_twice(kernel, monkeypatch)
    (file,) = (KernelStore().folder / "binaries").iterdir()
    if change == "cache":
        shutil.rmtree(tmp_path / "triton")
    elif change == "record":
        file.write_bytes(file.read_bytes()[:-9])
    elif change == "variables":
        monkeypatch.setenv("DISABLE_PTXAS_OPT", "1")
    elif change == "hook":
        monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **_: None)
    elif change == "debug":
        monkeypatch.setattr(triton.knobs.runtime, "debug", True)
    else:
        monkeypatch.setattr(torch, "__version__", "3.0")
    with pytest.raises(pytest.fail.Exception, match="Triton was used"):
        run_twice(kernel, monkeypatch, front_end=False)


def test_binaries_with_constants_other_than_plain_values_are_not_recorded(
    gpu: Gpu, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_twice(kernel, monkeypatch)
    (file,) = (KernelStore().folder / "binaries").iterdir()
    record = BinariesRecord.read(file.read_bytes())
    (binary,) = binary_cache.load_described(record)
    assert binary_cache.describe([binary]) == record
    for constants in ({(0,): object()}, {(0,): torch.float32}):
        binary.src.constants = constants
        assert binary_cache.describe([binary]) is None
    binary.src.constants, binary.src.signature = {}, {"x": ("*fp16", "i32")}
    assert binary_cache.describe([binary]) is None
