"""The simulated engine against a slow one, and what every simulation must keep."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from nostall.serving.errors import BadSchedule
from nostall.serving.scheduling import POLICIES, Limits
from nostall.serving.simulate import engine as engine_module
from nostall.serving.simulate.engine import EngineSettings, simulate
from nostall.serving.simulate.step_costs import StepContent, StepCosts
from nostall.serving.traces import HASH_BLOCK, Request
from tests.unit.serving.simulate.slow_engine import run

COSTS = StepCosts(
    (1.0, 8.0, 64.0),
    (0.01, 0.012, 0.05),
    0.003,
    1e-7,
    3e-6,
    0.0,
    0.0,
    StepContent(64, 10_000, 64, 10_000),
    100,
    4096,
    "test",
)
requests = st.lists(
    st.tuples(st.floats(0, 2), st.integers(1, 150), st.integers(1, 40)), min_size=1, max_size=10
).map(lambda drawn: [Request(*fields) for fields in sorted(drawn)])


@st.composite
def engine_settings(draw: st.DrawFn) -> EngineSettings:
    budget = draw(st.integers(1, 80))
    return EngineSettings(
        draw(st.sampled_from(list(POLICIES))),
        Limits(budget, draw(st.integers(1, 8)), draw(st.integers(1, budget))),
        kv_tokens=draw(st.sampled_from([256, 400, 1000, 4000])),
    )


@given(requests, engine_settings())
@limits(max_examples=80)
def test_metrics_are_those_of_the_slow_engine(
    trace: list[Request], settings: EngineSettings
) -> None:
    metrics, slow = simulate(trace, COSTS, settings), run(trace, COSTS, settings)
    assert metrics.steps == slow.steps
    assert metrics.preemptions == slow.preemptions
    assert metrics.busy_s == slow.busy_s
    assert metrics.output_tokens == sum(request.output for request in trace)
    assert max(slow.step_tokens) <= settings.limits.budget
    assert metrics.mean_step_tokens * metrics.steps == pytest.approx(sum(slow.step_tokens))
    first = [job.token_times[0] - job.request.arrival_s for job in slow.jobs]
    last = [job.token_times[-1] - job.request.arrival_s for job in slow.jobs]
    gaps = np.concatenate([np.diff(job.token_times) for job in slow.jobs])
    assert metrics.time_to_first_token.p99 == np.percentile(first, 99)
    assert metrics.latency.mean == np.mean(last)
    if len(gaps):
        assert metrics.time_between_tokens.p99 == np.percentile(gaps, 99)
        assert metrics.time_between_tokens.mean == pytest.approx(gaps.mean(), rel=1e-12)


@st.composite
def hashed_requests(draw: st.DrawFn) -> list[Request]:
    """Requests that share prefixes: each continues one of a few conversations."""
    trace = []
    for number in range(draw(st.integers(1, 12))):
        prompt = draw(st.integers(1, 5 * HASH_BLOCK))
        blocks, conversation = -(-prompt // HASH_BLOCK), draw(st.integers(0, 2))
        hashes = [100 * conversation + place for place in range(blocks)]
        if prompt % HASH_BLOCK and draw(st.booleans()):
            hashes[-1] = 10_000 + number
        output = draw(st.integers(1, 20))
        trace.append(Request(number * draw(st.floats(0, 0.1)), prompt, output, tuple(hashes)))
    return sorted(trace, key=lambda request: request.arrival_s)


@given(
    hashed_requests(),
    st.sampled_from(list(POLICIES)),
    st.sampled_from([8, 12, 400]),
    st.integers(0, 4),
)
@limits(max_examples=60)
def test_no_token_and_no_block_is_lost_with_shared_prefixes_and_speculation(
    trace: list[Request], policy: str, blocks: int, drafts: int
) -> None:
    settings = EngineSettings(
        policy, Limits(300, 6, 20), kv_tokens=blocks * HASH_BLOCK, draft_tokens=drafts
    )
    engine = engine_module._Engine(trace, COSTS, settings, seed=1)
    while engine.step():
        assert engine.running.table.min(initial=0) >= -1
        for row, lease in zip(engine.running.table, engine.running.leases, strict=True):
            capacity = len(lease.blocks) * HASH_BLOCK
            assert row[engine_module.KEYS] + row[engine_module.ROOM] == capacity
    metrics = engine.metrics()
    assert engine.tree.available == blocks
    assert metrics.rejected == 0
    assert engine.outcomes.generated.tolist() == [request.output for request in trace]
    assert 0 <= metrics.cached_tokens < metrics.prompt_tokens
    assert metrics == simulate(trace, COSTS, settings, seed=1)


@pytest.mark.parametrize(("policy", "cached"), [("vllm", 512), ("xy-serve", 999)])
def test_xy_serve_reuses_a_block_in_part_by_a_copy(policy: str, cached: int) -> None:
    trace = [Request(0.0, 1000, 5, (1, 2)), Request(50.0, 1000, 5, (1, 2))]
    assert simulate(trace, COSTS, EngineSettings(policy)).cached_tokens == cached
    without = EngineSettings(policy, uses_prefix_hashes=False)
    assert simulate(trace, COSTS, without).cached_tokens == 0


def test_reserved_tokens_bound_the_time_between_tokens() -> None:
    """Long prompts arrive while four requests decode."""
    trace = [*(Request(0.0, 8, 40) for _ in range(4)), *(Request(0.1, 640, 2) for _ in range(6))]
    gaps = {}
    for reserved in (1, 4):
        settings = EngineSettings("xy-serve", Limits(64, 8, reserved), kv_tokens=8000)
        gaps[reserved] = simulate(trace, COSTS, settings).time_between_tokens.p99
    assert gaps[1] > 2 * gaps[4]


def test_requests_beyond_the_cache_are_rejected_and_counted() -> None:
    trace = [Request(0.0, 10, 2), Request(0.0, 5000, 2), Request(9.0, 10, 2)]
    metrics = simulate(trace, COSTS, EngineSettings(kv_tokens=512))
    assert (metrics.rejected, metrics.requests, metrics.output_tokens) == (1, 3, 4)
    nothing = simulate(trace[1:2], COSTS, EngineSettings(kv_tokens=512))
    assert (nothing.rejected, nothing.duration_s, nothing.output_tokens_per_s) == (1, 0.0, 0.0)


def test_more_accepted_drafts_give_fewer_steps_and_the_same_tokens() -> None:
    trace = [Request(0.0, 20, 200) for _ in range(4)]
    steps = []
    for acceptance in (0.0, 0.5, 1.0):
        settings = EngineSettings(draft_tokens=3, acceptance=acceptance)
        metrics = simulate(trace, COSTS, settings, seed=3)
        assert metrics.output_tokens == 800
        steps.append(metrics.steps)
    assert steps[0] > steps[1] > steps[2]
    with pytest.raises(BadSchedule, match=r"acceptance of 1.5; allowed are 0 or more, and 0 to 1"):
        EngineSettings(acceptance=1.5)


def _stepwise(trace: list[Request], settings: EngineSettings) -> engine_module._Engine:
    """The engine after single steps; at each, the keys that are not read are those of a walk."""
    engine = engine_module._Engine(trace, COSTS, settings, seed=1)
    engine._decode_until_event = lambda: False  # type: ignore[method-assign]
    while engine.step():
        paths = [node for lease in engine.running.leases for node in lease.path]
        again = len(paths) - len({id(node) for node in paths})
        is_on = len(engine.running) >= engine_module.READ_ONCE_SEQUENCES
        assert engine._keys_read_before() == HASH_BLOCK * again * is_on * settings.reads_once
    return engine


@given(
    hashed_requests(),
    st.sampled_from(list(POLICIES)),
    st.sampled_from([8, 12, 400]),
    st.integers(1, 4),
)
@limits(max_examples=60)
def test_decodes_that_share_blocks_read_each_once(
    trace: list[Request], policy: str, blocks: int, fewest: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "READ_ONCE_SEQUENCES", fewest)
        settings = EngineSettings(
            policy, Limits(300, 6, 20), kv_tokens=blocks * HASH_BLOCK, reads_once=True
        )
        metrics = simulate(trace, COSTS, settings, seed=1)
        assert metrics == _stepwise(trace, settings).metrics()
        assert metrics.output_tokens == sum(request.output for request in trace)


def test_reading_once_gains_what_the_keys_of_shared_blocks_cost() -> None:
    trace = [Request(0.0, 2 * HASH_BLOCK + 8, 21, (1, 2, 100 + n)) for n in range(40)]
    # The first request fills the cache; the others arrive when it has ended.
    trace = [Request(0.0, 2 * HASH_BLOCK + 8, 1, (1, 2, 3)), *trace]
    trace = [trace[0], *(Request(5.0, r.prompt, r.output, r.hashes) for r in trace[1:])]
    settings = EngineSettings("vllm", Limits(2048, 64, 64), kv_tokens=400 * HASH_BLOCK)
    apart, once = (
        simulate(trace, COSTS, EngineSettings(
            "vllm", settings.limits, settings.kv_tokens, reads_once=reads_once
        ))
        for reads_once in (False, True)
    )  # fmt: skip
    assert apart.steps == once.steps == 1 + 1 + 20
    saved = 20 * 39 * 2 * HASH_BLOCK * COSTS.key_s
    assert apart.busy_s - once.busy_s == pytest.approx(saved)
    few = [trace[0], *trace[1 : engine_module.READ_ONCE_SEQUENCES]]
    assert simulate(few, COSTS, settings).busy_s == pytest.approx(
        simulate(few, COSTS, EngineSettings(
            "vllm", settings.limits, settings.kv_tokens, reads_once=True
        )).busy_s
    )  # fmt: skip


def test_verifies_are_not_read_once() -> None:
    trace = [Request(0.0, 1000, 9, (1, 2)) for _ in range(40)]
    for drafts in (0, 3):
        apart, once = (
            simulate(
                trace,
                COSTS,
                EngineSettings(kv_tokens=10**5, draft_tokens=drafts, reads_once=reads_once),
            )
            for reads_once in (False, True)
        )
        assert (apart == once) == (drafts == 3)
