"""What ends a step of a program: its optimisers, its profiler, or the calls of its modules.

Steps of an optimiser come first, then ``torch.profiler.profile.step()``, then the period of the
outermost calls of modules, where a call of ``generate`` of transformers is one call.
"""

from __future__ import annotations

import functools
import gc
import math
import sys
import time
import weakref
from collections.abc import Callable
from threading import get_ident
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from nostall.attach.import_hooks import quietly
from nostall.attach.program.changing.generation import GenerateCall
from nostall.attach.program.periods import (
    MOST_CALLS,
    VARIED_CALLS,
    Call,
    CallBorders,
    Period,
    grows,
)
from nostall.attach.program.roots import find_roots, shapes

if TYPE_CHECKING:
    from nostall.attach.program.session import Session

PATIENCE_SECONDS = 20.0
"""How long a period waits for modules that were made and never called."""
DOUBT_SECONDS = 60.0
"""After that time without a period, and many calls, none is looked for."""
PROFILER_PATIENCE = 16
"""Steps of a profiler before an optimiser that does not step is no longer waited for."""
PROFILER_STEP = "one step of torch.profiler"
"""What a step is where a profiler ends it; it is empty where an optimiser does."""
PROFILER = -1
"""The profiler among the numbers of optimisers."""
GENERATED = 12
"""Calls of ``generate`` without a period after which their lengths are said to vary."""
REMEDY = "name the function that ends a step with --step module:function"
_PROBLEM = "a call of a module is not noted"
_clock = time.perf_counter


class Sources:
    """Passes the events of one kind on to the session as ends of steps."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.kind = ""
        """``optimizer``, ``profiler`` or ``calls``; empty before the first step."""
        self.modules = OutermostCalls(self)
        self._profiled = 0

    def optimizer_stepped(self, optimizer: Any, skipped: bool = False) -> None:
        """An optimiser has stepped, or a GradScaler has left its step out."""
        self._take("optimizer")
        self.session.on_optimizer(optimizer, skipped)

    def profiler_stepped(self) -> None:
        """``step()`` of a profiler of the program has ended."""
        self._profiled += 1
        if self.kind == "optimizer" or (
            self.kind != "profiler" and self._profiled <= PROFILER_PATIENCE and has_optimizer()
        ):
            return
        self._take("profiler", PROFILER_STEP)
        self.session.borders.note(PROFILER)
        self.session.segments.watch_backward()
        self.session.on_border()

    def take_calls(self, found: str, roots: list[Any]) -> None:
        """The calls of ``roots`` have a period, ``found`` in words: they end the steps."""
        self._take("calls", found, roots)

    def calls_differ(self) -> None:
        """Modules are called in another order than in the period."""
        self.kind, self.session.borders.change = "", "modules are called in another order"
        self.session.borders.restart("", [])
        self.session.on_border()

    def why_none(self) -> str:
        """Why no step was seen; empty where nothing was seen that could be one."""
        if self.session.steps or self.kind:
            return ""
        if has_optimizer():
            return f"an optimiser was made and none stepped, or only in compiled code; {REMEDY}"
        return self.modules.doubt or self.modules.missing()

    def _take(self, kind: str, found: str = "", roots: list[Any] | None = None) -> None:
        if kind != self.kind:
            if self.kind or found:
                self.session.borders.restart(found, roots or [])
            self.kind = kind
            called = roots or [_module(unit) for unit in self.modules.units.values()]
            self.session.called = [weakref.ref(m) for m in called] or self.session.called
            if kind != "calls":
                self.modules.remove()


class _Generate(NamedTuple):
    """Calls of ``generate`` of one model."""

    model: Any


class OutermostCalls:
    """Calls of modules that no other module makes, seen in one thread.

    Before their period is known they are seen at ``Module._compiled_call_impl``, the place that
    ``Module.compile()`` uses, for all modules; then at the switches of the modules that are called.
    """

    def __init__(self, sources: Sources) -> None:
        self.sources, self.session = sources, sources.session
        self.borders = CallBorders()
        self.doubt = ""
        """Why no period is looked for any more."""
        self.units: dict[int, Any] = {}
        """Modules and functions that were called, alive so that no identity is used again."""
        self.is_active = False
        self._inside = False
        self._generated: list[Call] | None = None
        """Calls inside of ``generate``; None outside of it."""
        self._thread, self._began = 0, 0.0
        self._owner: Any = None

    def install(self, module: ModuleType) -> None:
        """See the calls of all modules (``module``: ``torch.nn.modules.module``)."""
        self._owner, self.is_active = module.Module, True
        calls, torch = self, sys.modules["torch"]

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            # First, because Dynamo is to trace nothing of this.
            if torch.compiler.is_compiling() or calls._inside:
                return module._call_impl(*args, **kwargs)
            return calls.made(module, module._call_impl, args, kwargs)

        self._owner._compiled_call_impl = self._call = call

    def watch_generate(self, module: ModuleType) -> None:
        """See calls of ``generate`` (``module``: ``transformers.generation.utils``)."""
        owner = module.GenerationMixin
        generate = owner.generate

        @functools.wraps(generate)
        def noted(model: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._counts() or self._generated is not None:
                return generate(model, *args, **kwargs)
            self._generated, before = [], self.session.calls_noted()
            try:
                result = generate(model, *args, **kwargs)
            finally:
                inside, self._generated = self._generated, None
            made = GenerateCall(generate, args, kwargs)
            self._noted(self.session.on_generate, model, made, result, before)
            work = tuple((call.unit, call.work) for call in inside)
            self._noted(self._ended, id(model) + 1, _Generate(model), work, len(inside))
            return result

        owner.generate = noted

    def made(self, module: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make a call, and note its end if no other module makes it."""
        if not self._counts() or not quietly(_PROBLEM, _has_parameters, module):
            return call(*args, **kwargs)
        self._inside = True
        try:
            result = call(*args, **kwargs)
        finally:
            self._inside = False
        self._noted(self._made, module, args, kwargs)
        return result

    def _made(self, module: Any, args: Any, kwargs: Any) -> None:
        work, size = None, 0
        if self.borders.period is None and not self.doubt:
            form = shapes((args, kwargs))
            mode = module.training, sys.modules["torch"].is_grad_enabled()
            work, size = (mode, form), _elements(form)
        self._ended(id(module), module, work, size)

    def _noted(self, note: Callable[..., None], *args: Any) -> None:
        """Note the end of a call; an error of that is not the program's, and ends the search."""
        try:
            note(*args)
        except Exception as error:  # any error of a user's class
            reason = f"an argument of a call answers with {type(error).__name__}"
            quietly(_PROBLEM, self._refuse, reason)

    def remove(self) -> None:
        """See no calls any more."""
        self._unpatch()
        self.is_active = False
        self.borders, self.units = CallBorders(), {}

    def missing(self) -> str:
        """Which calls were too few for a period; empty without a call."""
        if not (calls := self.borders.calls):
            return ""
        found = f"{len(calls)} calls of {self._called()} showed no period three times"
        return f"{found}; a longer run shows more, or {REMEDY}"

    def _called(self) -> str:
        names = dict.fromkeys(_name(self.units[call.unit]) for call in self.borders.calls)
        return ", ".join([*names][:4])

    def _unpatch(self) -> None:
        if self._owner is not None and self._owner.__dict__["_compiled_call_impl"] is self._call:
            self._owner._compiled_call_impl = None

    def _counts(self) -> bool:
        """Whether a call counts: one of the thread that called a module first."""
        if self.is_active and self.session._ended:
            self.remove()
        if not self._thread:
            self._thread, self._began = get_ident(), _clock()
        return (
            self.is_active
            and not self._inside
            and not self.session._busy
            and get_ident() == self._thread
        )

    def _ended(self, number: int, unit: Any, work: Any, size: int) -> None:
        if self.borders.period is None:
            self.units[number] = unit
        if self._generated is not None:
            self._generated.append(Call(number, work, size))
        elif self.doubt:
            self.session.on_border()  # an order to end is obeyed
        elif self.borders.period is not None:
            self._in_period(number)
        else:
            self.borders.note(Call(number, work, size))
            if self.borders.is_due():
                self._look()

    def _look(self) -> None:
        calls = self.borders.calls
        if self.borders.look(self._accept):
            self._found()
        elif sum(isinstance(self.units[c.unit], _Generate) for c in calls) >= GENERATED:
            self._refuse(
                f"calls of {self._called()} do different work, as their lengths vary: set "
                "min_new_tokens and max_new_tokens to one number"
            )
        elif len(calls) >= MOST_CALLS and has_optimizer():
            self.remove()
        elif len(calls) >= MOST_CALLS or (
            _clock() - self._began > DOUBT_SECONDS and len(calls) >= 2 * VARIED_CALLS
        ):
            grown = "grow one by one, as in a generation loop" if grows(calls) else "have no period"
            self._refuse(f"{len(calls)} calls of modules ({self._called()}) {grown}")

    def _accept(self, period: Period) -> bool:
        """Whether no optimiser and no module that was not called yet is to be waited for."""
        if has_optimizer():  # it is yet to step
            self.borders.postpone()
            return False
        if _clock() - self._began > PATIENCE_SECONDS:
            return True
        called = {id(m) for unit in self.units.values() for m in _module(unit).modules()}
        return all(id(m) in called or any(id(part) in called for part in m.modules())
                   for m in find_roots([]))  # fmt: skip

    def _found(self) -> None:
        assert self.borders.period is not None
        numbers = self.borders.period.units
        names = ", ".join(_name(self.units[number]) for number in dict.fromkeys(numbers))
        roots = [unit for unit in self.units.values() if not isinstance(unit, _Generate)]
        count = "each call" if len(numbers) == 1 else f"{len(numbers)} calls"
        self.sources.take_calls(f"{count} of {names}", roots)
        self.session.segments.watch_backward()
        self._unpatch()  # inner modules have their own speed again
        self.session.on_border()  # the watch begins anew
        self.session.on_border()  # switches are put in
        self.units = {}
        switches = {id(switch.root): switch for switch in self.session.switches}
        if switches.keys() >= {id(root) for root in roots}:
            for switch in switches.values():
                switch.made = self.made
        elif not self.session._ended:
            self._owner._compiled_call_impl = self._call

    def _in_period(self, number: int) -> None:
        ends = self.borders.ends(number)
        if ends:
            self.session.on_border()
        elif ends is None:
            self.borders = CallBorders()
            self._owner._compiled_call_impl = self._call
            self.sources.calls_differ()

    def _refuse(self, reason: str) -> None:
        self.doubt = f"where a step ends is not certain: {reason}; or {REMEDY}"
        self.session._give_up(self.doubt)


def _has_parameters(module: Any) -> bool:
    return next(module.parameters(), None) is not None


def has_optimizer() -> bool:
    """Whether the process has an optimiser of PyTorch."""
    torch = sys.modules["torch"]
    return any(issubclass(type(o), torch.optim.Optimizer) for o in gc.get_objects())


def _module(unit: Any) -> Any:
    return unit.model if isinstance(unit, _Generate) else unit


def _name(unit: Any) -> str:
    name = type(_module(unit)).__name__
    return f"{name}.generate" if isinstance(unit, _Generate) else name


def _elements(form: Any) -> int:
    """Elements of the tensors among shapes as :func:`shapes` gives them."""
    if not isinstance(form, tuple):
        return 0
    if all(isinstance(length, int) for length in form):
        return math.prod(form)  # a shape; () of a number, and of no arguments
    return sum(_elements(item) for item in form)
