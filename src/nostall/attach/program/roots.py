"""The modules that a program trains, found in its memory, and a switch at the call of each."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

MAX_DEPTH, MAX_ITEMS = 4, 64
"""Nesting and entries of arguments that are part of a step's key."""
MAX_CALLS = 8
"""Calls of a step whose shapes are part of its key; further ones are only counted."""

MAX_GRADIENTS = 8
"""Gradients of a module that are looked at in each timed step; in the first ones, all are."""
MAX_PARTS = 4
"""Modules that are switched where the one around them is not called."""
MAX_SOURCE_BYTES = 1 << 22
"""Larger source files of a program count by their sizes."""

Made = Callable[[Any, Callable[..., Any], Any, Any], Any]
"""Module, its call, positional and keyword arguments; gives the result of the call."""


def find_roots(optimizers: Sequence[Any]) -> list[Any]:
    """The outermost ``nn.Module`` objects that hold parameters of ``optimizers``.

    Without optimisers: those that hold any parameters.
    """
    torch = sys.modules["torch"]
    held = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    # `type`, because isinstance asks each object for __class__, which proxies answer with errors.
    modules = [o for o in gc.get_objects() if issubclass(type(o), torch.nn.Module)]
    inner = {id(child) for m in modules for child in m._modules.values() if child is not None}
    roots = []
    for module in modules:
        if id(module) not in inner:
            parameters = {id(p) for p in module.parameters()}
            if parameters & held if optimizers else parameters:
                roots.append(module)
    return roots


def called_parts(root: Any, called: Sequence[Any]) -> list[Any]:
    """What the program calls of ``root``: itself, or the outermost modules in it.

    Some trainers, such as Lightning's, call a method of the outermost module, which calls its
    parts.  ``called``: modules that no other module called.  With too many parts, only ``root``.
    """
    inside = {id(module) for module in root.modules()}
    parts = [module for module in called if id(module) in inside]
    inner = {id(child) for part in parts for child in part.modules() if child is not part}
    parts = [part for part in parts if id(part) not in inner]
    return parts if 0 < len(parts) <= MAX_PARTS else [root]


class LastGradients:
    """Whether the memory of gradients lives on in the next step, whatever holds it.

    The memory of CUDA graphs, in which they lie, is used again by then.
    """

    def __init__(self) -> None:
        self._seen: list[Any] = []

    def live_on(self, roots: Sequence[Any], most: int | None = None) -> bool:
        """Whether memory of the last call's gradients is alive; then note ``most`` of each root.

        None: all gradients.
        """
        torch = sys.modules["torch"]
        weak = importlib.import_module("torch.multiprocessing.reductions").StorageWeakRef
        lives_on = any(not reference.expired() for reference in self._seen)
        self._seen = []
        for root in roots:
            found = [p.grad for p in root.parameters() if p.grad is not None]
            plain = [
                g for g in found[:most] if type(g) is torch.Tensor and g.layout is torch.strided
            ]
            self._seen += [weak(gradient.untyped_storage()) for gradient in plain]
        return lives_on


def model_identity(roots: Sequence[Any]) -> str:
    """sha256 of names, shapes and dtypes of the parameters and buffers of ``roots``."""
    found = []
    for root in roots:
        tensors = (*root.named_parameters(), *root.named_buffers())
        lines = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors]
        found.append("\n".join([type(root).__name__, *lines]))
    return hashlib.sha256("\n\n".join(sorted(found)).encode()).hexdigest()


def source_identity() -> dict[str, str]:
    """sha256 of the Python files that the program imported, by module.

    Installed packages and nostall are left out; of large files the size counts.
    """
    installed = [Path(path).resolve() for path in sysconfig.get_paths().values()]
    installed += [Path(__file__).resolve().parents[2]]
    found = {}
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        # Inductor's generated code belongs to modules below torch, in files of changing names.
        if not isinstance(file, str) or not file.endswith(".py") or name.startswith("torch."):
            continue
        path = Path(file).resolve()
        is_package = {"site-packages", "dist-packages"} & set(path.parts)
        if not is_package and not any(path.is_relative_to(folder) for folder in installed):
            with contextlib.suppress(OSError):
                size = path.stat().st_size
                data = path.read_bytes() if size <= MAX_SOURCE_BYTES else str(size).encode()
                found[name] = hashlib.sha256(data).hexdigest()
    return found


def other_program(identity: Mapping[str, Any], roots: Sequence[Any]) -> str:
    """Why this program is not the one of an ``identity``; empty if nothing shows that.

    Modules that only one of the two has imported by now are not compared.
    """
    here = source_identity()
    changed = [n for n, digest in identity["sources"].items() if here.get(n, digest) != digest]
    if changed:
        named = ", ".join(changed[:3])
        return f"the source of {named} is not what was measured; run `nostall optimize` again"
    if model_identity(roots) != identity["model"]:
        return (
            "the parameters have other names, shapes or dtypes than those that were measured; run "
            "`nostall optimize` again"
        )
    return ""


def obstacle(root: Any) -> str | None:
    """Why the calls of ``root`` cannot be switched; None if they can."""
    name = type(root).__name__
    if name == "OptimizedModule" or any(_is_compiled(m) for m in root.modules()):
        return f"{name} runs under torch.compile already"
    if name == "FullyShardedDataParallel" or hasattr(root, "_get_fsdp_state"):
        return f"{name} shards its parameters (FSDP), which nostall does not switch yet"
    if hasattr(root, "graph") or type(root).__module__.startswith("torch.jit"):
        return f"{name} is a traced graph already"
    return None


def _is_compiled(module: Any) -> bool:
    call = module._compiled_call_impl
    return call is not None and type(call) is not Switch


class RefusedOutput(TypeError):
    """A version has an output that cannot be handed to the program."""


class Switch:
    """Replaces the call of a module: records the shapes and runs the chosen version.

    It is the module's ``_compiled_call_impl``, the place that ``Module.compile()`` uses, so that no
    wrapper changes names or pickles.
    """

    def __init__(self, root: Any, calls: list[Any], capture: Callable[[Switch, Any], None]) -> None:
        self.root, self.calls = root, calls
        self.eager: Callable[..., Any] = root._call_impl
        self.target: Callable[..., Any] | None = None
        """The version that runs; None for the original."""
        self.failure: str | None = None
        """The first error of a version; the original runs since."""
        self.number = 0
        self.made: Made | None = None
        """Makes a call and notes its end, where calls of modules end the steps."""
        self._capture = capture
        self.obey_end: Callable[[], None] = lambda: None
        """Ends the program if `nostall optimize` asked for that."""
        self._is_compiling = sys.modules["torch"].compiler.is_compiling
        object.__setattr__(root, "_compiled_call_impl", self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_compiling():  # the program compiles a function around the call
            return self.eager(*args, **kwargs)
        if self.made is not None:
            return self.made(self.root, self._run, args, kwargs)
        return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        self._note(args, kwargs)
        if self.target is None:
            return self.eager(*args, **kwargs)
        try:
            return self.target(*args, **kwargs)
        except KeyboardInterrupt:  # while it is compiled
            self.obey_end()
            raise
        except Exception as error:  # any error: the original decides what the program sees
            self.failure = f"{type(error).__name__}: {str(error).splitlines()[:1]}"
            self.target = None
        # Outside of the handler: the error holds the tensors of the call, so memory.
        return self.eager(*args, **kwargs)

    def _note(self, args: Any, kwargs: Any) -> None:
        torch = sys.modules["torch"]
        if len(self.calls) < MAX_CALLS:
            mode = self.root.training, torch.is_grad_enabled()
            self.calls.append((self.number, mode, shapes((args, kwargs))))
        else:
            self.calls.append(None)
        self._capture(self, (args, kwargs))

    def settle(self) -> None:
        """Take the switch out; the version that runs stays."""
        self.root.__dict__.pop("_compiled_call_impl", None)
        if self.target is not None:
            object.__setattr__(self.root, "_compiled_call_impl", _settled(self.root, self.target))


def _settled(root: Any, target: Callable[..., Any]) -> Callable[..., Any]:
    """``target``, or the original of ``root`` from the first refused output on."""
    is_compiling = sys.modules["torch"].compiler.is_compiling

    def call(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():  # as in a switch
            return root._call_impl(*args, **kwargs)
        try:
            return target(*args, **kwargs)
        except RefusedOutput as error:
            reason = f"{type(root).__name__} runs as it was: {error}"
        root.__dict__.pop("_compiled_call_impl", None)
        print(f"nostall: {reason}", file=sys.stderr)
        return root._call_impl(*args, **kwargs)

    return call


def shapes(value: Any, depth: int = 0) -> Any:
    """Shapes and types of the tensors in nested arguments; of what answers with errors, its type.

    Objects that only look like tensors or mappings, and nested tensors, are such: a program must
    not fail because its arguments are looked at.
    """
    kind = type(value)
    try:
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            return tuple(map(int, value.shape)), str(value.dtype)
        if depth < MAX_DEPTH:
            if isinstance(value, Mapping) or _answers_as_mapping(value):
                items = list(value.items())[:MAX_ITEMS]
                return tuple((str(key), shapes(item, depth + 1)) for key, item in items)
            if kind in (list, tuple):
                return tuple(shapes(item, depth + 1) for item in value[:MAX_ITEMS])
    except Exception:  # any error of a user's class
        return kind.__name__
    return kind.__name__


def _answers_as_mapping(value: Any) -> bool:
    """Whether ``keys`` and ``items`` are methods, as of tensordicts, and not attributes."""
    return all(callable(getattr(value, name, None)) for name in ("keys", "items"))
