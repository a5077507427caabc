"""A seeded discrete-event simulation of a serving engine: one event is one step of the engine.

Each step the policy plans tokens, memory is found for them, and the cost model gives the step's
time. As in vLLM, a running request that gets no block preempts the last admitted one, which later
computes its prompt and its output again. A block holds 16 tokens; with prefix hashes it holds as
many as a hash.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nostall.serving.errors import BadSchedule
from nostall.serving.scheduling import Lease, Limits, PrefixTree, Queues, find_policy
from nostall.serving.simulate.step_costs import StepContent, StepCosts
from nostall.serving.traces import HASH_BLOCK, Request

Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

REQUEST = 0
"""Index of the request in the trace."""
PROMPT_LEFT = 1
"""Prompt tokens that are not computed."""
KEYS = 2
"""Tokens whose keys are computed or cached."""
OUTPUT_LEFT = 3
"""Tokens to generate."""
SKIPPED = 4
"""Steps since the last one with tokens of this request."""
ROOM = 5
"""Tokens that its blocks can take."""
COLUMNS = 6


@dataclass(eq=False)
class Running:
    """The requests that are admitted; row i is the i-th admitted one that still runs."""

    table: Int64s = field(default_factory=lambda: np.zeros((0, COLUMNS), np.int64))
    leases: list[Lease] = field(default_factory=list[Lease])

    def __len__(self) -> int:
        return len(self.leases)

    @property
    def is_prefill(self) -> Bools:
        return np.asarray(self.table[:, PROMPT_LEFT] > 0)

    def append(self, rows: list[tuple[int, ...]], leases: list[Lease]) -> None:
        """Admit requests."""
        self.table = np.concatenate([self.table, np.array(rows, np.int64)])
        self.leases.extend(leases)

    def keep(self, kept: Bools) -> None:
        """Remove the requests that are not kept; their leases must have ended."""
        self.table = self.table[kept]
        self.leases = [lease for lease, is_kept in zip(self.leases, kept, strict=True) if is_kept]


NO_REFERENCE_COUNTS = {"cache": True, "_nrt": False}
"""Options of functions that allocate nothing: numba then counts no references."""


class Outcomes(NamedTuple):
    """What the requests of a trace have received, one entry each."""

    generated: Int64s
    first_token_s: Floats
    """Time of the first token; not a number before it."""
    last_token_s: Floats


@njit(**NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def step_content(table: Int64s, tokens: Int64s) -> tuple[int, int, int, int]:
    """Prefill tokens, their query-key pairs, decode tokens, and keys of decodes of a step."""
    prefill = pairs = decode = keys = 0
    for place in range(len(tokens)):
        count = tokens[place]
        if count and table[place, PROMPT_LEFT] > 0:
            prefill += count
            pairs += count * table[place, KEYS] + count * (count + 1) // 2
        elif count:
            decode += count
            keys += table[place, KEYS] + count
    return prefill, pairs, decode, keys


@njit(**NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def missing_blocks(table: Int64s, tokens: Int64s, block: int, missing: Int64s) -> int:
    """Write the blocks that each request needs for its tokens; returns their sum."""
    total = 0
    for place in range(len(tokens)):
        short = max(tokens[place] - table[place, ROOM], 0)
        missing[place] = (short + block - 1) // block
        total += missing[place]
    return total


@njit(**NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def advance(
    table: Int64s, tokens: Int64s, most_emitted: Int64s, now: float, outcomes: Outcomes,
    gaps: Floats,
) -> tuple[int, int, int]:  # fmt: skip
    """Apply a step that ends now: compute its tokens and emit what they yield.

    A prefill emits one token with the last token of its prompt; a decode emits at most
    ``most_emitted``. Writes the time between tokens of each emitted token but a request's first to
    ``gaps``. Returns the number of these, of prompts that are complete now (their SKIPPED is -1),
    and of requests that have all their tokens.
    """
    gap_count = completed = finished = 0
    for place in range(len(tokens)):
        count = tokens[place]
        if count == 0:
            table[place, SKIPPED] += 1
            continue
        table[place, SKIPPED] = 0
        emitted = 0
        if table[place, PROMPT_LEFT] > 0:
            table[place, PROMPT_LEFT] -= count
            if table[place, PROMPT_LEFT] == 0:
                emitted = 1
                completed += 1
                table[place, SKIPPED] = -1
        else:
            emitted = min(count, most_emitted[place])
            count = emitted
        table[place, KEYS] += count
        table[place, ROOM] -= count
        if emitted:
            request = table[place, REQUEST]
            if np.isnan(outcomes.first_token_s[request]):
                outcomes.first_token_s[request] = now
            else:
                gap = (now - outcomes.last_token_s[request]) / emitted
                gaps[gap_count : gap_count + emitted] = gap
                gap_count += emitted
            outcomes.last_token_s[request] = now
            outcomes.generated[request] += emitted
            table[place, OUTPUT_LEFT] -= emitted
            finished += table[place, OUTPUT_LEFT] <= 0
    return gap_count, completed, finished


@dataclass(frozen=True)
class Distribution:
    """Mean and percentiles of a time, in seconds."""

    mean: float
    p50: float
    p99: float

    @staticmethod
    def of(values: Floats) -> Distribution:
        """The distribution of values; zeros if there are none."""
        if not len(values):
            return Distribution(0.0, 0.0, 0.0)
        p50, p99 = np.percentile(values, [50, 99])
        return Distribution(float(values.mean()), float(p50), float(p99))


@dataclass(frozen=True)
class Metrics:
    """Metrics of one simulation; all times are modelled."""

    policy: str
    requests: int
    rejected: int
    """Requests that the KV cache cannot hold."""
    duration_s: float
    """Time from the first arrival to the last token."""
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    """Prompt tokens that a cached prefix spared; those of re-computed requests are not counted."""
    time_to_first_token: Distribution
    time_between_tokens: Distribution
    latency: Distribution
    """From arrival to the last token."""
    steps: int
    busy_s: float
    """Time of all steps."""
    mean_step_tokens: float
    preemptions: int
    extrapolated_steps: int
    """Steps larger than all measured ones."""

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.duration_s if self.duration_s else 0.0

    @property
    def requests_per_s(self) -> float:
        return (self.requests - self.rejected) / self.duration_s if self.duration_s else 0.0


EVENTS_PER_REPORT = 1000
BLOCK = 16
"""Tokens of a block without prefix hashes."""
READ_ONCE_SEQUENCES = 33
"""Fewest decodes that read shared prefixes once: those that the vLLM plug-in serves of a model of 8
KV heads on 132 SMs."""


@dataclass(frozen=True)
class EngineSettings:
    """Settings of the simulated engine."""

    policy: str = "vllm"
    limits: Limits = field(default_factory=Limits)
    kv_tokens: int | None = None
    """Tokens of the KV cache; None: as many as the measured engine had."""
    uses_prefix_hashes: bool = True
    """Whether requests with equal hashes share blocks."""
    draft_tokens: int = 0
    """Draft tokens of a verify; 0: no speculation."""
    acceptance: float = 0.7
    """Probability that a draft token is accepted if those before it are."""
    reads_once: bool = False
    """Whether steps of decodes alone read blocks that sequences share once. Such a key then costs
    what a key of one sequence does; the adding of partial results is left out."""

    def __post_init__(self) -> None:
        if self.draft_tokens < 0 or not 0 <= self.acceptance <= 1:
            raise BadSchedule(
                f"{self.draft_tokens} draft tokens with an acceptance of {self.acceptance}; "
                "allowed are 0 or more, and 0 to 1"
            )


def simulate(
    requests: Sequence[Request],
    costs: StepCosts,
    settings: EngineSettings,
    seed: int = 0,
    progress: Callable[[int], None] = lambda done: None,
) -> Metrics:
    """Run all requests, sorted by arrival; the same inputs and seed give the same metrics.

    ``progress`` is called with the number of requests that are done, from time to time.
    """
    engine = _Engine(requests, costs, settings, seed)
    for event in itertools.count(1):
        if not engine.step():
            break
        if event % EVENTS_PER_REPORT == 0:
            progress(engine.done)
    return engine.metrics()


class _Engine:
    """State of one simulation."""

    def __init__(
        self, requests: Sequence[Request], costs: StepCosts, settings: EngineSettings, seed: int
    ) -> None:
        self.requests, self.costs, self.settings = requests, costs, settings
        self.policy = find_policy(settings.policy)
        self.rng = np.random.default_rng(seed)
        has_hashes = settings.uses_prefix_hashes and any(r.hashes for r in requests)
        self.block = HASH_BLOCK if has_hashes else BLOCK
        self.uses_hashes = has_hashes
        self.copies_partial = settings.policy == "xy-serve"
        blocks = (settings.kv_tokens or costs.kv_tokens) // self.block
        self.tree = PrefixTree(max(blocks, 1))
        self.running = Running()
        self.waiting: deque[int] = deque()
        self.now = 0.0
        self.arrived = self.done = self.steps = 0
        self.step_tokens = self.preemptions = self.extrapolated = self.cached = 0
        self.busy_s = 0.0
        count = len(requests)
        needed = [-(-(r.prompt + r.output + settings.draft_tokens) // self.block) for r in requests]
        self.is_rejected = np.array(needed) + 1 > blocks
        self.was_admitted = np.zeros(count, np.bool_)
        self.outcomes = Outcomes(
            np.zeros(count, np.int64), np.full(count, np.nan), np.full(count, np.nan)
        )
        self.gaps: list[Floats] = []

    def step(self) -> bool:
        """Run the next step; False if all requests are done."""
        self._arrive()
        if not len(self.running) and not self.waiting:
            if self.arrived == len(self.requests):
                return False
            self.now = self.requests[self.arrived].arrival_s
            self._arrive()
            return True
        if not self.waiting and self._decode_until_event():
            return True
        running = self.running
        queues = Queues(
            self._needed(), running.is_prefill, running.table[:, SKIPPED], self._waiting_tokens()
        )
        plan = self.policy(queues, self.settings.limits)
        tokens, is_short = self._find_memory(plan.running)
        if not is_short:
            tokens = self._admit(plan.admitted, tokens)
        self._compute(tokens)
        return True

    def _decode_until_event(self) -> bool:
        """Run decode steps until a request ends or arrives, all at once; False if it cannot.

        The result equals that of single steps in every bit. Most steps of a trace are such steps.
        """
        running, limits = self.running, self.settings.limits
        table, count = running.table, len(running)
        if self.settings.draft_tokens or count > limits.budget or running.is_prefill.any():
            return False
        steps = int(table[:, OUTPUT_LEFT].min())
        distinct = int(table[:, KEYS].sum()) - self._keys_read_before()
        keys = float(distinct) + count * np.arange(1.0, steps + 1)
        ends = np.cumsum([self.now, *self.costs.decode_seconds(count, keys)])[1:]
        if self.arrived < len(self.requests):
            arrival = self.requests[self.arrived].arrival_s
            steps = min(steps, int(np.searchsorted(ends, arrival)) + 1)
        missing = -(-np.maximum(steps - table[:, ROOM], 0) // self.block)
        if int(missing.sum()) > self.tree.available:
            return False
        for place in np.flatnonzero(missing).tolist():
            self._reserve(place, int(missing[place]))
        ends, keys = ends[:steps], keys[:steps]
        requests = table[:, REQUEST]
        self.gaps.append(ends[0] - self.outcomes.last_token_s[requests])
        self.gaps.append(np.repeat(np.diff(ends), count))
        for seconds in self.costs.decode_seconds(count, keys).tolist():
            self.busy_s += seconds
        self.now = float(ends[-1])
        self.steps += steps
        self.step_tokens += steps * count
        self.extrapolated += sum(
            self.costs.extrapolates(StepContent(0, 0, count, int(k))) for k in keys
        )
        table[:, SKIPPED] = 0
        table[:, KEYS] += steps
        table[:, ROOM] -= steps
        table[:, OUTPUT_LEFT] -= steps
        self.outcomes.generated[requests] += steps
        self.outcomes.last_token_s[requests] = self.now
        self._finish()
        return True

    def _arrive(self) -> None:
        """Queue the requests that have arrived."""
        while (
            self.arrived < len(self.requests) and self.requests[self.arrived].arrival_s <= self.now
        ):
            if self.is_rejected[self.arrived]:
                self.done += 1
            else:
                self.waiting.append(self.arrived)
            self.arrived += 1

    def _needed(self) -> Int64s:
        """Tokens that each running request can compute."""
        table = self.running.table
        drafts = np.minimum(self.settings.draft_tokens, table[:, OUTPUT_LEFT] - 1)
        prompt_left = table[:, PROMPT_LEFT]
        return np.where(prompt_left > 0, prompt_left, 1 + drafts)

    def _waiting_tokens(self) -> Int64s:
        """Tokens without cache of the first waiting requests, as far as the budget reaches."""
        limits = self.settings.limits
        tokens: list[int] = []
        left = limits.budget
        for request in self.waiting:
            if left <= 0 or len(self.running) + len(tokens) >= limits.max_running:
                break
            tokens.append(self._prompt(request) - self._cached(request))
            left -= tokens[-1]
        return np.array(tokens, np.int64)

    def _prompt(self, request: int) -> int:
        """Tokens to compute before the next one is generated."""
        return self.requests[request].prompt + int(self.outcomes.generated[request])

    def _hashes(self, request: int) -> tuple[int, ...]:
        return self.requests[request].hashes if self.uses_hashes else ()

    def _cached(self, request: int) -> int:
        """Prompt tokens that the cache holds; at least one token is computed."""
        hashes = self._hashes(request)
        if not hashes:
            return 0
        return self._usable(request, len(self.tree.match(hashes)))

    def _usable(self, request: int, matched_blocks: int) -> int:
        """Tokens of matched blocks that a request can use: whole blocks, or all but one token."""
        prompt = self.requests[request].prompt
        tokens = min(matched_blocks * self.block, self._prompt(request) - 1, prompt)
        return tokens if self.copies_partial else tokens // self.block * self.block

    def _find_memory(self, planned: Int64s) -> tuple[Int64s, bool]:
        """Reserve blocks for the planned tokens, preempting where there are none.

        Returns the tokens of the requests that still run, and whether one was preempted.
        """
        missing = np.empty_like(planned)
        total = missing_blocks(self.running.table, planned, self.block, missing)
        if total <= self.tree.available:
            for place in np.flatnonzero(missing).tolist():
                self._reserve(place, int(missing[place]))
            return planned, False
        place = 0
        while place < len(self.running):
            if self._reserve(place, int(missing[place])):
                place += 1
            else:
                self._preempt()
        return planned[: len(self.running)], True

    def _reserve(self, place: int, blocks: int) -> bool:
        if not self.tree.reserve(self.running.leases[place], blocks):
            return False
        self.running.table[place, ROOM] += blocks * self.block
        return True

    def _preempt(self) -> None:
        """Send the last admitted request back to the front of the queue."""
        running = self.running
        self.tree.end(running.leases[-1])
        self.waiting.appendleft(int(running.table[-1, REQUEST]))
        running.keep(np.arange(len(running)) < len(running) - 1)
        self.preemptions += 1

    def _admit(self, admitted: Int64s, tokens: Int64s) -> Int64s:
        """Admit waiting requests while there is memory; returns the tokens of all that run."""
        rows: list[tuple[int, ...]] = []
        leases: list[Lease] = []
        given: list[int] = []
        for planned in admitted.tolist():
            request = self.waiting[0]
            found = self._begin(request, planned)
            if found is None:
                break
            lease, cached, taken = found
            self.waiting.popleft()
            left = self._prompt(request) - cached
            room = len(lease.blocks) * self.block - cached
            output_left = self.requests[request].output - int(self.outcomes.generated[request])
            rows.append((request, left, cached, output_left, 0, room))
            leases.append(lease)
            given.append(taken)
            if not self.was_admitted[request]:
                self.cached += cached
            self.was_admitted[request] = True
        if not rows:
            return tokens
        self.running.append(rows, leases)
        return np.concatenate([tokens, np.array(given, np.int64)])

    def _begin(self, request: int, planned: int) -> tuple[Lease, int, int] | None:
        """A lease with blocks for the planned tokens, the cached tokens, and those to compute."""
        hashes = self._hashes(request)
        match = self.tree.match(hashes)
        cached = self._usable(request, len(match)) if hashes else 0
        # The block of the last cached token is copied if it is not used to its end.
        lease = self.tree.begin(match[: cached // self.block])
        taken = min(planned, self._prompt(request) - cached)
        blocks = -(-(cached + taken) // self.block) - len(lease.blocks)
        if not self.tree.reserve(lease, blocks):
            self.tree.end(lease)
            return None
        return lease, cached, taken

    def _compute(self, tokens: Int64s) -> None:
        """Advance the time by the step's cost, and the requests by their tokens."""
        running, outcomes = self.running, self.outcomes
        content = StepContent(*step_content(running.table, tokens))
        if content.decode_tokens == len(running):
            keys = content.decode_keys - self._keys_read_before()
            content = content._replace(decode_keys=keys)
        seconds = self.costs.seconds(content)
        self.now += seconds
        self.busy_s += seconds
        self.steps += 1
        self.step_tokens += content.prefill_tokens + content.decode_tokens
        self.extrapolated += self.costs.extrapolates(content)
        gaps = np.empty(len(tokens) * (1 + self.settings.draft_tokens))
        gap_count, completed, finished = advance(
            running.table, tokens, self._most_emitted(len(tokens)), self.now, outcomes, gaps
        )
        self.gaps.append(gaps[:gap_count])
        if completed:
            self._share_prompts()
        if finished:
            self._finish()

    def _keys_read_before(self) -> int:
        """Keys that decodes of all running requests do not read: another one has read them."""
        settings, leases = self.settings, self.running.leases
        if not settings.reads_once or settings.draft_tokens or len(leases) < READ_ONCE_SEQUENCES:
            return 0
        in_paths = sum(len(lease.path) for lease in leases)
        distinct = self.tree.held - sum(len(lease.own) for lease in leases)
        return self.block * (in_paths - distinct)

    def _most_emitted(self, count: int) -> Int64s:
        """Tokens that a verify of each request yields: one, and the accepted part of its draft."""
        drafts = self.settings.draft_tokens
        if not drafts:
            return np.ones(count, np.int64)
        is_accepted = self.rng.random((count, drafts)) < self.settings.acceptance
        return np.asarray(1 + np.cumprod(is_accepted, axis=1).sum(axis=1), np.int64)

    def _share_prompts(self) -> None:
        """Share the full blocks of prompts that this step completed."""
        if not self.uses_hashes:
            return
        for place in np.flatnonzero(self.running.table[:, SKIPPED] < 0).tolist():
            request = int(self.running.table[place, REQUEST])
            full = self.requests[request].prompt // self.block
            self.tree.publish(self.running.leases[place], self._hashes(request)[:full])

    def _finish(self) -> None:
        """Remove the requests that have all their tokens."""
        running = self.running
        is_done = running.table[:, OUTPUT_LEFT] <= 0
        for place in np.flatnonzero(is_done).tolist():
            request = int(running.table[place, REQUEST])
            hashes = self._hashes(request)
            if not self.copies_partial:
                hashes = hashes[: self.requests[request].prompt // self.block]
            self.tree.end(running.leases[place], hashes)
            self.done += 1
        running.keep(~is_done)

    def metrics(self) -> Metrics:
        """Metrics of the requests that are done."""
        arrivals = np.array([request.arrival_s for request in self.requests])
        served = ~self.is_rejected
        first = self.outcomes.first_token_s[served] - arrivals[served]
        last = self.outcomes.last_token_s[served] - arrivals[served]
        prompts = np.array([request.prompt for request in self.requests], np.int64)
        return Metrics(
            self.settings.policy,
            len(self.requests),
            int(self.is_rejected.sum()),
            float(np.nan_to_num(self.outcomes.last_token_s).max(initial=0.0)),
            int(prompts[served].sum()),
            int(self.outcomes.generated.sum()),
            self.cached,
            Distribution.of(first),
            Distribution.of(np.concatenate([np.zeros(0), *self.gaps])),
            Distribution.of(last),
            self.steps,
            self.busy_s,
            self.step_tokens / self.steps if self.steps else 0.0,
            self.preemptions,
            self.extrapolated,
        )
