"""``@nostall.optimize``: a decorator above ``@triton.jit`` and ``@triton.autotune``.

It changes nothing in Triton's caches: each freshly compiled kernel, before it is loaded, is asked
for in the store, and its bytes are exchanged in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

from nostall.attach.delivery import deliver, fits_triton
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
    """Run the store's cubin in place of the compiler's where there is one.  Put it on top.

    By default calls only look up.  With ``tune_seconds`` the first call of each compiled variant is
    followed by a search of that many seconds on the same GPU, in another process with random data
    of the same shapes; a gain that it measures is kept in the store and used from the second call
    on.  ``bounds`` gives, for integer tensors by name, N so that random values in [0, N) are valid:
    without it, a kernel that takes integer tensors is not tuned.  ``modelled`` also accepts results
    that were never measured.

    Returns the same object, so launching, autotuning and everything else stay as they are.  Raises
    :class:`BadInput` when it does not stand above a Triton kernel.
    """
    if tune_seconds is not None and not tune_seconds > 0:
        raise BadInput(
            f"tune_seconds is {tune_seconds}; give how many seconds to search, such as 20, or "
            "leave it out to look up only"
        )

    def decorate(found: Any) -> Any:
        return _attached(found, tune_seconds, dict(bounds or {}), modelled)

    return decorate if kernel is None else decorate(kernel)


def _attached(
    kernel: Any, tune_seconds: float | None, bounds: Mapping[str, int], modelled: bool
) -> Any:
    triton = _triton()
    function = kernel
    while not isinstance(function, triton.JITFunction) and hasattr(function, "fn"):
        function = function.fn
    if not isinstance(function, triton.JITFunction):
        if triton.knobs.runtime.interpret:
            return kernel  # there are no cubins under TRITON_INTERPRET=1
        raise BadInput(
            f"@nostall.optimize got a {type(kernel).__name__}; it stands above @triton.jit or "
            "@triton.autotune"
        )
    if not fits_triton(str(triton.__version__)):
        return kernel
    _ask_when_compiled(function, modelled)
    if tune_seconds is not None:
        from nostall.attach.first_call import FirstCalls  # brings the whole tuner

        FirstCalls(kernel, function, tune_seconds, bounds, exchange).follow()
    return kernel


def exchange(compiled: Any, modelled: bool = False) -> bool:
    """Put the store's bytes into a compiled kernel; it is loaded (again) at its next launch."""
    original = compiled.asm.get("cubin")
    if not isinstance(original, bytes):
        return False  # not for an NVIDIA GPU
    architecture = f"sm_{compiled.metadata.target.arch}"
    found = deliver(original, "decorator", architecture=architecture, modelled=modelled)
    if found is None:
        return False
    compiled.asm.pop("sass", None)
    compiled.asm["cubin"] = compiled.kernel = found.data
    # A module that is loaded already is let go without unloading: launches of it may be under way.
    compiled.module = compiled.function = compiled._run = None
    compiled.nostall_record = found.row.id
    return True


def _ask_when_compiled(function: Any, modelled: bool) -> None:
    """Pass what ``function`` compiles through :func:`exchange`.

    Triton sets ``function.compile`` anew for each device, in the factory of its per-device caches.
    """
    make = function.device_caches.default_factory

    def caches_of_one_device() -> Any:
        made = make()
        triton_compile = function.compile

        def compile(*args: Any, **options: Any) -> Any:
            compiled = triton_compile(*args, **options)
            exchange(compiled, modelled)
            return compiled

        function.compile = compile
        return made

    function.device_caches.default_factory = caches_of_one_device


def _triton() -> Any:
    try:
        import triton
    except ImportError as error:
        raise MissingPart(
            f"Triton cannot be imported ({error}); @nostall.optimize stands above Triton kernels: "
            "pip install 'nostall[triton]'"
        ) from error
    return triton
