"""Dispatch the calls of one graph: Inductor's version runs until the candidate is shown faster."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs
from torch._subclasses import FakeTensor

from nostall.attach.torch_compile.measure.accuracy import run_graph
from nostall.attach.torch_compile.measure.call import AccuracyError, Call, run_and_find_mutations
from nostall.attach.torch_compile.measure.graph_comparison import (
    CHOSEN,
    VERDICTS,
    GraphClocks,
    NoStitchedKernel,
    call_state,
    compare_graphs,
    judge,
)
from nostall.attach.torch_compile.measure.kernel_comparison import AllKernelsSlower
from nostall.attach.torch_compile.rewrite.compilers import CompiledGraph
from nostall.attach.torch_compile.selection.accuracy_repair import AccuracyRepair
from nostall.attach.torch_compile.selection.graph_state import GraphState, Phase
from nostall.attach.torch_compile.selection.sized_versions import (
    Bucket,
    SizedContext,
    SizedVersions,
    sized_key,
)
from nostall.attach.torch_compile.selection.versions import Candidate
from nostall.attach.torch_compile.store.kernel_store import KernelStore
from nostall.attach.torch_compile.store.rank_sync import FOLLOWS_RANK_0, RankSync, Selection
from nostall.attach.torch_compile.store.records import (
    ComparisonRecord,
    EarlierComparison,
    Version,
)
from nostall.attach.torch_compile.training_steps import STEPS, is_capturing
from nostall.attach.torch_compile.workers.cpu_time import count_cpu_time
from nostall.attach.torch_compile.workers.tasks import BackgroundTasks, print_progress
from nostall.attach.torch_compile.workers.worker import stop_workers
from nostall.attach.warning import warn_once
from nostall.core.errors import one_line

_log = logging.getLogger("nostall")

FIRST_PREPARED_CALL = 2
"""Call at which the preparation starts: the first step is over then, and was not delayed."""


BuildCandidate = Callable[[Sequence[Any], Selection | None], Candidate | None]
"""Compiles the candidate for arguments like these, by a selection (None: by the best measured one).
Returns None if a background task does it first: call it again when the tasks are ready."""
NextSelection = Callable[[Candidate, Collection[str]], Selection | None]
"""The selection to try if a candidate is not faster; None if there is none. The names are those of
the kernels that the candidate calls."""


def no_selection(candidate: Candidate, kernels: Collection[str]) -> Selection | None:
    """No other candidate is tried."""
    return None


@dataclass(frozen=True)
class SelectionContext:
    """Context in which a dispatcher selects a version."""

    # Key of the graph.
    graph: str
    # Where the selection is stored.
    store: KernelStore
    clocks: GraphClocks
    # Tasks that have to be ready before the candidate is compiled.
    tasks: BackgroundTasks
    # Description of the circumstances, for the stored record.
    about: dict[str, str]
    # Where sizes are dynamic: what choices for other sizes than those of one call are made with.
    sized: SizedContext | None = None
    # Compiles candidates without their inaccurate kernels; None if nothing can.
    repair: AccuracyRepair | None = None
    # The order in which candidates are tried.
    next_selection: NextSelection = no_selection
    # Approximate limit of the time for the search of block sizes of Inductor's kernels, in seconds.
    block_seconds: float = 0.0


class GraphDispatcher:
    """Dynamo calls this object in place of a compiled graph."""

    # Dynamo wraps this object with functools.wraps, which copies ``__dict__``: the copy would keep
    # both versions and all that prepares them, also behind the selection.
    __slots__ = (
        "__weakref__",
        "_active",
        "_baseline",
        "_best",
        "_build_candidate",
        "_candidate",
        "_context",
        "_lock",
        "_mutated",
        "_selection",
        "_state",
        "report",
    )

    def __init__(
        self,
        baseline: CompiledGraph,
        build_candidate: BuildCandidate,
        context: SelectionContext,
        state: GraphState,
    ) -> None:
        self._active = self._baseline = baseline
        self._build_candidate = build_candidate
        self._context, self._state, self.report = context, state, state.report
        # Indices of the arguments that a call mutates; found at the first call.
        self._mutated: frozenset[int] = frozenset()
        # The version that candidates are compared with.
        self._best = Selection("inductor")
        # The selection that is tried, None for the first one, and its candidate.
        self._selection: Selection | None = None
        self._candidate: Candidate | None = None
        self._lock = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        if (self._state.is_decided and not STEPS.is_active) or _is_tracing(args):
            return self._active(*args)
        STEPS.run_actions()
        may_advance = not self._state.is_decided and not is_capturing()
        if may_advance and self._lock.acquire(blocking=False):
            try:
                return self._call_undecided(args)
            finally:
                self._lock.release()
        result = self._active(*args)
        STEPS.track_backward(result)
        return result

    def _call_undecided(self, args: tuple[Any, ...]) -> Any:
        """A call before the decision."""
        self.report.calls += 1
        STEPS.pending.add(self)
        if self.report.calls == 1:
            result, self._mutated = run_and_find_mutations(args, lambda: self._baseline(*args))
        else:
            if self._state.phase is Phase.OBSERVED and self.report.calls >= FIRST_PREPARED_CALL:
                self._state.advance(Phase.PREPARING)
            if self._state.phase is Phase.PREPARING:
                self._prepare(args)
            result = self._active(*args)
        STEPS.track_backward(result, self._on_retained_graph)
        return result

    def _on_retained_graph(self) -> None:
        """Keep Inductor's version if the user runs backward passes twice.

        The candidate's backward pass is compiled with the forward pass, and then PyTorch lets it
        overwrite saved tensors.  Inductor's is compiled later, when the first backward pass runs
        and PyTorch sees ``retain_graph``.
        """
        if not self._state.is_decided:
            self._decide("inductor", "the user's process runs backward passes twice (retain_graph)")

    def _prepare(self, args: tuple[Any, ...]) -> None:
        """Go on with the preparation, as far as that is possible at this call."""
        self._context.tasks.start()
        if not self._context.tasks.is_ready:
            self._print_progress("preparing kernels …")
            return
        ranks = RankSync.current()
        if not ranks.is_leader:
            self._selection = self._fetch(ranks)
            if self._selection is None:
                return
            if self._selection.version == "inductor":
                self._decide("inductor", FOLLOWS_RANK_0)
                return
        if self._candidate is None:
            self._candidate = self._compile(args, self._selection, ranks)
        candidate = self._candidate
        if candidate is None:
            return
        if not ranks.is_leader:
            self._run_between_steps(lambda: self._follow_rank0(candidate))
            return
        call = Call.record(args, self._mutated)
        if not STEPS.between_steps:
            # The arguments may be freed or changed before this step is over.
            call = call.copy()
        self._run_between_steps(lambda: self._compare_and_commit(candidate, call, ranks))

    def _run_between_steps(self, action: Callable[[], None]) -> None:
        """Run an action when no step is in progress, unless a version is selected before that."""

        def run() -> None:
            if not self._state.is_decided:
                action()

        self._state.advance(Phase.CANDIDATE)
        STEPS.run_between_steps(run)
        STEPS.run_actions()

    def _fetch(self, ranks: RankSync) -> Selection | None:
        """The selection of rank 0, if there is one."""
        try:
            return ranks.fetch(self._context.graph, self._context.store)
        except Exception as error:  # must not end the user's process
            self._fall_back(f"rank 0's selection is not readable: {one_line(error)}", error)
            return None

    def _compile(
        self, args: tuple[Any, ...], selection: Selection | None, ranks: RankSync
    ) -> Candidate | None:
        """The candidate; None if it is not ready, or if Inductor's version is selected instead."""
        tasks, report = self._context.tasks, self.report
        self._print_progress("compiling …")
        report.cpu_seconds += tasks.take_cpu_seconds()
        try:
            with count_cpu_time(report.add_cpu_seconds):
                return self._build_candidate(args, selection)
        except AllKernelsSlower as reason:
            self._commit_best(str(reason), None, ranks)
            return None
        except Exception as error:  # must not end the user's process
            self._fall_back(f"not stitched: {one_line(error)}", error)
            return None
        finally:
            report.seconds["background"] = tasks.seconds

    def _compare_and_commit(self, candidate: Candidate, call: Call, ranks: RankSync) -> None:
        """Compare both versions; select the faster one, or try the next candidate."""
        if candidate.selection.version == "tuned":
            self._compare_blocks(candidate, call)
            return
        began = time.perf_counter()
        self._print_progress("comparing …")
        if self._context.sized is not None:
            self.report.compared_at = call.sizes
        try:
            comparison, kernels = self._compare(candidate, call)
        except NoStitchedKernel:
            self._commit_inductor("nothing to stitch", ranks)
            return
        except AccuracyError as error:
            repaired = self._repaired(candidate, call, error)
            if repaired is None:
                self._fall_back(f"the stitched version is not used: {error}", error)
            else:
                self._compare_and_commit(repaired, call, ranks)
            return
        except Exception as error:  # must not end the user's process
            self._fall_back(f"not compared: {one_line(error)}", error)
            return
        self._state.advance(Phase.COMPARED)
        self.report.add_seconds("graph_comparison", time.perf_counter() - began)
        self.report.comparison = comparison
        self.report.kernels = self.report.kernels or len(kernels)
        verdict = judge(comparison)
        selection = candidate.selection
        if verdict in CHOSEN:
            self._active = candidate.run
        else:
            following = self._next_selection(candidate, kernels)
            if following is not None:
                self.report.earlier.append(EarlierComparison(selection.title, comparison))
                self.report.kernels = 0
                self._selection, self._candidate = following, None
                self._state.advance(Phase.PREPARING)
                return
            selection = self._best
        reason = self._reason(verdict, candidate, comparison)
        bucket = None
        if (sized := self._context.sized) is not None and ranks.is_alone:
            bucket = sized.places.bucket(call.args)
            versions: dict[Version, CompiledGraph]
            versions = {"inductor": self._baseline, "stitched": candidate.run}
            self._active = SizedVersions(
                sized, candidate.selection, versions, bucket, selection.version
            )
        self._commit(selection, reason, kernels, comparison, ranks, bucket)

    def _compare_blocks(self, candidate: Candidate, call: Call) -> None:
        """Search block sizes of Inductor's kernels; candidates must beat the version with them if
        it is faster than the version without."""
        report = self.report
        try:
            comparison, _ = self._compare(candidate, call)
            report.blocks = comparison
            if judge(comparison) in CHOSEN:
                self._baseline = self._active = candidate.run
                self._best, report.is_tuned = candidate.selection, True
        except Exception as error:  # optional: Inductor's version without them stays
            report.blocks_note = f"not used: {one_line(error)}"
            _log.debug("nostall: block sizes were not compared", exc_info=error)
        self._candidate = None
        self._state.advance(Phase.COMPARED)
        self._state.advance(Phase.PREPARING)

    def _next_selection(self, candidate: Candidate, kernels: tuple[str, ...]) -> Selection | None:
        """The selection to try after a candidate that is not faster; None if there is none."""
        try:
            with count_cpu_time(self.report.add_cpu_seconds):
                return self._context.next_selection(candidate, kernels)
        except Exception as error:  # optional: Inductor's version stays
            warn_once(f"no second candidate is compiled: {one_line(error)}")
            return None

    def _reason(self, verdict: str, candidate: Candidate, comparison: ComparisonRecord) -> str:
        """The verdict; with the ratios of all candidates if there was more than one."""
        last = EarlierComparison(candidate.selection.title, comparison)
        if not self.report.earlier:
            return VERDICTS[verdict]
        ratios = [f"{x.candidate} {x.comparison.ratio:.3f}x" for x in (*self.report.earlier, last)]
        return f"{VERDICTS[verdict]} ({', then '.join(ratios)})"

    def _repaired(self, candidate: Candidate, call: Call, error: AccuracyError) -> Candidate | None:
        """The candidate without its inaccurate kernels; None if they are not found."""
        repair = self._context.repair
        if repair is None:
            return None
        try:
            with count_cpu_time(self.report.add_cpu_seconds):
                return repair.repaired(self._baseline, candidate, call, error)
        except Exception as failure:  # must not end the user's process
            _log.debug("nostall: inaccurate kernels were not found", exc_info=failure)
            return None

    def _compare(
        self, candidate: Candidate, call: Call
    ) -> tuple[ComparisonRecord, tuple[str, ...]]:
        context, selection = self._context, candidate.selection
        is_blocks = selection.version == "tuned"
        with count_cpu_time(self.report.add_cpu_seconds):
            if selection.tuned:
                self._search_blocks(candidate, call)
            record, kernels = compare_graphs(
                context.graph,
                self._baseline,
                candidate.run,
                call,
                context.clocks,
                None if context.repair is None else context.repair.program,
                needs_kernels=not (self.report.is_rewritten or is_blocks),
                repeats=not is_blocks,
            )
        return structs.replace(record, is_over_tuned=self.report.is_tuned), kernels

    def _search_blocks(self, candidate: Candidate, call: Call) -> None:
        """Measure block sizes of Inductor's kernels in a candidate, within the user's limit."""
        from nostall.attach.torch_compile.measure.block_tuning import BlockTuning
        from nostall.fusion.hardware import hardware_of

        began, left = time.perf_counter(), self._context.block_seconds
        left -= self.report.seconds.get("block_tuning", 0.0)
        with call_state(call):
            tuning = BlockTuning(left, hardware_of(call.device).copy_bytes_per_second)
            done = tuning.run(lambda: run_graph(candidate.run, call.fresh_args()))
        self.report.add_seconds("block_tuning", time.perf_counter() - began)
        if candidate.selection.version == "tuned":
            self.report.blocks_note = done

    def _follow_rank0(self, candidate: Candidate) -> None:
        """Run the candidate, because rank 0 has selected it."""
        self._active = candidate.run
        self._decide("stitched", FOLLOWS_RANK_0)

    def _commit(
        self,
        selection: Selection,
        reason: str,
        kernels: tuple[str, ...],
        comparison: ComparisonRecord | None,
        ranks: RankSync,
        bucket: Bucket | None = None,
    ) -> None:
        """Make a selection final, store it, and send it to the other ranks.

        ``bucket``: that of the sizes at which it holds; None if it holds at all sizes.
        """
        context = self._context
        self._decide(selection.version, reason)
        record = selection.record(reason, kernels, comparison, context.about)
        record = structs.replace(
            record, blocks=self.report.blocks, earlier=tuple(self.report.earlier)
        )
        key = context.graph if bucket is None else sized_key(context.graph, bucket)
        try:
            ranks.publish(context.graph, selection, context.store)
            context.store.save(key, record)
        except Exception as error:  # the selection is valid for this process all the same
            warn_once(f"a selection is not stored: {error}")

    def _commit_inductor(self, reason: str, ranks: RankSync) -> None:
        """Select Inductor's version, because the candidate cannot be compared; with measured block
        sizes if that is faster.

        If it is the second one, the comparison of the first one is what decided.
        """
        comparison = None
        if self.report.earlier:
            selection = self._selection or Selection("stitched")
            comparison = self.report.earlier.pop().comparison
            verdict = VERDICTS[judge(comparison)]
            reason = f"{verdict}; {selection.title}: {reason}"
        self._commit_best(reason, comparison, ranks)

    def _commit_best(
        self, reason: str, comparison: ComparisonRecord | None, ranks: RankSync
    ) -> None:
        """Select the version that candidates were compared with."""
        if self._best.version == "tuned":
            reason = f"Inductor's kernels with tuned blocks are faster; {reason}"
        self._commit(self._best, reason, (), comparison, ranks)

    def _fall_back(self, reason: str, error: Exception) -> None:
        """After a failure of the backend: warn once, and keep Inductor's version.

        Nothing is stored, so the next run tries again; but what the first candidate's comparison
        has found is, if the second one fails.
        """
        warn_once(f"{reason}; Inductor's version runs")
        _log.debug("nostall: %s", reason, exc_info=error)
        ranks = RankSync.current()
        if self.report.earlier:
            self._commit_inductor(reason, ranks)
            return
        self._decide(self._best.version, reason)
        if ranks.is_leader:
            with contextlib.suppress(Exception):  # other ranks then go on to ask at each call
                ranks.publish(self._context.graph, Selection("inductor"), self._context.store)

    def _decide(self, version: Version, reason: str) -> None:
        """Run the active version from now on, and free everything else."""
        self._state.decide(version, reason)
        # References keep the other version, its memory and its graph alive.
        self._baseline = self._active
        self._build_candidate, self._candidate = _already_selected, None
        self._selection = None
        self._context = replace(
            self._context,
            tasks=BackgroundTasks(),
            repair=None,
            next_selection=no_selection,
            sized=None,
        )
        STEPS.leave(self)
        if not STEPS.pending:
            self.report.add_cpu_seconds(stop_workers())
        print_progress(str(self.report), last=True)
        _log.info("nostall: %s", self.report)

    def _print_progress(self, text: str) -> None:
        print_progress(f"graph {self._context.graph[:8]}: {text}")


def _is_tracing(args: Sequence[Any]) -> bool:
    """Whether PyTorch traces this graph instead of calling it.

    It does so if it splits a graph for DistributedDataParallel: each part's outputs are traced as
    the inputs of the next part.
    """
    return any(isinstance(value, FakeTensor) for value in args)


def _already_selected(args: Sequence[Any], selection: Selection | None) -> Candidate | None:
    raise AssertionError("no candidate is built after the selection")
