"""``nostall.load``: load a cubin, or its optimised replacement, for cuda.core, CuPy or as bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, overload

from nostall.attach.process_folder import process_folder
from nostall.attach.store_lookup import find_replacement
from nostall.core.errors import BadInput, MissingPart
from nostall.core.text.suggest import did_you_mean, listed
from nostall.sass.binary import fatbin
from nostall.sass.binary.cubin import Cubin
from nostall.store.artefacts import Artefacts

Host = Literal["cuda.core", "cupy", "bytes"]


@overload
def load(
    source: str | Path | bytes,
    kernel: str | None = None,
    *,
    to: Literal["bytes"],
    arch: str | None = None,
    gpu: str | None = None,
    modelled: bool = False,
) -> bytes: ...


@overload
def load(
    source: str | Path | bytes,
    kernel: str | None = None,
    *,
    to: Literal["cuda.core", "cupy"] = "cuda.core",
    arch: str | None = None,
    gpu: str | None = None,
    modelled: bool = False,
) -> Any: ...


def load(
    source: str | Path | bytes,
    kernel: str | None = None,
    *,
    to: Host = "cuda.core",
    arch: str | None = None,
    gpu: str | None = None,
    modelled: bool = False,
) -> Any:
    """Load the optimised replacement of a cubin, or the original if the store has none.

    Launch the result exactly as the original.

    ``source``: the path of a cubin or fatbin, or its content.
    ``kernel``: name of the kernel; may be omitted if there is only one.
    ``to``: type of the result: ``"cuda.core"`` a kernel of ``cuda.core``, ``"cupy"`` a
    ``cupy.RawModule``, ``"bytes"`` the cubin itself.
    ``arch``: architecture of the image to choose from a fatbin.
    ``gpu``: name of the GPU; by default that of the current CUDA context.
    ``modelled``: also allow replacements whose gain was never measured.

    Raises :class:`BadInput` if ``source`` is not a cubin or lacks the kernel, and
    :class:`MissingPart` if the package for ``to`` is not installed.
    """
    if to not in ("cuda.core", "cupy", "bytes"):
        raise BadInput(f"to is {to!r}; allowed are 'cuda.core', 'cupy' and 'bytes'")
    original = _read_cubin(source, arch, kernel)
    cubin = Cubin.parse(original)
    names = [text.name for text in cubin.texts if text.is_kernel]
    if kernel is not None and kernel not in names:
        raise BadInput(
            f"there is no kernel {kernel!r} in this cubin; it holds: {listed(names)}"
            f"{did_you_mean(kernel, names)}"
        )
    replacement = find_replacement(
        original,
        f"load {to}",
        architecture=f"sm_{cubin.sm}",
        gpu=gpu,
        kernel=kernel,
        modelled=modelled,
    )
    data = replacement.data if replacement is not None else original
    if to == "bytes":
        return data
    if to == "cupy":
        return _cupy_module(data)
    if kernel is None and len(names) != 1:
        raise BadInput(f"this cubin holds {len(names)} kernels; name one of: {listed(names)}")
    return object_code(data).get_kernel(kernel or names[0])


def object_code(data: bytes) -> Any:
    """The ``cuda.core.ObjectCode`` of a cubin.

    Raises :class:`MissingPart` if ``cuda.core`` is not installed.
    """
    try:
        from cuda.core import ObjectCode
    except ImportError as error:
        raise MissingPart(
            f"cuda.core cannot be imported ({error}); pip install 'nostall[gpu]', or take "
            "nostall.load(..., to='bytes')"
        ) from error
    return ObjectCode.from_cubin(data)


def _cupy_module(data: bytes) -> Any:
    try:
        import cupy
    except ImportError as error:
        raise MissingPart(
            f"CuPy cannot be imported ({error}); install it, or take nostall.load(..., to='bytes')"
        ) from error
    # CuPy takes cubins only by path and caches modules by path, so the file is named by its hash.
    path = Artefacts(process_folder()).file(data, "cubin")
    return cupy.RawModule(path=str(path))


def _read_cubin(source: str | Path | bytes, arch: str | None, kernel: str | None) -> bytes:
    if isinstance(source, bytes):
        return fatbin.extract(source, arch, kernel)
    try:
        data = Path(source).read_bytes()
    except OSError as error:
        raise BadInput(
            f"cannot read cubin {source}: {error.strerror}; give the path or the bytes of a cubin"
        ) from error
    try:
        return fatbin.extract(data, arch, kernel)
    except BadInput as error:
        raise type(error)(f"{source}: {error}") from error
