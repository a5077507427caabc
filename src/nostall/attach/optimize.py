"""``@nostall.optimize``: a decorator above ``@triton.jit`` and ``@triton.autotune``.

Each compiled kernel is looked up in the store before it is loaded, and its cubin is replaced in
memory.  Triton's caches do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

from nostall.attach.store_lookup import check_triton_version, find_replacement
from nostall.core.errors import BadInput, MissingPart

Kernel = TypeVar("Kernel")


@overload
def optimize(kernel: Kernel) -> Kernel: ...


@overload
def optimize(
    *,
    tune_seconds: float | None = None,
    bounds: Mapping[str, int] | None = None,
    modelled: bool = False,
) -> Callable[[Kernel], Kernel]: ...


def optimize(
    kernel: Any = None,
    *,
    tune_seconds: float | None = None,
    bounds: Mapping[str, int] | None = None,
    modelled: bool = False,
) -> Any:
    """Run the store's optimised cubin of a Triton kernel, if there is one.

    Must be the topmost decorator.  Returns the same object, so the kernel is launched as before.

    ``tune_seconds``: tune each compiled variant after its first call, for this many seconds, in
    another process on the same GPU, with random data of the same shapes.  A measured gain is
    stored, and used from the second call on.  By default calls only look up the store.
    ``bounds``: N by name of an integer tensor, such that random values in [0, N) are valid.  A
    kernel with integer tensors that are not listed is not tuned.
    ``modelled``: also use cubins whose gain was never measured.

    Raises :class:`BadInput` if it does not decorate a Triton kernel.
    """
    if tune_seconds is not None and not tune_seconds > 0:
        raise BadInput(
            f"tune_seconds is {tune_seconds}; give how many seconds to search, such as 20, or "
            "leave it out to look up only"
        )

    def decorate(kernel: Any) -> Any:
        return _attach(kernel, tune_seconds, dict(bounds or {}), modelled)

    return decorate if kernel is None else decorate(kernel)


def _attach(
    kernel: Any, tune_seconds: float | None, bounds: Mapping[str, int], modelled: bool
) -> Any:
    triton = _import_triton()
    function = kernel
    while not isinstance(function, triton.JITFunction) and hasattr(function, "fn"):
        function = function.fn
    if not isinstance(function, triton.JITFunction):
        if triton.knobs.runtime.interpret:
            return kernel  # TRITON_INTERPRET=1 compiles no cubins
        raise BadInput(
            f"@nostall.optimize got a {type(kernel).__name__}; put it above @triton.jit or "
            "@triton.autotune"
        )
    if not check_triton_version(str(triton.__version__)):
        return kernel
    _replace_when_compiled(function, modelled)
    if tune_seconds is not None:
        from nostall.attach.first_call import FirstCalls  # lazy: it imports the tuner

        FirstCalls(kernel, function, tune_seconds, bounds, replace_cubin).track_launches()
    return kernel


def replace_cubin(compiled: Any, modelled: bool = False) -> bool:
    """Replace the cubin of a compiled Triton kernel by the store's; returns whether it did.

    Triton loads the new cubin at the next launch.
    """
    original = compiled.asm.get("cubin")
    if not isinstance(original, bytes):
        return False  # not for an NVIDIA GPU
    architecture = f"sm_{compiled.metadata.target.arch}"
    replacement = find_replacement(
        original,
        "decorator",
        architecture=architecture,
        modelled=modelled,
        dependent=hasattr(compiled.metadata, "launch_pdl"),
    )
    if replacement is None:
        return False
    if replacement.dependent:
        # Triton's launcher is made from the metadata at the next launch.
        compiled.metadata = compiled.metadata._replace(launch_pdl=True)
    compiled.asm.pop("sass", None)
    compiled.asm["cubin"] = compiled.kernel = replacement.data
    # A loaded module is not unloaded, because launches of it may still be running.
    compiled.module = compiled.function = compiled._run = None
    compiled.nostall_record = replacement.row.id
    return True


def _replace_when_compiled(function: Any, modelled: bool) -> None:
    """Call :func:`replace_cubin` on each kernel that ``function`` compiles.

    Triton sets ``function.compile`` for each device, in the factory of its per-device caches, so
    the factory is wrapped.
    """
    make_caches = function.device_caches.default_factory

    def make_device_caches() -> Any:
        caches = make_caches()
        triton_compile = function.compile

        def compile(*args: Any, **options: Any) -> Any:
            compiled = triton_compile(*args, **options)
            replace_cubin(compiled, modelled)
            return compiled

        function.compile = compile
        return caches

    function.device_caches.default_factory = make_device_caches


def _import_triton() -> Any:
    try:
        import triton
    except ImportError as error:
        raise MissingPart(
            f"Triton cannot be imported ({error}); @nostall.optimize decorates Triton kernels: "
            "pip install 'nostall[triton]'"
        ) from error
    return triton
