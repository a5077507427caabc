"""CUDA driver calls as methods that raise exceptions and return plain values."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nostall.core.errors import MissingPart
from nostall.core.launch import LaunchSpec, Scalar

_SCALAR_TYPES: dict[str, Any] = {
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
"""Bytes of shared memory of a block that need no function attribute."""


class DriverError(Exception):
    """A driver call failed; ``name`` is CUDA's name of the error."""

    def __init__(self, name: str, call: str) -> None:
        super().__init__(f"{call}: {name}")
        self.name = name


@dataclass(frozen=True)
class LoadedKernel:
    """One kernel of a loaded module: the driver's handles."""

    module: Any
    function: Any
    dependent: bool = False
    """Whether launches one after another have the attribute of programmatic dependent launch: the
    kernel waits itself for those before it."""


class Cuda:
    """The primary context of one GPU and one stream, used from a single thread."""

    def __init__(self, ordinal: int = 0, driver: Any = None) -> None:
        """``driver``: the module ``cuda.bindings.driver``, or a test's fake of it.

        Raises :class:`MissingPart` if the GPU cannot be used, or is a MIG slice.
        """
        self.cu = driver or _import_bindings()
        try:
            self.call("cuInit", 0)
            self.device = self.call("cuDeviceGet", ordinal)
        except (DriverError, RuntimeError) as error:  # RuntimeError: there is no driver library
            raise MissingPart(
                f"no usable GPU number {ordinal} ({str(error).partition('. ')[0]}); measuring "
                "needs an NVIDIA GPU and its driver; `nostall doctor` shows what is missing"
            ) from error
        if " MIG " in self.name:
            raise MissingPart(
                f"GPU number {ordinal} is a MIG slice ({self.name}): it shares clocks, power and "
                "memory with other slices, so times on it are not reliable; measure on a whole GPU"
            )
        context = self.call("cuDevicePrimaryCtxRetain", self.device)
        self.call("cuCtxSetCurrent", context)
        self.stream = self.call("cuStreamCreate", 0)
        self._helpers: dict[bytes, LoadedKernel] = {}

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a driver function and return its results.

        Raises :class:`DriverError` if it fails.
        """
        status, *results = getattr(self.cu, name)(*arguments)
        if int(status) != 0:
            raise DriverError(status.name, name)
        return results[0] if len(results) == 1 else tuple(results)

    def attribute(self, name: str) -> int:
        """A device attribute, by its name after ``CU_DEVICE_ATTRIBUTE_``."""
        key = getattr(self.cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.call("cuDeviceGetAttribute", key, self.device))

    @property
    def architecture(self) -> int:
        """The number of the architecture, such as 90 for sm_90."""
        major = self.attribute("COMPUTE_CAPABILITY_MAJOR")
        return 10 * major + self.attribute("COMPUTE_CAPABILITY_MINOR")

    @property
    def name(self) -> str:
        """The GPU's product name."""
        raw: bytes = self.call("cuDeviceGetName", 96, self.device)
        return raw.partition(b"\0")[0].decode()

    @property
    def bus(self) -> str:
        """The GPU's PCI address.  Unlike ordinals it does not depend on CUDA_VISIBLE_DEVICES."""
        raw: bytes = self.call("cuDeviceGetPCIBusId", 32, self.device)
        return raw.partition(b"\0")[0].decode()

    def load(
        self, cubin: bytes, kernel: str, shared: int = 0, *, dependent: bool = False
    ) -> LoadedKernel:
        """Load a module and find one of its kernels.

        ``shared``: bytes of dynamic shared memory of a launch.  ``dependent``: see
        :attr:`LoadedKernel.dependent`.
        """
        module = self.call("cuModuleLoadData", cubin)
        function = self.call("cuModuleGetFunction", module, kernel.encode())
        if shared > _DEFAULT_DYNAMIC_SHARED - 1024:
            limit = self.cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self.call("cuFuncSetAttribute", function, limit, shared)
        return LoadedKernel(module, function, dependent)

    def load_helper(self, ptx: bytes, kernel: str) -> LoadedKernel:
        """Load one of nostall's helper kernels; loaded once for each PTX text."""
        if ptx not in self._helpers:
            self._helpers[ptx] = self.load(ptx, kernel)
        return self._helpers[ptx]

    def unload(self, loaded: LoadedKernel) -> None:
        self.call("cuModuleUnload", loaded.module)

    def allocate(self, size: int) -> int:
        """Allocate ``size`` bytes of device memory; returns the address."""
        return int(self.call("cuMemAlloc", size))

    def free(self, pointer: int) -> None:
        self.call("cuMemFree", pointer)

    def memory(self) -> tuple[int, int]:
        """Bytes of device memory: free and total."""
        free, total = self.call("cuMemGetInfo")
        return int(free), int(total)

    def upload_word(self, target: int, value: int) -> None:
        """Write 64 bits to device memory; waits for the stream."""
        word = np.array([value], dtype=np.uint64)
        self.call("cuMemcpyHtoDAsync", target, word, word.nbytes, self.stream)
        self.synchronize()

    def download_word(self, source: int) -> int:
        """Read 64 bits from device memory; waits for the stream."""
        return int(self.download(source, 8).view(np.uint64)[0])

    def download(self, source: int, size: int) -> NDArray[np.uint8]:
        """Read ``size`` bytes from device memory; waits for the stream."""
        out = np.empty(size, dtype=np.uint8)
        self.call("cuMemcpyDtoHAsync", out, source, size, self.stream)
        self.synchronize()
        return out

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy ``size`` bytes within device memory, in stream order."""
        self.call("cuMemcpyDtoDAsync", target, source, size, self.stream)

    def fill(self, target: int, byte: int, size: int) -> None:
        """Set ``size`` bytes of device memory to ``byte``, in stream order."""
        self.call("cuMemsetD8Async", target, byte, size, self.stream)

    def synchronize(self) -> None:
        """Wait until the stream is idle."""
        self.call("cuStreamSynchronize", self.stream)

    def missing_parameters(self, loaded: LoadedKernel, count: int) -> list[int]:
        """Sizes in bytes of the kernel's parameters after the first ``count``.

        Compilers append pointers to scratch memory, which are null if unused.
        """
        sizes: list[int] = []
        while True:
            try:
                _, size = self.call("cuFuncGetParamInfo", loaded.function, count + len(sizes))
            except DriverError:
                return sizes
            sizes.append(int(size))

    def launch(
        self,
        loaded: LoadedKernel,
        spec: LaunchSpec,
        arguments: KernelArguments,
        *,
        dependent: bool = False,
    ) -> None:
        """Launch a kernel, as a cluster launch if ``spec.cluster`` is not one block.

        ``dependent``: it may start while the kernel before it in the stream still runs.
        """
        attributes = self._launch_attributes(spec, dependent)
        if not attributes:
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
        config.attrs, config.numAttrs = attributes, len(attributes)
        self.call("cuLaunchKernelEx", config, loaded.function, arguments.packed, 0)

    def _launch_attributes(self, spec: LaunchSpec, dependent: bool) -> list[Any]:
        attributes: list[Any] = []
        ids = self.cu.CUlaunchAttributeID
        if spec.cluster != (1, 1, 1):
            cluster = self.cu.CUlaunchAttribute()
            cluster.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            dimension = cluster.value.clusterDim
            dimension.x, dimension.y, dimension.z = spec.cluster
            attributes.append(cluster)
        if dependent:
            early = self.cu.CUlaunchAttribute()
            early.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            early.value.programmaticStreamSerializationAllowed = 1
            attributes.append(early)
        return attributes

    def graph(
        self, loaded: LoadedKernel, spec: LaunchSpec, arguments: KernelArguments, launches: int
    ) -> Any:
        """An executable CUDA graph of ``launches`` consecutive launches.

        From the second on they are dependent launches if the kernel waits itself.
        """

        def launch_all() -> None:
            for number in range(launches):
                dependent = loaded.dependent and number > 0
                self.launch(loaded, spec, arguments, dependent=dependent)

        return self.capture(launch_all)

    def capture(self, work: Callable[[], None]) -> Any:
        """Capture the stream operations of ``work`` as an executable CUDA graph."""
        mode = self.cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self.call("cuStreamBeginCapture", self.stream, mode)
        work()
        graph = self.call("cuStreamEndCapture", self.stream)
        executable = self.call("cuGraphInstantiate", graph, 0)
        self.call("cuGraphDestroy", graph)
        return executable

    def replay(self, graph: Any) -> None:
        """Launch an executable graph."""
        self.call("cuGraphLaunch", graph, self.stream)

    def destroy_graph(self, graph: Any) -> None:
        self.call("cuGraphExecDestroy", graph)

    def event(self) -> Any:
        """Create an event."""
        return self.call("cuEventCreate", 0)

    def record(self, event: Any) -> None:
        """Record an event in stream order."""
        self.call("cuEventRecord", event, self.stream)

    def seconds(self, start: Any, end: Any) -> float:
        """Time between two events; both must have completed."""
        return float(self.call("cuEventElapsedTime", start, end)) * 1e-3


def _import_bindings() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise MissingPart(
            f"the CUDA driver bindings are missing ({error}); pip install 'nostall[gpu]'"
        ) from error
    return driver


@dataclass(frozen=True)
class KernelArguments:
    """Kernel parameters as ``cuLaunchKernel`` takes them: values and their ctypes."""

    packed: tuple[tuple[Any, ...], tuple[Any, ...]]

    @classmethod
    def pack(
        cls, spec: LaunchSpec, pointers: dict[str, int], extra: Sequence[int]
    ) -> KernelArguments:
        """Pack the arguments of a launch.

        ``pointers``: device addresses by buffer name.  ``extra``: sizes in bytes of parameters
        that follow and are passed as zeros.
        """
        values: list[Any] = []
        types: list[Any] = []
        for argument in spec.args:
            if isinstance(argument, Scalar):
                is_float = argument.dtype.startswith("f")
                values.append(float(argument.value) if is_float else int(argument.value))
                types.append(_SCALAR_TYPES[argument.dtype])
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
