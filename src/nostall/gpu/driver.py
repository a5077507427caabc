"""The CUDA driver calls that nostall needs, with Python exceptions and plain values."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nostall.core.errors import MissingPart
from nostall.core.launch import LaunchSpec, Scalar

_SCALARS: dict[str, Any] = {
    "i8": ctypes.c_int8,
    "i16": ctypes.c_int16,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "u8": ctypes.c_uint8,
    "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64,
    "f32": ctypes.c_float,
    "f64": ctypes.c_double,
}
_DEFAULT_DYNAMIC_SHARED = 48 * 1024


class DriverError(Exception):
    """A driver call failed; ``name`` is CUDA's name of the error."""

    def __init__(self, name: str, call: str) -> None:
        super().__init__(f"{call}: {name}")
        self.name = name


@dataclass(frozen=True)
class Loaded:
    """One kernel of a loaded module."""

    module: Any
    function: Any


class Cuda:
    """One device's primary context, used from one thread.

    ``driver`` is the module ``cuda.bindings.driver``, or a test's stand-in.
    """

    def __init__(self, ordinal: int = 0, driver: Any = None) -> None:
        self.cu = driver or _bindings()
        try:
            self.call("cuInit", 0)
            self.device = self.call("cuDeviceGet", ordinal)
        except (DriverError, RuntimeError) as error:  # RuntimeError: there is no driver library
            raise MissingPart(
                f"no usable GPU number {ordinal} ({error}); `nostall doctor` shows what is "
                "there; --objective model needs none"
            ) from error
        if " MIG " in self.name:
            raise MissingPart(
                f"GPU number {ordinal} is a slice of one ({self.name}): others share its clocks, "
                "power and memory, so times on it do not hold; measure on a whole GPU, or search "
                "with --objective model"
            )
        context = self.call("cuDevicePrimaryCtxRetain", self.device)
        self.call("cuCtxSetCurrent", context)
        self.stream = self.call("cuStreamCreate", 0)
        self._own: dict[bytes, Loaded] = {}

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a driver function; its results, or :class:`DriverError`."""
        status, *results = getattr(self.cu, name)(*arguments)
        if int(status) != 0:
            raise DriverError(status.name, name)
        return results[0] if len(results) == 1 else tuple(results)

    def attribute(self, name: str) -> int:
        key = getattr(self.cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.call("cuDeviceGetAttribute", key, self.device))

    @property
    def architecture(self) -> int:
        """Such as 90."""
        major = self.attribute("COMPUTE_CAPABILITY_MAJOR")
        return 10 * major + self.attribute("COMPUTE_CAPABILITY_MINOR")

    @property
    def name(self) -> str:
        raw: bytes = self.call("cuDeviceGetName", 96, self.device)
        return raw.partition(b"\0")[0].decode()

    @property
    def bus(self) -> str:
        """The PCI address, by which other tools know the GPU whatever CUDA_VISIBLE_DEVICES says."""
        raw: bytes = self.call("cuDeviceGetPCIBusId", 32, self.device)
        return raw.partition(b"\0")[0].decode()

    def load(self, cubin: bytes, kernel: str, shared: int = 0) -> Loaded:
        """Load a module and look up one kernel; ``shared`` bytes of dynamic shared memory."""
        module = self.call("cuModuleLoadData", cubin)
        function = self.call("cuModuleGetFunction", module, kernel.encode())
        if shared > _DEFAULT_DYNAMIC_SHARED - 1024:
            limit = self.cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self.call("cuFuncSetAttribute", function, limit, shared)
        return Loaded(module, function)

    def own(self, ptx: bytes, kernel: str) -> Loaded:
        """One of nostall's own kernels, loaded when it is first asked for."""
        if ptx not in self._own:
            self._own[ptx] = self.load(ptx, kernel)
        return self._own[ptx]

    def unload(self, loaded: Loaded) -> None:
        self.call("cuModuleUnload", loaded.module)

    def allocate(self, size: int) -> int:
        return int(self.call("cuMemAlloc", size))

    def free(self, pointer: int) -> None:
        self.call("cuMemFree", pointer)

    def memory(self) -> tuple[int, int]:
        """Bytes of device memory: free, in all."""
        free, total = self.call("cuMemGetInfo")
        return int(free), int(total)

    def upload_word(self, target: int, value: int) -> None:
        """Write 64 bits; what was asked for before has happened then."""
        word = np.array([value], dtype=np.uint64)
        self.call("cuMemcpyHtoDAsync", target, word, word.nbytes, self.stream)
        self.synchronize()

    def download_word(self, source: int) -> int:
        """Read 64 bits, after everything that was asked for before."""
        return int(self.download(source, 8).view(np.uint64)[0])

    def download(self, source: int, size: int) -> NDArray[np.uint8]:
        out = np.empty(size, dtype=np.uint8)
        self.call("cuMemcpyDtoHAsync", out, source, size, self.stream)
        self.synchronize()
        return out

    def copy(self, target: int, source: int, size: int) -> None:
        self.call("cuMemcpyDtoDAsync", target, source, size, self.stream)

    def fill(self, target: int, byte: int, size: int) -> None:
        self.call("cuMemsetD8Async", target, byte, size, self.stream)

    def synchronize(self) -> None:
        self.call("cuStreamSynchronize", self.stream)

    def missing_parameters(self, loaded: Loaded, given: int) -> list[int]:
        """Sizes in bytes of the parameters that a kernel has beyond those given: compilers add
        pointers to scratch memory, which are null when unused."""
        sizes: list[int] = []
        while True:
            try:
                _, size = self.call("cuFuncGetParamInfo", loaded.function, given + len(sizes))
            except DriverError:
                return sizes
            sizes.append(int(size))

    def launch(self, loaded: Loaded, spec: LaunchSpec, arguments: Arguments) -> None:
        if spec.cluster == (1, 1, 1):
            self.call(
                "cuLaunchKernel",
                loaded.function,
                *spec.grid,
                *spec.block,
                spec.shared,
                self.stream,
                arguments.packed,
                0,
            )
            return
        config = self.cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = spec.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = spec.block
        config.sharedMemBytes, config.hStream = spec.shared, self.stream
        attribute = self.cu.CUlaunchAttribute()
        attribute.id = self.cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dimension = attribute.value.clusterDim
        dimension.x, dimension.y, dimension.z = spec.cluster
        config.attrs, config.numAttrs = [attribute], 1
        self.call("cuLaunchKernelEx", config, loaded.function, arguments.packed, 0)

    def graph(self, loaded: Loaded, spec: LaunchSpec, arguments: Arguments, times: int) -> Any:
        """An executable CUDA graph of ``times`` launches, one after the other."""

        def work() -> None:
            for _ in range(times):
                self.launch(loaded, spec, arguments)

        return self.captured(work)

    def captured(self, work: Callable[[], None]) -> Any:
        """What ``work`` asks of the stream, as an executable CUDA graph."""
        mode = self.cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self.call("cuStreamBeginCapture", self.stream, mode)
        work()
        graph = self.call("cuStreamEndCapture", self.stream)
        executable = self.call("cuGraphInstantiate", graph, 0)
        self.call("cuGraphDestroy", graph)
        return executable

    def replay(self, graph: Any) -> None:
        self.call("cuGraphLaunch", graph, self.stream)

    def drop(self, graph: Any) -> None:
        self.call("cuGraphExecDestroy", graph)

    def event(self) -> Any:
        return self.call("cuEventCreate", 0)

    def record(self, event: Any) -> None:
        self.call("cuEventRecord", event, self.stream)

    def seconds(self, start: Any, end: Any) -> float:
        """Between two recorded events that have happened."""
        return float(self.call("cuEventElapsedTime", start, end)) * 1e-3


def _bindings() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise MissingPart(
            f"the CUDA driver bindings are missing ({error}); pip install 'nostall[gpu]'"
        ) from error
    return driver


@dataclass(frozen=True)
class Arguments:
    """Kernel parameters in the form that the launch call takes."""

    packed: tuple[tuple[Any, ...], tuple[Any, ...]]

    @classmethod
    def of(cls, spec: LaunchSpec, pointers: dict[str, int], extra: Sequence[int]) -> Arguments:
        """``pointers`` by buffer name; ``extra``: sizes of parameters to be passed as zeros."""
        values: list[Any] = []
        types: list[Any] = []
        for argument in spec.args:
            if isinstance(argument, Scalar):
                floating = argument.dtype.startswith("f")
                values.append(float(argument.value) if floating else int(argument.value))
                types.append(_SCALARS[argument.dtype])
            elif argument.name in pointers:
                values.append(pointers[argument.name])
                types.append(ctypes.c_void_p)
        for size in extra:
            values.append(0)
            types.append(
                {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32}.get(
                    size, ctypes.c_void_p
                )
            )
        return cls((tuple(values), tuple(types)))
