"""The tables of a step lie in buffers that keep their addresses, with the builder's content."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from nostall.attach.vllm.step_tables import StepDtypes, StepLimits, StepTables  # noqa: E402
from nostall.serving.attention.config import AttentionShape  # noqa: E402
from nostall.serving.attention.rules import PLANS  # noqa: E402
from nostall.serving.tables.columns import PROGRAMS, REDUCTIONS, UNITS  # noqa: E402
from nostall.serving.tables.host import HostBuilder  # noqa: E402

LIMITS = StepLimits(sequences=16, tokens=512, keys=2048)
STEPS = (
    ([1] * 16, [700 + 50 * i for i in range(16)]),
    ([8, 8, 0, 0], [2000, 9, 0, 0]),
    ([1, 400, 1], [2048, 400, 1]),
    ([0, 0], [0, 0]),
)


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> StepTables:
    properties = types.SimpleNamespace(multi_processor_count=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return StepTables(AttentionShape(), PLANS["mixed"], LIMITS, torch.device("cpu"))


def test_each_step_fills_the_same_buffers(tables: StepTables) -> None:
    settings = tables.plan.table_settings(tables.shape, 4)
    addresses = set()
    for query, keys in STEPS:
        lengths = np.array(query, np.int32), np.array(keys, np.int32)
        tables.build(*lengths)
        expected = HostBuilder.of(settings, tables.capacity).build(*lengths)
        found = tables.buffers.tables
        units, reductions = expected.counts[UNITS], expected.counts[REDUCTIONS]
        assert found.counts.tolist() == expected.counts.tolist()
        assert found.tasks[:units].tolist() == expected.tasks[:units].tolist()
        assert found.reductions[:reductions].tolist() == expected.reductions[:reductions].tolist()
        offsets = expected.counts[PROGRAMS] + 1
        assert (
            found.program_offsets[:offsets].tolist() == expected.program_offsets[:offsets].tolist()
        )
        addresses.add((found.tasks.data_ptr(), found.counts.data_ptr()))
    assert len(addresses) == 1


def test_a_step_is_whole_whatever_the_buffers_held(tables: StepTables) -> None:
    """vLLM's sleep discards what its pool of the cache holds, and tells no builder."""
    buffers, draw = tables.buffers, torch.Generator().manual_seed(0)
    for query, keys in STEPS:
        lengths = np.array(query, np.int32), np.array(keys, np.int32)
        kept = []
        for _ in range(2):
            for tensor in (*written(buffers), buffers.partial):
                tensor.view(torch.int32).random_(generator=draw)
            tables.build(*lengths)
            units, reductions = buffers.tables.counts[[UNITS, REDUCTIONS]].tolist()
            # The kernels read the words up to the last unit, and the used reductions.
            words = tables._words[: tables._head + 8 * units].clone()
            kept.append((words, buffers.tables.reductions[:reductions].clone()))
            assert buffers.queue.tolist() == [0, 0]
        for found, wanted in zip(*kept, strict=True):
            assert torch.equal(found, wanted)


def written(buffers: Any) -> list[Any]:
    found = buffers.tables
    parts = [found.tasks, found.program_offsets, found.reductions, found.counts, buffers.queue]
    return [*parts, found.prefix_rows]


def test_the_queue_and_the_counts_do_not_overlap(tables: StepTables) -> None:
    for number, part in enumerate(written(tables.buffers)):
        part.fill_(number)
    values = [set(part.flatten().tolist()) for part in written(tables.buffers)]
    assert values == [{number} for number in range(len(values))]


def test_the_capacity_holds_the_largest_step(tables: StepTables) -> None:
    query = np.array([1] * 15 + [497], np.int32)
    tables.build(query, np.full(16, 2048, np.int32))
    assert tables.buffers.tables.counts[UNITS] > 0


def test_all_tables_begin_at_a_border_of_16_bytes(tables: StepTables) -> None:
    found = tables.buffers.tables
    assert tables.buffers.queue.data_ptr() % 16 == 0
    for part in (found.counts, found.program_offsets, found.tasks, found.reductions):
        assert part.data_ptr() % 16 == 0


@pytest.mark.slow
def test_the_plug_in_compiles_the_kernels_that_the_native_search_starts_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    from nostall.serving.batch.examples import make_batch
    from nostall.tuning.attention.sources import AttentionStep, recorded_sources, step_sources

    properties = types.SimpleNamespace(multi_processor_count=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    shape, plan = AttentionShape(2, 1, 64), PLANS["decode"]
    made = StepTables(shape, plan, LIMITS, torch.device("cpu"))
    with recorded_sources("sm_90", "vLLM") as found:
        made.warm_up(StepDtypes(torch.float16, torch.float16), LIMITS.keys // shape.page_size)
    step = AttentionStep(make_batch([1, 1], [2000, 33]), shape, plan, "float16", "two decodes")
    expected = step_sources(step, 4)
    assert [s.cubin for s in found[: len(expected)]] == [s.cubin for s in expected]
