"""Where a kernel comes from: a Triton function compiled for an architecture, or a cubin file.

Both give a :class:`Source`: the bytes to optimise, the entry symbol, how it is launched and what
made it.  No GPU is needed for either.
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
from nostall.core.launch import Buffer, Constant, LaunchSpec, LaunchVariant, Scalar
from nostall.core.versions import TRITON_VERSIONS, supports_triton
from nostall.sass.binary import fatbin
from nostall.sass.binary.cubin import Cubin, check_architecture
from nostall.tuning.kernel_file import imported, jit_function, launch_in, root_cause
from nostall.tuning.triton_target import told

TRITON_TYPES = {
    "f16": "fp16",
    "bf16": "bf16",
    "f32": "fp32",
    "f64": "fp64",
    "f8e4m3": "fp8e4nv",
    "f8e5m2": "fp8e5",
    **{name: name for name in ("i8", "i16", "i32", "i64", "u8", "u32", "u64")},
}
INTEGERS = frozenset(("i8", "i16", "i32", "i64", "u8", "u32", "u64"))
# Bytes of shared memory that one block may use, by compute capability.
_SHARED_LIMIT = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}


@dataclass(frozen=True)
class Source:
    """One compiled kernel.

    ``launch`` is what the *compiled* kernel takes: ``block``, ``shared`` and ``cluster`` follow
    from the compilation, values that the compiler folded in are :class:`Constant`, and the two
    scratch pointers that Triton appends to every kernel are there as the last arguments.
    ``ptx`` is what the cubin was assembled from, where Triton made it.
    """

    cubin: bytes = field(repr=False)
    kernel: str
    launch: LaunchSpec | None
    origin: str
    provenance: Mapping[str, str]
    ptx: str | None = field(default=None, repr=False)


def load_cubin(
    path: Path,
    kernel: str | None = None,
    launch: LaunchSpec | None = None,
    arch: str | None = None,
) -> Source:
    """Read a cubin, or the cubin for ``arch`` of a fatbin or a host object.

    ``kernel`` and ``arch`` are needed where the file holds more than one.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadInput(
            f"cannot read cubin {path}: {error.strerror}; give the path of a .cubin file"
        ) from error
    contained = fatbin.is_container(data)
    try:
        data = fatbin.extract(data, arch, kernel)
        cubin = Cubin.parse(data)
    except BadInput as error:
        raise type(error)(f"{path}: {error}") from error
    names = [text.name for text in cubin.texts if text.is_kernel]
    if kernel is None:
        if len(names) != 1:
            raise BadInput(
                f"{path} holds {len(names)} kernels; name one of: {', '.join(names) or '(none)'}"
            )
        kernel = names[0]
    elif kernel not in names:
        raise BadInput(f"{path} has no kernel {kernel!r}; it holds: {', '.join(names) or '(none)'}")
    container = "fatbin file" if contained else "cubin file"
    provenance = {"compiler": container, "arch": f"sm_{cubin.sm}"}
    return Source(data, kernel, launch, str(path), MappingProxyType(provenance))


def compile_triton(
    path: Path,
    name: str,
    launch: LaunchSpec | None = None,
    arch: str = "sm_90",
    *,
    options: Mapping[str, object] | None = None,
) -> Source:
    """Compile the ``@triton.jit`` function ``name`` of the file ``path`` for ``arch``.

    ``name`` is ``kernel`` or ``kernel@variant``; without ``launch`` the file's own table
    ``LAUNCHES[name]`` is used.  Argument types and values are specialised as Triton's own launcher
    does, so the bytes are those that a call with such arguments runs.  ``options`` are further
    compile options of Triton (``maxnreg``, ``num_ctas`` ...).
    """
    triton = _triton()
    capability = capability_of(arch)
    path = Path(path).absolute()
    function_name = name.partition("@")[0]
    what = f"{path.name}:{name} for {arch}"
    with imported(path) as module:
        function = jit_function(triton, module, path, function_name)
        launch = launch_in(module, path, name) if launch is None else launch
        args = _in_kernel_order(function, launch, f"{path.name}:{name}")
        chosen = {
            "num_warps": launch.num_warps,
            "num_stages": launch.num_stages,
            "debug": bool(function.debug or triton.knobs.runtime.debug),
            "instrumentation_mode": triton.knobs.compilation.instrumentation_mode,
            "enable_fp_fusion": triton.knobs.language.default_fp_fusion,
            **(options or {}),
        }
        special = _specialised(function, args, what)
        compiled = _compile(triton, function, special, capability, chosen, what)
    metadata = compiled.metadata
    limit = _SHARED_LIMIT.get(capability, 227) * 1024
    if metadata.shared > limit:
        raise BadLaunch(
            f"{what} needs {metadata.shared} bytes of shared memory; {arch} allows {limit}; "
            f"use smaller tiles or fewer than {launch.num_stages} stages"
        )
    return Source(
        cubin=bytes(compiled.asm["cubin"]),
        kernel=str(metadata.name),
        launch=resolved(launch, args, special.constants, metadata),
        origin=f"{path}:{name}",
        provenance=MappingProxyType(
            {
                "compiler": f"triton {triton.__version__}",
                "ptxas": _ptxas_version(capability),
                "arch": arch,
                "options": ", ".join(f"{key}={value}" for key, value in sorted(chosen.items())),
            }
        ),
        ptx=str(compiled.asm["ptx"]),
    )


def launch_of(path: Path, name: str) -> LaunchSpec:
    """The launch that the file's own table ``LAUNCHES`` has for ``name``."""
    path = Path(path).absolute()
    with imported(path) as module:
        return launch_in(module, path, name)


# -- Triton ----------------------------------------------------------------------------------------


def _triton() -> Any:
    """The installed Triton, if it is one that nostall knows."""
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


def capability_of(arch: str) -> int:
    """90 of ``sm_90`` or ``sm_90a``.  Raises :class:`BadInput` for what is none, and
    :class:`UnsupportedArchitecture` before a compiler is asked for one that it does not know."""
    match = re.fullmatch(r"sm_(\d{2,3})[af]?", arch)
    if match is None:
        raise BadInput(f"architecture {arch!r} is not understood; write it as sm_80, sm_90, ...")
    sm = int(match.group(1))
    check_architecture(sm, "kernels cannot be tuned for")
    return sm


def _ptxas_version(capability: int) -> str:
    from triton.backends.nvidia.compiler import get_ptxas_version

    found = re.search(r"V(\d+\.\d+\.\d+)", str(get_ptxas_version(capability)))
    return found.group(1) if found else "unknown"


def _compile(
    triton: Any,
    function: Any,
    special: _Specialisation,
    capability: int,
    options: Mapping[str, object],
    what: str,
) -> Any:
    """Run Triton's compiler without touching the user's cache."""
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
        try:
            with contextlib.redirect_stdout(io.StringIO()), told(triton.runtime.driver, target):
                return triton.compile(
                    AstSource(function, *special),
                    target=target,
                    options=dict(options),
                )
        except Exception as error:  # Triton raises many kinds; all mean that it did not compile
            raise BadInput(
                f"Triton {triton.__version__} cannot compile {what}: {root_cause(error)}; "
                "correct the kernel or its arguments, or choose another architecture"
            ) from error


class _Specialisation(NamedTuple):
    """The three things that define a compilation besides the function and the options."""

    signature: dict[str, str]
    constants: dict[str, object]
    attributes: dict[tuple[int, ...], list[list[object]]]


def _specialised(
    function: Any, args: Mapping[str, Buffer | Scalar | Constant], what: str
) -> _Specialisation:
    """What Triton's launcher would derive from a call with these arguments."""
    signature, constants, attributes = special = _Specialisation({}, {}, {})
    for parameter in function.params:
        name, value = parameter.name, args.get(parameter.name)
        fixed = bool(parameter.do_not_specialize)
        alignable = not fixed and not parameter.do_not_specialize_on_alignment
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
                    f"{what}: scalar {name!r} is {value.dtype} ({kind}), the kernel annotates it "
                    f"as {annotated}; give it that type"
                )
            signature[name] = kind
            if value.dtype not in INTEGERS or fixed:
                continue
            if value.value == 1:
                if not annotated:
                    signature[name], constants[name] = "constexpr", 1
            elif alignable and value.value % 16 == 0:
                attributes[(parameter.num,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "constexpr"
            constants[name] = parameter.default if value is None else value.constant
    return special


def _in_kernel_order(
    function: Any, launch: LaunchSpec, what: str
) -> dict[str, Buffer | Scalar | Constant]:
    """The launch's arguments by the kernel's parameters; every mismatch is an error."""
    given = {arg.name: arg for arg in launch.args}
    parameters = {parameter.name: parameter for parameter in function.params}
    takes = f"the kernel takes: {', '.join(parameters)}"
    if len(given) != len(launch.args):
        twice = sorted(
            {a.name for a in launch.args if sum(b.name == a.name for b in launch.args) > 1}
        )
        raise BadLaunch(f"{what}: arguments given twice: {', '.join(twice)}; {takes}")
    if unknown := [name for name in given if name not in parameters]:
        raise BadLaunch(f"{what}: arguments that the kernel lacks: {', '.join(unknown)}; {takes}")
    missing = [
        n
        for n, p in parameters.items()
        if n not in given and not (p.is_constexpr and p.has_default)
    ]
    if missing:
        raise BadLaunch(f"{what}: arguments not given: {', '.join(missing)}; {takes}")
    for name, arg in given.items():
        if parameters[name].is_constexpr and not isinstance(arg, Constant):
            raise BadLaunch(
                f"{what}: {name!r} is tl.constexpr but given as a {type(arg).__name__.lower()}; "
                "give it as a constant"
            )
        if isinstance(arg, Constant) and not parameters[name].is_constexpr:
            raise BadLaunch(
                f"{what}: {name!r} is given as a constant but is not tl.constexpr in the kernel; "
                "give it as a buffer or a scalar"
            )
    return {name: given[name] for name in parameters if name in given}


def resolved(
    launch: LaunchSpec,
    args: Mapping[str, Buffer | Scalar | Constant],
    constants: Mapping[str, object],
    metadata: Any,
) -> LaunchSpec:
    """The launch of the compiled kernel; see :class:`Source`."""
    clusters = int(getattr(metadata, "num_ctas", 1))
    passed: list[Buffer | Scalar | Constant] = [
        Constant(name=arg.name, constant=1)
        if isinstance(arg, Scalar) and arg.name in constants
        else arg
        for arg in args.values()
    ]
    shapes = tuple(
        _other(shape, launch, args, constants.keys(), clusters) for shape in launch.shapes
    )
    blocks = max([launch.blocks, *(launch.with_variant(shape).blocks for shape in launch.shapes)])
    for kind in ("global", "profile"):
        size = int(getattr(metadata, f"{kind}_scratch_size", 0) or 0)
        name = f"{kind}_scratch"
        if size:
            count = blocks * clusters * size
            passed.append(Buffer(name=name, dtype="u8", shape=(count,), role="scratch"))
        else:
            passed.append(Scalar(name=name, dtype="u64", value=0))
    x, y, z = launch.grid
    return launch.model_copy(
        update={
            "args": tuple(passed),
            "grid": (x * clusters, y, z),
            "block": (32 * int(metadata.num_warps), 1, 1),
            "cluster": (clusters, 1, 1),
            "shared": int(metadata.shared),
            "shapes": shapes,
        }
    )


def _other(
    shape: LaunchVariant,
    launch: LaunchSpec,
    args: Mapping[str, Buffer | Scalar | Constant],
    constants: Set[str],
    clusters: int,
) -> LaunchVariant:
    """A further shape of the compiled kernel.  Raises :class:`BadLaunch` for a value that the
    compiled code does not allow: Triton specialises on 1 and on multiples of 16."""
    for name, value in shape.values.items():
        known = args[name]
        if not isinstance(known, Scalar) or known.dtype.startswith("f"):
            continue
        was = known.value
        if (was == 1) != (value == 1) or (was % 16 == 0 and value % 16 != 0):
            raise BadLaunch(
                f"shapes give {name} = {value}, but the kernel is compiled for {name} = {was} (1 "
                "and multiples of 16 are compiled in); give a value of the same kind"
            )
    x, y, z = shape.grid or launch.grid
    passed = {name: value for name, value in shape.values.items() if name not in constants}
    return shape.model_copy(update={"grid": (x * clusters, y, z), "values": passed})
