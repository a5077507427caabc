"""One graph of a program: Inductor's version runs until a stitched one was shown to be faster."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from torch._subclasses import FakeTensor

from nostall.attach.torch_compile.measure.accuracy import Differs
from nostall.attach.torch_compile.measure.call import Call, changes
from nostall.attach.torch_compile.measure.graph_comparison import NotStitched, judge
from nostall.attach.torch_compile.measure.kernel_comparison import AllSlower
from nostall.attach.torch_compile.report import GraphReport
from nostall.attach.torch_compile.rewrite.compilers import Compiled
from nostall.attach.torch_compile.selection.versions import Candidate
from nostall.attach.torch_compile.store.kernel_store import Kept
from nostall.attach.torch_compile.store.rank_sync import FOLLOWS, Chosen, Ranks
from nostall.attach.torch_compile.store.records import ChoiceRecord, ComparisonRecord, Version
from nostall.attach.torch_compile.training_steps import STEPS, capturing
from nostall.attach.torch_compile.workers import worker
from nostall.attach.torch_compile.workers.cpu_time import counted
from nostall.attach.torch_compile.workers.tasks import Preparation, progress
from nostall.attach.warning import say_once
from nostall.gpu.clock import Clock

_log = logging.getLogger("nostall")

BEGIN_AT_CALL = 2
"""By then the first step is over, and nothing of it waited for us."""


Make = Callable[[Sequence[Any], Chosen | None], Candidate | None]
"""Compiles the stitched version for arguments like these, as chosen; None: as is found best.  None
comes back where that is being prepared: to be asked again once everything is."""


@dataclass(frozen=True)
class Rules:
    """How a graph chooses: its name, where choices are kept, how times are taken, and what is
    prepared in the background before."""

    graph: str
    kept: Kept
    clock: Clock
    seconds: float
    preparation: Preparation
    about: dict[str, str]


class Switch:
    """Called in place of a compiled graph."""

    def __init__(
        self,
        plain: Compiled,
        make: Make,
        rules: Rules,
        report: GraphReport,
    ) -> None:
        self._active, self._plain, self._make = plain, plain, make
        self._rules, self.report = rules, report
        self._changed: frozenset[int] = frozenset()
        self._candidate: Candidate | None = None
        self._queued = False
        self._lock = threading.Lock()
        STEPS.undecided.add(self)

    def __call__(self, *args: Any) -> Any:
        if not STEPS.busy or _is_tracing(args):
            return self._active(*args)
        STEPS.begin()
        if self in STEPS.undecided and not capturing() and self._lock.acquire(blocking=False):
            try:
                return self._follow(args)
            finally:
                self._lock.release()
        result = self._active(*args)
        STEPS.follow(result)
        return result

    def _follow(self, args: tuple[Any, ...]) -> Any:
        """A call while nothing is decided."""
        self.report.calls += 1
        if self.report.calls == 1:
            result, self._changed = changes(args, lambda: self._plain(*args))
        else:
            self._advance(args)
            result = self._active(*args)
        STEPS.follow(result, self._retained)
        return result

    def _retained(self) -> None:
        """PyTorch gives the memory of saved tensors away in a backward pass that it compiles with
        the forward pass, and ours is; Inductor's is compiled later, when it knows better."""
        if self in STEPS.undecided:
            self._finish("inductor", "the program goes through graphs twice (retain_graph)")

    def _advance(self, args: tuple[Any, ...]) -> None:
        """Whatever can be done at this call towards a choice."""
        if self._queued or self.report.calls < BEGIN_AT_CALL:
            return
        self.report.state = "compiling"
        self._rules.preparation.start()
        if not self._rules.preparation.ready:
            progress(f"graph {self._rules.graph[:8]}: stitching …")
            return
        ranks = Ranks.here()
        chosen = None if ranks.leads else self._told(ranks)
        if not ranks.leads and chosen is None:
            return
        if chosen is not None and chosen.version == "inductor":
            self._finish("inductor", FOLLOWS)
            return
        if self._candidate is None:
            self._candidate = self._compiled(args, chosen, ranks)
        candidate = self._candidate
        if candidate is None:
            return
        if chosen is not None:
            self._queue(lambda: self._obey(candidate))
            return
        call = Call.of(args, self._changed)
        if not STEPS.quiet:
            # The arguments may be gone or changed when this step is over.
            call = call.kept()
        self._queue(lambda: self._judge(candidate, call, ranks))

    def _queue(self, action: Callable[[], None]) -> None:
        self._queued = True
        STEPS.when_quiet(action)
        STEPS.begin()

    def _told(self, ranks: Ranks) -> Chosen | None:
        """What rank 0 has chosen, if it has."""
        try:
            return ranks.chosen(self._rules.graph, self._rules.kept)
        except Exception as error:  # the user's program is worth more than any gain
            self._stay(_reason("the choice of rank 0 is not understood", error), error)
            return None

    def _compiled(
        self, args: tuple[Any, ...], chosen: Chosen | None, ranks: Ranks
    ) -> Candidate | None:
        """The stitched version, or None where there is none yet, or this graph stays as it is."""
        rules, report = self._rules, self.report
        progress(f"graph {rules.graph[:8]}: compiling …")
        report.cpu_seconds += rules.preparation.taken_cpu_seconds()
        try:
            with counted(report.add_cpu_seconds):
                return self._make(args, chosen)
        except AllSlower as found:
            self._settle(Chosen("inductor"), str(found), (), None, ranks)
            return None
        except Exception as error:  # the user's program is worth more than any gain
            self._stay(_reason("not stitched", error), error)
            return None
        finally:
            report.seconds["background"] = rules.preparation.seconds

    def _judge(self, candidate: Candidate, call: Call, ranks: Ranks) -> None:
        began = time.perf_counter()
        progress(f"graph {self._rules.graph[:8]}: comparing …")
        try:
            found, called = self._compared(candidate, call)
        except NotStitched:
            self._settle(Chosen("inductor"), "nothing to stitch", (), None, ranks)
            return
        except Differs as error:
            self._stay(f"the stitched version is not used: {error}", error)
            return
        except Exception as error:  # between two steps of a program that must go on
            self._stay(_reason("not compared", error), error)
            return
        self.report.seconds["compared"] = time.perf_counter() - began
        self.report.compared = found
        self.report.kernels = self.report.kernels or len(called)
        verdict = found.comparison().verdict
        if verdict == "faster":
            self._active = candidate.run
            self._settle(candidate.chosen, "faster as a whole", called, found, ranks)
        else:
            reason = "slower as a whole" if verdict == "slower" else "no gain beyond the noise"
            self._settle(Chosen("inductor"), reason, called, found, ranks)

    def _compared(
        self, candidate: Candidate, call: Call
    ) -> tuple[ComparisonRecord, tuple[str, ...]]:
        rules = self._rules
        with counted(self.report.add_cpu_seconds):
            return judge(rules.graph, self._plain, candidate.run, call, rules.clock, rules.seconds)

    def _obey(self, candidate: Candidate) -> None:
        """Run what rank 0 has chosen."""
        self._active = candidate.run
        self._finish("stitched", FOLLOWS)

    def _settle(
        self,
        chosen: Chosen,
        reason: str,
        called: tuple[str, ...],
        found: ComparisonRecord | None,
        ranks: Ranks,
    ) -> None:
        """From now on this version runs; write that down, and tell other ranks."""
        self._finish(chosen.version, reason)
        choice = ChoiceRecord(
            version=chosen.version,
            reason=reason,
            kernels=called,
            left=tuple(sorted(chosen.left)),
            regions=dict(chosen.regions),
            compared=found,
            about=self._rules.about,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        try:
            ranks.publish(self._rules.graph, chosen, self._rules.kept)
            self._rules.kept.keep(self._rules.graph, choice)
        except Exception as error:  # the choice holds for this run all the same
            say_once(f"a choice is not kept: {error}")

    def _stay(self, reason: str, error: Exception) -> None:
        """Something of ours failed: say so once, and go on with Inductor's version."""
        say_once(f"{reason}; Inductor's version runs")
        _log.debug("nostall: %s", reason, exc_info=error)
        self._finish("inductor", reason)

    def _finish(self, version: Version, reason: str) -> None:
        self.report.state, self.report.reason = version, reason
        # The other version, its memory and its graph are not needed any more.
        self._plain = self._active
        self._make, self._candidate = _gone, None
        STEPS.undecided.discard(self)
        if not STEPS.undecided:
            self.report.add_cpu_seconds(worker.end())
        progress(str(self.report), last=True)
        _log.info("nostall: %s", self.report)


def _is_tracing(args: Sequence[Any]) -> bool:
    """Whether this is no call of the program: PyTorch asks what the parts return into which it
    splits graphs of DistributedDataParallel, one of which is read by the next."""
    return any(isinstance(value, FakeTensor) for value in args)


def _gone(args: Sequence[Any], chosen: Chosen | None) -> Candidate | None:
    raise AssertionError("a graph is stitched once")


def _reason(what: str, error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{what}: {type(error).__name__}: {first[:200]}"
