"""Note the kernel launches of a running program, for ``nostall record``.

The module runs inside the user's program: it imports only the standard library, changes no result,
and an error of its own never reaches the program.  Triton's launches are seen at the call
``kernel[grid](...)``, before Triton needs a GPU, and also under Triton's interpreter.  Launches by
``cuda.bindings.driver.cuLaunchKernel`` are seen in Python.
"""

from __future__ import annotations

import atexit
import errno
import functools
import inspect
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from nostall.attach.import_hooks import AfterImport, quietly

FILE_VARIABLE = "NOSTALL_RECORD_FILE"
"""Environment variable: the file to which each process appends lines of JSON."""
MAX_LAUNCHES = 1000
"""Different launches that one process notes."""
_PROBLEM = "a launch is not recorded"
_UNKNOWN = "the configurations of a launch are not recorded"
_quietly = functools.partial(quietly, _PROBLEM)
_DTYPES = {
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float64": "f64",
    "float8_e4m3fn": "f8e4m3",
    "float8_e5m2": "f8e5m2",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "uint8": "u8",
    "uint32": "u32",
    "uint64": "u64",
    "bool": "u8",
}
"""Names of PyTorch's dtypes -> those of launch files."""
_OPTIONS = ("num_ctas", "maxnreg", "enable_fp_fusion")
"""Compile options of Triton that a launch can give, beside those of launch files."""
_C_TYPES = {
    "c_int": "i32",
    "c_uint": "u32",
    "c_long": "i64",
    "c_ulong": "u64",
    "c_longlong": "i64",
    "c_ulonglong": "u64",
    "c_float": "f32",
    "c_double": "f64",
    "c_byte": "i8",
    "c_ubyte": "u8",
    "c_short": "i16",
}
"""Names of ctypes' types -> scalar types of launch files."""


class Recorder:
    """The launches of this process, each different one once, and how often each ran."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._numbers: dict[str, int] = {}
        self._paused = threading.local()
        self._tuners = threading.local()
        atexit.register(_quietly, self.write_counts)

    def note(self, key: Mapping[str, Any], describe: Callable[[], Mapping[str, Any]]) -> None:
        """Count a launch; ``describe`` gives the whole description the first time."""
        if getattr(self._paused, "depth", 0):
            return
        text = json.dumps(key, sort_keys=True, default=str)
        with self._lock:
            if text in self._counts:
                self._counts[text] += 1
                return
            if len(self._counts) >= MAX_LAUNCHES:
                return
            self._counts[text] = 1
            self._numbers[text] = len(self._numbers)
            number = self._numbers[text]
        self._append({"process": os.getpid(), "number": number, **key, **describe()})

    def write_counts(self) -> None:
        """Append how often each launch ran."""
        with self._lock:
            counts = {self._numbers[text]: count for text, count in self._counts.items()}
        if counts:
            self._append({"process": os.getpid(), "counts": counts})

    def paused(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` without its launches, such as the trials of an autotuner."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._paused.depth = getattr(self._paused, "depth", 0) + 1
            try:
                return function(*args, **kwargs)
            finally:
                self._paused.depth -= 1

        return call

    @property
    def tuner(self) -> Any:
        """The autotuner whose ``run`` launches a kernel in this thread; None if none does."""
        return getattr(self._tuners, "running", None)

    def tuned(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """``run`` of an autotuner, which is :attr:`tuner` meanwhile."""

        @functools.wraps(run)
        def call(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            before, self._tuners.running = self.tuner, tuner
            try:
                return run(tuner, *args, **kwargs)
            finally:
                self._tuners.running = before

        return call

    def _append(self, line: Mapping[str, Any]) -> None:
        # A line of its own also after one that a full disk has cut; readers skip empty lines.
        data = ("\n" + json.dumps(line, default=str) + "\n").encode()
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            # One write, so that the lines of several processes do not mix.
            if os.write(handle, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)
        finally:
            os.close(handle)


def install() -> None:
    """Watch the modules that launch kernels, when the program imports them."""
    path = os.environ.get(FILE_VARIABLE)
    if path:
        recorder = Recorder(path)
        hooks = {
            "triton.runtime.jit": lambda module: _watch_run(module, "JITFunction", recorder),
            "triton.runtime.interpreter": lambda module: _watch_run(
                module, "InterpretedFunction", recorder
            ),
            "triton.runtime.autotuner": lambda module: _watch_autotuner(module, recorder),
            "cuda.bindings.driver": lambda module: _watch_driver(module, recorder),
        }
        sys.meta_path.insert(0, AfterImport(hooks, _PROBLEM))


def _watch_run(module: ModuleType, class_name: str, recorder: Recorder) -> None:
    """Note each call of a kernel's ``run``."""
    kernel_class = getattr(module, class_name)
    run = kernel_class.run

    @functools.wraps(run)
    def noted(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        if not warmup:
            _quietly(_note_triton, recorder, self, args, grid, kwargs)
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    kernel_class.run = noted


def _watch_autotuner(module: ModuleType, recorder: Recorder) -> None:
    """Leave the trials of Triton's autotuner out, and see which autotuner launches a kernel."""
    tuner = module.Autotuner
    tuner._bench = recorder.paused(tuner._bench)
    tuner.run = recorder.tuned(tuner.run)


def _note_triton(
    recorder: Recorder, kernel: Any, args: Sequence[Any], grid: Any, options: Mapping[str, Any]
) -> None:
    function = kernel.fn
    signature = inspect.signature(function)
    keywords = {k: v for k, v in options.items() if k in signature.parameters}
    bound = signature.bind_partial(*args, **keywords)
    bound.apply_defaults()
    values = bound.arguments
    code = function.__code__
    described = [
        _triton_argument(name, values.get(name), _is_constant(parameter))
        for name, parameter in signature.parameters.items()
    ]
    key = {
        "kernel": function.__name__,
        "file": code.co_filename,
        "grid": _sizes(grid, values, {}),
        "num_warps": options.get("num_warps"),
        "num_stages": options.get("num_stages"),
        "options": {name: options[name] for name in _OPTIONS if options.get(name) is not None},
        # The values of scalars are left out: a step counter would make each launch a new one.
        "args": [{k: v for k, v in a.items() if k != "value"} for a in described],
    }
    bounds = {
        name: value for name, value in values.items() if _is_tensor(value) and _needs_bound(value)
    }
    tuner = recorder.tuner
    recorder.note(
        key,
        lambda: {
            "args": [_with_bound(a, bounds.get(a["name"])) for a in described],
            "configurations": quietly(_UNKNOWN, _configurations, tuner, kernel, values, grid) or [],
        },
    )


def _configurations(
    tuner: Any, kernel: Any, values: Mapping[str, Any], grid: Any
) -> list[dict[str, Any]]:
    """The configurations that the autotuner of a launch chose from, each with its grid.

    None are known if a heuristic between autotuner and kernel computes further constants, and of a
    list that the program prunes only those that were timed.
    """
    if tuner is None or tuner.fn is not kernel:
        return []
    is_pruned = tuner.early_config_prune is not None or tuner.perf_model is not None
    listed = list(getattr(tuner, "configs_timings", ())) if is_pruned else tuner.configs
    chosen = getattr(tuner, "best_config", None)
    return [
        {**configuration, "chosen": config == chosen}
        for config in listed
        if (configuration := _configuration(config, values, grid)) is not None
    ]


def _configuration(config: Any, values: Mapping[str, Any], grid: Any) -> dict[str, Any] | None:
    """Constants, options and grid of a configuration; None if a launch file cannot describe it."""
    constants = dict(config.kwargs)
    is_plain = all(isinstance(value, bool | int | float | str) for value in constants.values())
    if config.pre_hook is not None or getattr(config, "ir_override", None) or not is_plain:
        return None
    names = ("num_warps", "num_stages", "num_ctas", "maxnreg")
    options = {name: value for name in names if (value := getattr(config, name, None)) is not None}
    return {"constants": constants, "options": options, "grid": _sizes(grid, values, constants)}


def _sizes(grid: Any, values: Mapping[str, Any], constants: Mapping[str, Any]) -> list[int]:
    """Blocks of a launch in x, y and z."""
    sizes = grid({**values, **constants}) if callable(grid) else grid
    return ([int(size) for size in sizes] + [1, 1])[:3]


def _is_constant(parameter: inspect.Parameter) -> bool:
    """Whether a parameter is annotated as ``tl.constexpr``."""
    annotation = parameter.annotation
    return "constexpr" in (
        annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    )


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "data_ptr") and hasattr(value, "dtype") and hasattr(value, "shape")


def _dtype(value: Any) -> str:
    return str(value.dtype).rpartition(".")[2]


def _triton_argument(name: str, value: Any, constant: bool) -> dict[str, Any]:
    """One argument as a table of a launch file, or why it has none (key ``undescribed``)."""
    if constant:
        if isinstance(value, bool | int | float | str):
            return {"name": name, "constant": value}
        if repr(value).startswith("triton.language."):  # a type
            return {"name": name, "constant": repr(value).replace("triton.language", "tl")}
        return {"name": name, "undescribed": f"a constant of type {type(value).__name__}"}
    if isinstance(value, bool):
        return {"name": name, "undescribed": "a bool"}
    if isinstance(value, int):
        kind = "i32" if -(2**31) <= value < 2**31 else ("i64" if value < 2**63 else "u64")
        return {"name": name, "dtype": kind, "value": value}
    if isinstance(value, float):
        return {"name": name, "dtype": "f32", "value": value}
    if not _is_tensor(value):
        return {"name": name, "undescribed": f"a {type(value).__name__}"}
    dtype = _DTYPES.get(_dtype(value))
    if dtype is None:
        return {"name": name, "undescribed": f"a tensor of {_dtype(value)}"}
    shape = _storage_shape(value)
    if not all(shape):
        return {"name": name, "undescribed": "an empty tensor"}
    return {"name": name, "dtype": dtype, "shape": shape, "role": "inout"}


def _storage_shape(tensor: Any) -> list[int]:
    """The shape; for a tensor with gaps, the elements from its first one to the memory's end."""
    shape = [int(size) for size in tensor.shape] or [1]
    if not hasattr(tensor, "is_contiguous") or tensor.is_contiguous():
        return shape
    storage = tensor.untyped_storage().nbytes() // tensor.element_size()
    return [int(storage - tensor.storage_offset())]


def _needs_bound(tensor: Any) -> bool:
    return _DTYPES.get(_dtype(tensor), "")[:1] in ("i", "u")


def _with_bound(argument: dict[str, Any], tensor: Any) -> dict[str, Any]:
    """An integer buffer with a bound above its largest value; 1 if that cannot be read."""
    if tensor is None or "undescribed" in argument:
        return argument
    bound = 1
    if not _is_capturing():
        try:
            bound = max(1, int(tensor.max()) + 1)
        except Exception:  # such as an operator that the dtype lacks
            bound = 1
    return {**argument, "bound": bound}


def _is_capturing() -> bool:
    """Whether a CUDA graph is being captured, which a read of a value would break."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    return bool(cuda is not None and cuda.is_available() and cuda.is_current_stream_capturing())


def _watch_driver(module: ModuleType, recorder: Recorder) -> None:
    """Note each call of ``cuLaunchKernel``."""
    launch: Callable[..., Any] = module.cuLaunchKernel

    @functools.wraps(launch)
    def noted(*args: Any) -> Any:
        _quietly(_note_driver, recorder, module, args)
        return launch(*args)

    module.cuLaunchKernel = noted  # type: ignore[attr-defined]


def _note_driver(recorder: Recorder, driver: Any, args: Sequence[Any]) -> None:
    function, *sizes = args[:8]
    parameters = args[9] if len(args) > 9 else None
    status, name = driver.cuFuncGetName(function)
    text = name.decode() if isinstance(name, bytes) else str(name)
    described = _driver_arguments(driver, parameters)
    key = {
        "kernel": text if int(status) == 0 else "unknown",
        "file": None,
        "grid": [int(size) for size in sizes[:3]],
        "block": [int(size) for size in sizes[3:6]],
        "shared": int(sizes[6]),
        "args": [{k: v for k, v in a.items() if k != "value"} for a in described],
    }
    recorder.note(key, lambda: {"args": described})


def _driver_arguments(driver: Any, parameters: Any) -> list[dict[str, Any]]:
    """The arguments of a launch that passes ``(values, types)``; other forms are not read."""
    if not (isinstance(parameters, tuple) and len(parameters) == 2):
        return []
    arguments = []
    for number, (value, kind) in enumerate(zip(*parameters, strict=False)):
        name, type_name = f"p{number}", getattr(kind, "__name__", "")
        if type_name in _C_TYPES:
            arguments.append({"name": name, "dtype": _C_TYPES[type_name], "value": value})
        elif type_name == "c_void_p":
            arguments.append(_driver_buffer(driver, name, int(value)))
        else:
            arguments.append({"name": name, "undescribed": type_name or type(value).__name__})
    return arguments


def _driver_buffer(driver: Any, name: str, address: int) -> dict[str, Any]:
    """A buffer from an address to the end of its allocation, as bytes."""
    status, base, size = driver.cuMemGetAddressRange(address)
    if int(status) != 0:
        return {"name": name, "undescribed": "an address that is no allocation of the GPU"}
    count = int(base) + int(size) - address
    return {"name": name, "dtype": "u8", "shape": [count], "role": "inout", "bound": 256}
