"""Compilation of a Triton function for an architecture, without a GPU."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from nostall.core.errors import BadInput, BadLaunch, MissingPart
from nostall.core.launch import Buffer, Constant, LaunchSpec, Opaque, Scalar
from nostall.core.versions import TRITON_VERSIONS, supports_triton
from nostall.tuning.sources.compiled_launch import Argument, compiled_launch
from nostall.tuning.sources.kernel_file import (
    find_jit_function,
    find_launch,
    import_file,
    root_cause,
)
from nostall.tuning.sources.source import Source, compute_capability

_LOCK = threading.Lock()
"""Held while the driver is replaced, because all threads share it."""


@contextlib.contextmanager
def pretend_target(driver: Any, target: Any) -> Iterator[None]:
    """Let kernels that are compiled in this context see ``target`` as the current target.

    ``driver`` is ``triton.runtime.driver``.  Without this context, ``tl.target_info`` reports the
    present GPU, or fails without one.  If the present GPU has that target, nothing is replaced.
    """
    with _LOCK:
        if driver._active is None and "torch" not in sys.modules:
            # Triton looks for a GPU by importing PyTorch, which takes seconds and is seldom needed.
            with _replaced(driver, None, _LazyTargetDriver(target, driver)):
                yield
            return
        active = _active_driver(driver)
        if active is None or active.get_current_target() != target:
            with _replaced(driver, active, _TargetDriver(target, active)):
                yield
            return
    yield


@contextlib.contextmanager
def pretend_device(driver: Any, target: Any, device: str) -> Iterator[None]:
    """Let launches that only compile see ``target`` as the target of a device named ``device``.

    Triton keeps what it compiles by the device, so nothing is mixed with kernels of a present GPU.
    """
    with _LOCK:
        active = _active_driver(driver)
        with _replaced(driver, active, _CompilingDriver(target, active, device)):
            yield


@contextlib.contextmanager
def _replaced(driver: Any, active: Any, other: Any) -> Iterator[None]:
    driver.set_active(other)
    try:
        yield
    finally:
        driver._active = active


def _active_driver(driver: Any) -> Any:
    """The driver of the present GPU, or None without a GPU."""
    try:
        return driver.active
    except RuntimeError:  # raised by Triton if there is no active driver
        return None


@dataclass(frozen=True)
class _TargetDriver:
    """A driver with another target; all other attributes are those of the present GPU's driver."""

    target: Any
    real: Any

    def get_current_target(self) -> Any:
        return self.target

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


@dataclass(frozen=True)
class _LazyTargetDriver:
    """As :class:`_TargetDriver`, but a present GPU is looked for when an attribute is read."""

    target: Any
    config: Any
    """``triton.runtime.driver``."""

    def get_current_target(self) -> Any:
        return self.target

    def __getattr__(self, name: str) -> Any:
        try:
            real = self.config.default
        except RuntimeError:  # raised by Triton if there is no active driver
            real = None
        return getattr(real, name)


@dataclass(frozen=True)
class _CompilingDriver(_TargetDriver):
    """A driver of a device that compiles, and launches nothing."""

    device: str

    def get_current_device(self) -> str:
        return self.device

    def get_current_stream(self, device: str) -> int:
        return 0


TRITON_TYPES = {
    "f16": "fp16",
    "bf16": "bf16",
    "f32": "fp32",
    "f64": "fp64",
    "f8e4m3": "fp8e4nv",
    "f8e5m2": "fp8e5",
    **{name: name for name in ("i8", "i16", "i32", "i64", "u8", "u32", "u64")},
}
"""Triton's names of the data types of a launch."""
INTEGERS = frozenset(("i8", "i16", "i32", "i64", "u8", "u32", "u64"))
_SHARED_LIMIT_KIB = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Shared memory that one block may use, by compute capability."""


def compile_triton(
    path: Path,
    name: str,
    launch: LaunchSpec | None = None,
    arch: str = "sm_90",
    *,
    options: Mapping[str, object] | None = None,
) -> Source:
    """Compile the ``@triton.jit`` function ``name`` of the file ``path`` for ``arch``.

    ``name`` is ``kernel`` or ``kernel@variant``.  Without ``launch``, the entry ``LAUNCHES[name]``
    of the file is used.  Argument types and values are specialized as Triton's launcher does, so
    the cubin is the one that a call with such arguments runs.  ``options`` are further compile
    options of Triton (``maxnreg``, ``num_ctas`` ...).  Raises :class:`BadInput` if the kernel does
    not compile, :class:`BadLaunch` if the launch does not fit the kernel or the architecture, and
    :class:`MissingPart` without a supported Triton.
    """
    triton = import_triton()
    capability = compute_capability(arch)
    path = Path(path).absolute()
    function_name = name.partition("@")[0]
    label = f"{path.name}:{name} for {arch}"
    with import_file(path) as module:
        function = find_jit_function(triton, module, path, function_name)
        launch = find_launch(module, path, name) if launch is None else launch
        args = _match_arguments(function, launch, f"{path.name}:{name}")
        compile_options = {
            "num_warps": launch.num_warps,
            "num_stages": launch.num_stages,
            "debug": bool(function.debug or triton.knobs.runtime.debug),
            "instrumentation_mode": triton.knobs.compilation.instrumentation_mode,
            "enable_fp_fusion": triton.knobs.language.default_fp_fusion,
            **(options or {}),
        }
        specialization = _specialize(function, args, label)
        compiled = _compile(triton, function, specialization, capability, compile_options, label)
    metadata = compiled.metadata
    limit = _SHARED_LIMIT_KIB.get(capability, 227) * 1024
    if metadata.shared > limit:
        raise BadLaunch(
            f"{label} needs {metadata.shared} bytes of shared memory; {arch} allows {limit}; "
            f"use smaller tiles or fewer than {launch.num_stages} stages"
        )
    return Source(
        cubin=bytes(compiled.asm["cubin"]),
        kernel=str(metadata.name),
        launch=compiled_launch(launch, args, specialization.constants, metadata),
        origin=f"{path}:{name}",
        provenance=MappingProxyType(
            {
                "compiler": f"triton {triton.__version__}",
                "ptxas": _ptxas_version(capability),
                "arch": arch,
                "options": ", ".join(f"{k}={v}" for k, v in sorted(compile_options.items())),
            }
        ),
        ptx=str(compiled.asm["ptx"]),
    )


def load_launch(path: Path, name: str) -> LaunchSpec:
    """The entry ``LAUNCHES[name]`` of a Python file."""
    path = Path(path).absolute()
    with import_file(path) as module:
        return find_launch(module, path, name)


def import_triton() -> Any:
    """Import Triton.  Raises :class:`MissingPart` if it is missing or of an unsupported version."""
    allowed = f"{TRITON_VERSIONS[0]} to {TRITON_VERSIONS[-1]}"
    try:
        import triton
        import triton.compiler
    except ImportError as error:
        raise MissingPart(
            f"Triton cannot be imported ({error}); compiling a kernel from Python needs Triton "
            f"{allowed}: pip install 'nostall[triton]'"
        ) from error
    version = str(getattr(triton, "__version__", "unknown"))
    if not supports_triton(version):
        raise MissingPart(
            f"Triton {version} is not supported; nostall works with {allowed}: "
            "pip install 'nostall[triton]'"
        )
    return triton


def _ptxas_version(capability: int) -> str:
    from triton.backends.nvidia.compiler import get_ptxas_version

    match = re.search(r"V(\d+\.\d+\.\d+)", str(get_ptxas_version(capability)))
    return match.group(1) if match else "unknown"


def _compile(
    triton: Any,
    function: Any,
    specialization: _Specialization,
    capability: int,
    options: Mapping[str, object],
    label: str,
) -> Any:
    """Run Triton's compiler with a temporary cache, so that the user's cache is not touched."""
    from triton.backends.compiler import GPUTarget

    if function.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as AstSource
    else:
        from triton.compiler import ASTSource as AstSource
    target = GPUTarget("cuda", capability, 32)
    knobs = triton.knobs
    with tempfile.TemporaryDirectory(prefix="nostall-") as cache, knobs.cache.scope():
        knobs.cache.dir = cache
        knobs.cache.manager_class = None
        knobs.cache.remote_manager_class = None
        pretended = pretend_target(triton.runtime.driver, target)
        try:
            with contextlib.redirect_stdout(io.StringIO()), pretended:
                return triton.compile(
                    AstSource(function, *specialization),
                    target=target,
                    options=dict(options),
                )
        except Exception as error:  # Triton raises many types; all mean that it did not compile
            raise BadInput(
                f"Triton {triton.__version__} cannot compile {label}: {root_cause(error)}; "
                "correct the kernel or its arguments, or choose another architecture"
            ) from error


class _Specialization(NamedTuple):
    """Specialization of a kernel on the arguments of a launch, in the form of ``ASTSource``."""

    signature: dict[str, str]
    """Type of each parameter."""
    constants: dict[str, object]
    """Values of the parameters that are compiled in."""
    attributes: dict[tuple[int, ...], list[list[object]]]
    """Divisibility by 16, by position of the parameter."""


def _specialize(function: Any, args: Mapping[str, Argument], label: str) -> _Specialization:
    """Specialize a kernel as Triton's launcher does for a call with these arguments."""
    signature, constants, attributes = specialization = _Specialization({}, {}, {})
    for parameter in function.params:
        name, value = parameter.name, args.get(parameter.name)
        generic = bool(parameter.do_not_specialize)
        alignable = not generic and not parameter.do_not_specialize_on_alignment
        if isinstance(value, Buffer):
            const = "k" if parameter.is_const else ""
            signature[name] = f"*{const}{TRITON_TYPES[value.dtype]}"
            if alignable:
                attributes[(parameter.num,)] = [["tt.divisibility", 16]]
        elif isinstance(value, Scalar):
            kind = TRITON_TYPES[value.dtype]
            annotated = parameter.annotation_type
            if annotated and annotated != kind:
                raise BadLaunch(
                    f"{label}: scalar {name!r} is {value.dtype} ({kind}), but the kernel declares "
                    f"{annotated}; give it that type"
                )
            signature[name] = kind
            if value.dtype not in INTEGERS or generic:
                continue
            if value.value == 1:
                if not annotated:
                    signature[name], constants[name] = "constexpr", 1
            elif alignable and value.value % 16 == 0:
                attributes[(parameter.num,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "constexpr"
            assert value is None or isinstance(value, Constant)  # _match_arguments checks it
            constants[name] = parameter.default if value is None else _constant(value.constant)
    return specialization


def _constant(value: object) -> object:
    """A constant of a launch; text such as ``tl.float32`` is Triton's type."""
    import triton.language as tl

    if not isinstance(value, str) or not value.startswith("tl."):
        return value
    named = getattr(tl, value.removeprefix("tl."), None)
    return named if isinstance(named, tl.dtype) else value


def _match_arguments(function: Any, launch: LaunchSpec, label: str) -> dict[str, Argument]:
    """The arguments of a launch in the order of the kernel's parameters.

    Raises :class:`BadLaunch` for missing, unknown and duplicate arguments, and for a constant that
    is not ``tl.constexpr`` or the reverse.
    """
    args = {arg.name: arg for arg in launch.args}
    parameters = {parameter.name: parameter for parameter in function.params}
    accepted = f"the kernel takes: {', '.join(parameters)}"
    if len(args) != len(launch.args):
        names = [arg.name for arg in launch.args]
        duplicates = sorted({name for name in names if names.count(name) > 1})
        raise BadLaunch(f"{label}: arguments given twice: {', '.join(duplicates)}; {accepted}")
    if unknown := [name for name in args if name not in parameters]:
        raise BadLaunch(
            f"{label}: arguments that the kernel lacks: {', '.join(unknown)}; {accepted}"
        )
    missing = [
        n for n, p in parameters.items() if n not in args and not (p.is_constexpr and p.has_default)
    ]
    if missing:
        raise BadLaunch(f"{label}: missing arguments: {', '.join(missing)}; {accepted}")
    for name, arg in args.items():
        if isinstance(arg, Opaque):
            raise BadLaunch(
                f"{label}: {name!r} is given as bytes; a Triton kernel takes buffers, scalars and "
                "constants"
            )
        if parameters[name].is_constexpr and not isinstance(arg, Constant):
            raise BadLaunch(
                f"{label}: {name!r} is tl.constexpr but given as a {type(arg).__name__.lower()}; "
                "give it as a constant"
            )
        if isinstance(arg, Constant) and not parameters[name].is_constexpr:
            raise BadLaunch(
                f"{label}: {name!r} is given as a constant but is not tl.constexpr in the kernel; "
                "give it as a buffer or a scalar"
            )
    return {name: args[name] for name in parameters if name in args}
