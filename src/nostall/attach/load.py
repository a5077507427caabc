"""``nostall.load``: a cubin for cuda.core, CuPy or your own loader, optimised where known."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Literal, overload

from nostall.attach.delivery import deliver
from nostall.core.errors import BadInput, MissingPart
from nostall.sass.binary import fatbin
from nostall.sass.binary.cubin import Cubin
from nostall.store import BadStore, Store
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
    """The cubin at ``source`` (a path, or its bytes), or what the store has in its place.

    ``to`` says for whom: ``"cuda.core"`` gives a ``cuda.core`` kernel (``kernel`` may be left out
    when there is one only), ``"cupy"`` a ``cupy.RawModule``, ``"bytes"`` the cubin itself.
    ``arch`` chooses an image of a fatbin; ``gpu`` is the GPU's name, asked from the current CUDA
    context when not given.  Launch it exactly as the original.

    Raises :class:`BadInput` for what is no cubin or lacks the kernel, :class:`MissingPart` when the
    package for ``to`` is not installed.  A store that has nothing, or nothing that fits this GPU,
    is no error: the original is loaded.
    """
    if to not in ("cuda.core", "cupy", "bytes"):
        raise BadInput(f"to is {to!r}; allowed are 'cuda.core', 'cupy' and 'bytes'")
    original = _read(source, arch, kernel)
    cubin = Cubin.parse(original)
    names = [text.name for text in cubin.texts if text.is_kernel]
    if kernel is not None and kernel not in names:
        raise BadInput(f"there is no kernel {kernel!r} in this cubin; it holds: {', '.join(names)}")
    found = deliver(
        original,
        f"load {to}",
        architecture=f"sm_{cubin.sm}",
        gpu=gpu,
        kernel=kernel,
        modelled=modelled,
    )
    data = found.data if found is not None else original
    if to == "bytes":
        return data
    if to == "cupy":
        return _cupy(data)
    if kernel is None and len(names) != 1:
        raise BadInput(f"this cubin holds {len(names)} kernels; name one of: {', '.join(names)}")
    return object_code(data).get_kernel(kernel or names[0])


def object_code(data: bytes) -> Any:
    """A cubin as ``cuda.core`` takes it."""
    try:
        from cuda.core import ObjectCode
    except ImportError as error:
        raise MissingPart(
            f"cuda.core cannot be imported ({error}); pip install 'nostall[gpu]', or take "
            "nostall.load(..., to='bytes')"
        ) from error
    return ObjectCode.from_cubin(data)


def _cupy(data: bytes) -> Any:
    try:
        import cupy
    except ImportError as error:
        raise MissingPart(
            f"CuPy cannot be imported ({error}); install it, or take nostall.load(..., to='bytes')"
        ) from error
    # CuPy takes cubins by path only, and remembers modules by path: a file named by its hash.
    try:
        path = Store().artefacts.file(data, "cubin")
    except BadStore:  # such as one in an image that cannot be written
        path = Artefacts(_until_the_end()).file(data, "cubin")
    return cupy.RawModule(path=str(path))


@cache
def _until_the_end() -> Path:
    """A folder that is there as long as this process."""
    folder = tempfile.mkdtemp(prefix="nostall-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _read(source: str | Path | bytes, arch: str | None, kernel: str | None) -> bytes:
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
