"""Steps, layers and engines that prefix groups do not fit: right results, or FlashAttention.

Driven by vLLM's builders on CPU tensors: ``make test-vllm``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; run `make test-vllm`")

import torch
from cpu_group import (
    DIMS,
    KV_HEADS,
    PAGE,
    Group,
    HostGroupedTables,
    HostTables,
    common,
    layer,
    patch,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from nostall.attach.vllm import counts, gpu_backend
from nostall.attach.vllm.gpu_backend import STEP

FIELDS = {"block_size": PAGE, "num_kv_heads": KV_HEADS, "head_size": DIMS, "dtype": torch.float32}
FULL = FullAttentionSpec(**FIELDS)
LENGTHS = [150, 140, 131, 160, 33, 150]
MEMBERS = (1, 3, 5)


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    patch(monkeypatch)


def shared_group(seed: int = 0, pages: int = 8, **changes: Any) -> Group:
    """A group of layers whose sequences 0, 1, 3 and 5 have their first pages in common."""
    group = Group(FULL, {"a": layer(), "b": layer()}, seed=seed, **changes)
    group.table[group.table == 0] = 399  # vLLM gives the null block to nobody.
    for member in MEMBERS:
        group.table[member, :pages] = group.table[0, :pages]
    return group


def grouped() -> list[Any]:
    return [made for made in HostTables.made if isinstance(made, HostGroupedTables)]


def left() -> str:
    return str(counts.counts()["left to vLLM"])


@pytest.mark.parametrize("keys", [1, 16, 17, 33, 127, 128])
def test_a_prefix_that_is_longer_than_a_member(keys: int) -> None:
    """The member shares the whole pages of its own context; the others share all of theirs."""
    group = shared_group()
    lengths = [150, keys, 131, 160, 33, 150]
    group.check(group.builder.build(0, common([1] * 6, lengths, group.table)))
    assert grouped()[0].shared == 1


def test_without_prefix_caching_there_are_no_groups_and_one_line(caplog: Any) -> None:
    caplog.set_level("INFO", "nostall")
    cache = SimpleNamespace(cache_dtype="auto", enable_prefix_caching=False)
    groups = [Group(FULL, {name: layer()}, cache_config=cache) for name in "ab"]
    for group in groups:
        group.check(group.builder.build(0, common([1] * 6, LENGTHS, group.table)))
    assert [tables.shared for tables in grouped()] == [0, 0]
    lines = [record for record in caplog.records if "prefix caching is off" in record.message]
    assert len(lines) == 1


def test_a_kv_connector_loads_a_layer_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """By vLLM's own decorator of attention, with a connector that has the pages."""
    from vllm.model_executor.layers.attention import attention as vllm_attention
    from vllm.model_executor.layers.attention import kv_transfer_utils as transfer

    group = shared_group(kv_transfer_config=SimpleNamespace(kv_connector="Test"))
    metadata = group.builder.build(0, common([1] * 6, LENGTHS, group.table))
    loaded, saved = group.cache.clone(), []
    group.cache.fill_(float("nan"))
    connector = SimpleNamespace(
        has_connector_metadata=lambda: True,
        wait_for_layer_load=lambda name: group.cache.copy_(loaded),
        save_kv_layer=lambda name, cache, about: saved.append(about),
    )
    monkeypatch.setattr(transfer, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(transfer, "is_v1_kv_transfer_group", lambda: True)
    monkeypatch.setattr(transfer, "get_kv_transfer_group", lambda: connector)
    context = (metadata, None, group.cache, None)
    monkeypatch.setattr(vllm_attention, "get_attention_context", lambda name: context)

    def attend(layer_name: str) -> None:
        group.check(metadata)

    transfer.maybe_transfer_kv_layer(attend)("a")
    assert saved == [metadata]
    assert grouped()[0].shared == 1


@pytest.mark.parametrize("name", ["dcp", "pcp"])
def test_context_parallelism_is_left(name: str) -> None:
    parallel = layer()
    setattr(parallel, f"{name}_world_size", 2)
    group = Group(FULL, {"a": parallel})
    assert not hasattr(group.builder.build(0, common([1] * 6, LENGTHS, group.table)), STEP)
    assert "context parallelism" in left()
    assert not HostTables.made


def test_with_lora_graphs_of_one_size_are_captured_more_than_once() -> None:
    """vLLM captures each size with and without adapters; all read the tables of each step."""
    group = shared_group(lora_config=SimpleNamespace(max_loras=2))
    about = common([1] * 6, LENGTHS, group.table)
    captured = [getattr(group.builder.build_for_cudagraph_capture(about), STEP) for _ in range(2)]
    metadata = group.builder.build(0, about)
    for graph in captured:
        assert graph.tables is getattr(metadata, STEP).tables
    group.check(metadata)


def test_each_cache_group_has_the_prefixes_of_its_own_pages() -> None:
    first, second = shared_group(seed=1), shared_group(seed=2, pages=2)
    alone = Group(FULL, {"c": layer()}, seed=3)
    groups = (first, second, alone)
    built = [each.builder.build(0, common([1] * 6, LENGTHS, each.table)) for each in groups]
    for each, metadata in zip(groups, built, strict=True):
        each.check(metadata)
    # Two pages are fewer keys than the least prefix of the stand-in.
    assert [tables.shared for tables in grouped()] == [1, 0, 0]


def test_a_member_that_is_preempted_comes_back_with_other_pages() -> None:
    group = shared_group()
    table = group.table.clone()
    free = sorted(set(range(1, 400)) - set(table.flatten().tolist()))

    def run(query: list[int], keys: list[int], rows: list[int]) -> None:
        group.check(group.builder.build(0, common(query, keys, table[rows].clone())))

    run([1] * 6, [150, 140, 131, 155, 33, 150], [0, 1, 2, 3, 4, 5])
    run([1] * 5, [151, 132, 156, 34, 151], [0, 2, 3, 4, 5])  # 1 is preempted
    table[1] = torch.tensor(free[: table.shape[1]])  # and its pages were given away
    run([1] * 5 + [64], [152, 133, 157, 35, 152, 64], [0, 2, 3, 4, 5, 1])
    table[1, :4] = table[0, :4]  # its next chunk finds some pages in the prefix cache
    run([1] * 5 + [77], [153, 134, 158, 36, 153, 141], [0, 2, 3, 4, 5, 1])
    run([1] * 6, [154, 142, 135, 159, 37, 154], [0, 1, 2, 3, 4, 5])
    assert grouped()[0].shared == 3  # the steps of decodes


@pytest.mark.parametrize("fault", ["too large", "no memory", "no kernel"])
def test_a_scratch_without_memory_is_left(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        if fault == "no memory":
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        raise ValueError("out of resources: shared memory")

    if fault == "too large":
        monkeypatch.setattr(gpu_backend, "MAX_SCRATCH_BYTES", 1)
    else:
        monkeypatch.setattr(HostGroupedTables, "warm_up", fail)
    group = shared_group()
    metadata = group.builder.build(0, common([1] * 6, LENGTHS, group.table))
    group.check(metadata)
    assert not hasattr(metadata, STEP)
    reasons = {
        "too large": "MiB of scratch",
        "no memory": "out of memory",
        "no kernel": "resources",
    }
    assert reasons[fault] in left()


def test_more_sequences_than_the_limit_are_left() -> None:
    scheduler = SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=256)
    group = shared_group(scheduler_config=scheduler)
    metadata = group.builder.build(0, common([1] * 6, LENGTHS, group.table))
    group.check(metadata)
    assert not hasattr(metadata, STEP)
    assert "more sequences than the scheduler's limit" in left()
    group.check(group.builder.build(0, common([1] * 4, LENGTHS[:4], group.table)))
