"""Fake CUDA driver in host memory, with a simulated clock.

PTX runs in the interpreter :mod:`tests.unit.gpu.ptx`.  A cubin is a Python function that a test
registers for its bytes.  A test checks the names of the calls against the real bindings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cuda.bindings import driver as real

from tests.unit.gpu.ptx import Entry, Machine, parse

OK = real.CUresult.CUDA_SUCCESS
Kernel = Callable[["FakeDriver", tuple[Any, ...]], None]


@dataclass
class Module:
    """A loaded module."""

    program: Entry | Kernel
    address: int
    """Number of modules loaded so far, in place of an address."""
    image: bytes = b""


@dataclass
class Program:
    """What a cubin computes, and how long that takes."""

    work: Kernel
    seconds: Callable[[int], float] = lambda address: 10e-6
    """Seconds by the address of the module."""
    parameters: int = 3
    waits: bool = True
    """Whether it waits for the kernels before it."""


@dataclass
class FakeDriver:
    """Replaces the module ``cuda.bindings.driver``."""

    programs: dict[bytes, Program] = field(default_factory=dict)
    device_name: str = "Fake 9000"
    capacity: int = 1 << 26
    l2: int = 4096
    devices: int = 1
    clock: float = 0.0
    memory: dict[int, Any] = field(default_factory=dict)
    launched: list[bytes] = field(default_factory=list)
    modules: int = 0
    unloaded: int = 0
    capturing: list[Callable[[], None]] | None = None
    dependent: list[bytes] = field(default_factory=list)
    """Launches of programs with the attribute of programmatic dependent launch."""
    _late: list[Callable[[], None]] = field(default_factory=list)
    """The kernel that let its dependents start, while it still runs."""
    _next: int = 0x1000

    def __getattr__(self, name: str) -> Any:
        """Enumerations are those of the real bindings."""
        if name.startswith("cu"):
            raise AttributeError(f"{name} is not part of the fake driver")
        return getattr(real, name)

    def at(self, address: int, size: int) -> Any:
        """A view of device memory."""
        for start, block in self.memory.items():
            if start <= address and address + size <= start + len(block):
                return block[address - start : address - start + size]
        raise IndexError(f"illegal address {address:#x} + {size}")

    def array(self, address: int, count: int, kind: str) -> Any:
        return self.at(address, count * np.dtype(kind).itemsize).view(kind)

    def cuInit(self, flags: int) -> Any:  # noqa: N802
        if not self.devices:
            return (real.CUresult.CUDA_ERROR_NO_DEVICE,)
        return (OK,)

    def cuDeviceGet(self, ordinal: int) -> Any:  # noqa: N802
        if ordinal >= self.devices:
            return real.CUresult.CUDA_ERROR_INVALID_DEVICE, None
        return OK, ordinal

    def cuDevicePrimaryCtxRetain(self, device: int) -> Any:  # noqa: N802
        return OK, "context"

    def cuCtxSetCurrent(self, context: str) -> Any:  # noqa: N802
        return (OK,)

    def cuStreamCreate(self, flags: int) -> Any:  # noqa: N802
        return OK, real.CUstream(1)

    def cuDeviceGetName(self, size: int, device: int) -> Any:  # noqa: N802
        return OK, self.device_name.encode().ljust(size, b"\0")

    def cuDeviceGetPCIBusId(self, size: int, device: int) -> Any:  # noqa: N802
        return OK, f"0000:{device:02x}:00.0".encode().ljust(size, b"\0")

    def cuDeviceGetAttribute(self, key: Any, device: int) -> Any:  # noqa: N802
        known = {"MAJOR": 9, "MINOR": 0, "L2_CACHE_SIZE": self.l2}
        return OK, next(v for k, v in known.items() if key.name.endswith(k))

    def cuMemGetInfo(self) -> Any:  # noqa: N802
        return OK, self.capacity - sum(map(len, self.memory.values())), self.capacity

    def cuMemAlloc(self, size: int) -> Any:  # noqa: N802
        if size > self.cuMemGetInfo()[1]:
            return real.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        start = self._next
        self._next += size + 512
        self.memory[start] = np.full(size, 0xCD, np.uint8)
        return OK, start

    def cuMemFree(self, pointer: int) -> Any:  # noqa: N802
        del self.memory[pointer]
        return (OK,)

    def cuModuleLoadData(self, image: bytes) -> Any:  # noqa: N802
        self.modules += 1
        if image.lstrip().startswith(b".version"):
            assert image.endswith(b"\0")
            return OK, Module(parse(image.rstrip(b"\0").decode()), self.modules)
        if image not in self.programs:
            return real.CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU, None
        return OK, Module(self.programs[image].work, self.modules, image)

    def cuModuleUnload(self, module: Module) -> Any:  # noqa: N802
        self.unloaded += 1
        return (OK,)

    def cuModuleGetFunction(self, module: Module, name: bytes) -> Any:  # noqa: N802
        if isinstance(module.program, Entry) and module.program.name != name.decode():
            return real.CUresult.CUDA_ERROR_NOT_FOUND, None
        return OK, module

    def cuFuncGetParamInfo(self, function: Any, index: int) -> Any:  # noqa: N802
        if index >= self.programs[function.image].parameters:
            return real.CUresult.CUDA_ERROR_INVALID_VALUE, None, None
        return OK, 8 * index, 8

    def cuLaunchKernel(self, function: Any, *rest: Any) -> Any:  # noqa: N802
        gx, gy, gz, bx, by, bz, _shared, _stream, (values, types), _extra = rest
        assert len(values) == len(types) and all(n >= 1 for n in (gx, gy, gz, bx, by, bz))
        return self._launch(function, values, (gx * gy * gz, bx * by * bz), False)

    def cuLaunchKernelEx(self, config: Any, function: Any, packed: Any, _extra: int) -> Any:  # noqa: N802
        grid = config.gridDimX * config.gridDimY * config.gridDimZ
        block = config.blockDimX * config.blockDimY * config.blockDimZ
        early = real.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        dependent = any(
            a.id == early and a.value.programmaticStreamSerializationAllowed for a in config.attrs
        )
        assert len(config.attrs) == config.numAttrs
        return self._launch(function, packed[0], (grid, block), dependent)

    def _launch(self, function: Any, values: Any, size: tuple[int, int], dependent: bool) -> Any:
        def work() -> None:
            if isinstance(function.program, Entry):
                machine = Machine(function.program, values, *size)
                self.clock += 2e-6
                if function.program.name == "late_copy":
                    self._late.append(lambda: machine.run(self.at))
                else:
                    machine.run(self.at)
                return
            if dependent:
                self.dependent.append(function.image)
            if not dependent or self.programs[function.image].waits:
                self._finish_late()
            self.launched.append(function.image)
            function.program(self, values)
            self._finish_late()
            self.clock += self.programs[function.image].seconds(function.address)

        return self._do(work)

    def _finish_late(self) -> None:
        while self._late:
            self._late.pop()()

    def cuMemcpyDtoDAsync(self, target: int, source: int, size: int, _: str) -> Any:  # noqa: N802
        def work() -> None:
            self.at(target, size)[:] = self.at(source, size)

        return self._do(work)

    def cuMemsetD8Async(self, target: int, byte: int, size: int, _: str) -> Any:  # noqa: N802
        def work() -> None:
            self.at(target, size)[:] = byte

        return self._do(work)

    def cuMemcpyHtoDAsync(self, target: int, data: Any, size: int, _: str) -> Any:  # noqa: N802
        assert self.capturing is None, "the host's memory is read when the graph is made"
        self.at(target, size)[:] = data.view(np.uint8)[:size]
        return (OK,)

    def cuMemcpyDtoHAsync(self, out: Any, source: int, size: int, _: str) -> Any:  # noqa: N802
        assert self.capturing is None
        out.view(np.uint8)[:size] = self.at(source, size)
        return (OK,)

    def cuStreamSynchronize(self, stream: str) -> Any:  # noqa: N802
        assert self.capturing is None, "a stream that is captured cannot be waited for"
        return (OK,)

    def cuStreamBeginCapture(self, stream: str, mode: Any) -> Any:  # noqa: N802
        self.capturing = []
        return (OK,)

    def cuStreamEndCapture(self, stream: str) -> Any:  # noqa: N802
        graph, self.capturing = self.capturing, None
        return OK, graph

    def cuGraphInstantiate(self, graph: Any, flags: int) -> Any:  # noqa: N802
        return OK, list(graph)

    def cuGraphDestroy(self, graph: Any) -> Any:  # noqa: N802
        return (OK,)

    def cuGraphExecDestroy(self, graph: Any) -> Any:  # noqa: N802
        graph.clear()
        return (OK,)

    def cuGraphLaunch(self, graph: Any, stream: str) -> Any:  # noqa: N802
        assert graph, "a destroyed or empty graph"
        for work in graph:
            work()
        return (OK,)

    def cuEventCreate(self, flags: int) -> Any:  # noqa: N802
        return OK, [0.0]

    def cuEventRecord(self, event: list[float], stream: str) -> Any:  # noqa: N802
        event[0] = self.clock
        return (OK,)

    def cuEventElapsedTime(self, start: list[float], end: list[float]) -> Any:  # noqa: N802
        return OK, (end[0] - start[0]) * 1e3

    def _do(self, work: Callable[[], None]) -> Any:
        if self.capturing is None:
            work()
        else:
            self.capturing.append(work)
        return (OK,)


NAMES = [name for name in vars(FakeDriver) if name.startswith("cu")]
"""The driver calls that the fake implements."""
