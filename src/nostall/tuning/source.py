"""Sources of kernels: compile a Triton function for an architecture, or read a cubin file.

Both give a :class:`Source`: the cubin, the kernel's symbol, its launch and its provenance.  No GPU
is needed.
"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from nostall.core.errors import BadInput, BadLaunch, MissingPart
from nostall.core.launch import Buffer, Constant, LaunchSpec, LaunchVariant, Opaque, Scalar
from nostall.core.suggest import did_you_mean, listed, unknown
from nostall.core.versions import TRITON_VERSIONS, supports_triton
from nostall.sass.binary import fatbin
from nostall.sass.binary.cubin import ARCHITECTURE_NAMES, Cubin, check_architecture
from nostall.tuning.kernel_file import find_jit_function, find_launch, import_file, root_cause
from nostall.tuning.triton_target import pretend_target

Argument = Buffer | Scalar | Constant | Opaque

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


@dataclass(frozen=True)
class Source:
    """One compiled kernel."""

    cubin: bytes = field(repr=False)
    kernel: str
    """Symbol of the kernel in the cubin."""
    launch: LaunchSpec | None
    """Launch of the *compiled* kernel, or None if unknown.  For a Triton kernel, ``block``,
    ``shared`` and ``cluster`` follow from the compilation, values that the compiler folded in are
    :class:`Constant`, and the last two arguments are the scratch pointers that Triton appends to
    every kernel."""
    origin: str
    """File, or file and function, for messages."""
    provenance: Mapping[str, str]
    """Compiler, architecture and compile options."""
    ptx: str | None = field(default=None, repr=False)
    """PTX that the cubin was assembled from; None for a cubin file."""


def load_cubin(
    path: Path,
    kernel: str | None = None,
    launch: LaunchSpec | None = None,
    arch: str | None = None,
) -> Source:
    """Read a cubin, or the cubin for ``arch`` of a fatbin or a host object.

    ``kernel`` and ``arch`` are needed if the file holds several kernels or several images.  Raises
    :class:`BadInput` if the file cannot be read or does not have the kernel.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadInput(
            f"cannot read cubin {path}: {error.strerror}; give the path of a .cubin file"
        ) from error
    is_container = fatbin.is_container(data)
    try:
        data = fatbin.extract(data, arch, kernel)
        cubin = Cubin.parse(data)
    except BadInput as error:
        raise type(error)(f"{path}: {error}") from error
    check_requested_arch(cubin.sm, arch, path)
    names = [text.name for text in cubin.texts if text.is_kernel]
    if kernel is None:
        if len(names) != 1:
            raise BadInput(f"{path} holds {len(names)} kernels; name one of: {listed(names)}")
        kernel = names[0]
    elif kernel not in names:
        raise BadInput(
            f"{path} has no kernel {kernel!r}; it holds: {listed(names)}"
            f"{did_you_mean(kernel, names)}"
        )
    file_kind = "fatbin file" if is_container else "cubin file"
    provenance = {"compiler": file_kind, "arch": f"sm_{cubin.sm}"}
    return Source(data, kernel, launch, str(path), MappingProxyType(provenance))


def check_requested_arch(sm: int, arch: str | None, path: Path) -> None:
    """Raise :class:`BadInput` if a cubin for ``sm`` is not for the architecture ``arch``."""
    if arch is not None and compute_capability(arch) != sm:
        raise BadInput(
            f"{path} is for sm_{sm}, and --arch is {arch}; a cubin runs on its own architecture "
            "only: leave --arch out, or give a file for that architecture"
        )


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


def compute_capability(arch: str) -> int:
    """The compute capability of an architecture: 90 for ``sm_90`` and ``sm_90a``.

    Raises :class:`BadInput` for other texts, and :class:`UnsupportedArchitecture` for an
    architecture that nostall does not support (LLVM ends the process for some of them).
    """
    match = re.fullmatch(r"sm_(\d{2,3})[af]?", arch)
    if match is None:
        raise BadInput(unknown("architecture", arch, ARCHITECTURE_NAMES))
    sm = int(match.group(1))
    check_architecture(sm, "kernels cannot be tuned for")
    return sm


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
            constants[name] = parameter.default if value is None else value.constant
    return specialization


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


def compiled_launch(
    launch: LaunchSpec,
    args: Mapping[str, Argument],
    constants: Mapping[str, object],
    metadata: Any,
) -> LaunchSpec:
    """The launch of a compiled kernel, as described at :attr:`Source.launch`.

    ``launch`` and ``args`` are those of the source, ``constants`` the values that are compiled in,
    and ``metadata`` is Triton's metadata of the compiled kernel.
    """
    cluster_size = int(getattr(metadata, "num_ctas", 1))
    passed: list[Argument] = [
        Constant(name=arg.name, constant=1)
        if isinstance(arg, Scalar) and arg.name in constants
        else arg
        for arg in args.values()
    ]
    shapes = tuple(
        _compiled_variant(variant, launch, args, constants.keys(), cluster_size)
        for variant in launch.shapes
    )
    blocks = max([launch.blocks, *(launch.with_variant(shape).blocks for shape in launch.shapes)])
    for kind in ("global", "profile"):
        size = int(getattr(metadata, f"{kind}_scratch_size", 0) or 0)
        name = f"{kind}_scratch"
        if size:
            count = blocks * cluster_size * size
            passed.append(Buffer(name=name, dtype="u8", shape=(count,), role="scratch"))
        else:
            passed.append(Scalar(name=name, dtype="u64", value=0))
    x, y, z = launch.grid
    return launch.model_copy(
        update={
            "args": tuple(passed),
            "grid": (x * cluster_size, y, z),
            "block": (32 * int(metadata.num_warps), 1, 1),
            "cluster": (cluster_size, 1, 1),
            "shared": int(metadata.shared),
            "shapes": shapes,
        }
    )


def _compiled_variant(
    variant: LaunchVariant,
    launch: LaunchSpec,
    args: Mapping[str, Argument],
    constants: Set[str],
    cluster_size: int,
) -> LaunchVariant:
    """A launch variant of the compiled kernel.

    Raises :class:`BadLaunch` for a value that the compiled code does not allow: Triton specializes
    on 1 and on multiples of 16.
    """
    for name, value in variant.values.items():
        arg = args[name]
        if not isinstance(arg, Scalar) or arg.dtype.startswith("f"):
            continue
        compiled = arg.value
        if (compiled == 1) != (value == 1) or (compiled % 16 == 0 and value % 16 != 0):
            raise BadLaunch(
                f"shapes give {name} = {value}, but the kernel is compiled for {name} = {compiled} "
                "(1 and multiples of 16 are compiled in); give a value of the same kind"
            )
    x, y, z = variant.grid or launch.grid
    passed = {name: value for name, value in variant.values.items() if name not in constants}
    return variant.model_copy(update={"grid": (x * cluster_size, y, z), "values": passed})
