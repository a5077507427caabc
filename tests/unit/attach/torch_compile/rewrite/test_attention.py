"""Masks of attention in graphs that Dynamo traces: what is proven goes, all else stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from nostall.attach.torch_compile.graph_copies import clone_graph  # noqa: E402
from nostall.attach.torch_compile.rewrite import attention  # noqa: E402
from nostall.attach.torch_compile.rewrite.attention import (  # noqa: E402
    ATTENTION,
    CAUSAL,
    CONTIGUOUS,
    DROPOUT,
    DROPPED,
    keep_attention,
)

HEADS, LENGTH, WIDTH = 2, 12, 8
sdpa = torch.nn.functional.scaled_dot_product_attention


def positions(n: int = LENGTH) -> Any:
    return torch.arange(n)


def rows(n: int = LENGTH) -> Any:
    return torch.arange(n)[:, None]


def expanded(mask: Any, batch: int = 2) -> Any:
    return mask.expand(batch, 1, mask.shape[-2], mask.shape[-1])


ALL_TRUE: dict[str, Callable[[], Any]] = {
    "comparison of one position": lambda: expanded(
        ((positions() + 0)[None, None, :, None] >= 0).expand(2, -1, LENGTH, LENGTH)
    ),
    "ones": lambda: torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool),
    "both of two": lambda: expanded((positions() >= 0) & (rows() >= 0)),
    "either of two": lambda: expanded((positions() > rows()) | (rows() >= 0)),
    "where": lambda: torch.where(rows() >= 0, positions() >= 0, False),
    "zeros that are added": lambda: torch.zeros(LENGTH, LENGTH),
    "a window wider than the length": lambda: (positions() - rows()).abs() <= LENGTH,
    "not later than the last": lambda: ~(expanded(positions()[None, :] >= LENGTH * rows().ge(0))),
}


def packed() -> Any:
    """Positions that start again where a new sequence begins: here nowhere, which is computed."""
    ids = (positions() + 0).unsqueeze(0).expand(2, -1)
    sequence = (torch.diff(ids, prepend=ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    batch, q, kv = torch.arange(2)[:, None, None, None], positions()[:, None], positions()[None]
    before = q.new_ones((), dtype=torch.bool) & (kv <= q)
    return (before & (sequence[batch, q] == sequence[batch, kv])).expand(2, -1, LENGTH, LENGTH)


IS_CAUSAL: dict[str, Callable[[], Any]] = {
    "packed sequences, of which there is one": packed,
    "index arithmetic": lambda: expanded(positions()[None, :] <= rows()),
    "tril": lambda: torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(),
    "added": lambda: torch.full((LENGTH, LENGTH), float("-inf")).triu(1),
    "added with the least number": lambda: torch.zeros(LENGTH, LENGTH).masked_fill(
        positions() > rows(), torch.finfo(torch.float32).min
    ),
}
STAYS: dict[str, Callable[[], Any]] = {
    "one element": lambda: (positions() != 3)[None, :] & (rows() >= 0),
    "a window": lambda: (positions() - rows()).abs() < 3,
    "strictly before, or first": lambda: (positions()[None, :] < rows()) | (positions() == 0),
    "a small added number": lambda: torch.full((LENGTH, LENGTH), -1e4).triu(1),
    "random": lambda: torch.rand(LENGTH, LENGTH) > -1,
}


def traced(function: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> Any:
    """The graph that Dynamo makes of a function; ``inputs`` of the graph are its attribute."""
    graphs: list[Any] = []

    def backend(module: Any, traced_inputs: Any) -> Any:
        graphs.append(clone_graph(module))
        graphs[0].order = [i for y in traced_inputs for i, x in enumerate(inputs) if x is y]
        return lambda *args: [torch.zeros(())] * 9

    torch._dynamo.reset()
    with torch.no_grad() if not any(x.requires_grad for x in inputs) else torch.enable_grad():
        torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)(*inputs)
    assert len(graphs) == 1
    return graphs[0]


def operands(n: int = LENGTH, batch: int = 2) -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(0)
    shape = (batch, HEADS, n, WIDTH)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    return q, k, v


def calls(module: Any) -> list[Any]:
    return [node for node in module.graph.nodes if node.target is ATTENTION]


def check_equal(module: Any, before: Any, inputs: tuple[Any, ...]) -> None:
    inputs = tuple(inputs[index] for index in module.order)
    expected, got = before(*inputs), module(*inputs)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", ALL_TRUE)
def test_mask_that_masks_nothing_is_dropped(name: str) -> None:
    module = traced(lambda q, k, v: sdpa(q, k, v, attn_mask=ALL_TRUE[name]()), *operands())
    before = clone_graph(module)
    assert keep_attention(module) == [f"1 x attention: {DROPPED}"]
    assert calls(module)[0].kwargs.get("attn_mask") is None
    check_equal(module, before, operands())


@pytest.mark.parametrize("name", IS_CAUSAL)
def test_causal_mask_is_given_as_such(name: str) -> None:
    module = traced(lambda q, k, v: sdpa(q, k, v, attn_mask=IS_CAUSAL[name]()), *operands())
    before = clone_graph(module)
    assert keep_attention(module) == [f"1 x attention: {CAUSAL}"]
    assert calls(module)[0].kwargs["attn_mask"] is None
    check_equal(module, before, operands())


@pytest.mark.parametrize("name", STAYS)
def test_any_other_mask_stays(name: str) -> None:
    module = traced(lambda q, k, v: sdpa(q, k, v, attn_mask=STAYS[name]()), *operands())
    assert keep_attention(module) == []


def test_a_causal_mask_stays_with_a_negative_scale() -> None:
    """Hidden scores of ``is_causal`` are scaled, too, and would become the largest ones."""

    def program(q: Any, k: Any, v: Any) -> Any:
        return sdpa(q, k, v, attn_mask=positions() <= rows(), scale=-0.5)

    module = traced(program, *operands())
    assert keep_attention(module) == []
    assert torch.isfinite(program(*operands())).all()


def test_mask_of_an_input_stays() -> None:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    module = traced(lambda q, k, v, m: sdpa(q, k, v, attn_mask=m), *operands(), mask)
    assert keep_attention(module) == []


def written(mask: Any) -> Any:
    mask[:, 3] = False
    return mask


def written_by_a_view(mask: Any) -> Any:
    mask[2:4].fill_(False)
    return mask


def written_after_reading(mask: Any) -> Any:
    seen = mask.view(LENGTH, LENGTH)
    mask.logical_and_(torch.zeros(LENGTH, LENGTH, dtype=torch.bool))
    return seen


def written_by_a_function(mask: Any) -> Any:
    torch.nn.functional.relu(mask.view(torch.int8), True)
    return mask


def read_before_it_is_written(mask: Any) -> Any:
    copy = mask.to(torch.bool)  # the mask itself
    mask &= torch.eye(LENGTH, dtype=torch.bool)
    return copy


@pytest.mark.parametrize(
    "write",
    [
        written,
        written_by_a_view,
        written_after_reading,
        written_by_a_function,
        read_before_it_is_written,
    ],
)
def test_mask_that_is_written_to_stays(write: Callable[[Any], Any]) -> None:
    def function(q: Any, k: Any, v: Any) -> Any:
        mask = write(torch.ones(LENGTH, LENGTH, dtype=torch.bool))
        return sdpa(q, k, v, attn_mask=mask | torch.eye(LENGTH, dtype=torch.bool))

    assert keep_attention(traced(function, *operands())) == []


@pytest.mark.parametrize("dynamic", [False, True])
def test_size_that_is_known_at_run_time_only(dynamic: bool) -> None:
    def function(q: Any, k: Any, v: Any) -> Any:
        n = q.shape[2]
        mask = ((torch.arange(n) + 0)[None, None, :, None] >= 0).expand(2, -1, n, n)
        return sdpa(q, k, v, attn_mask=mask)

    module = traced(function, *operands(), dynamic=dynamic)
    assert keep_attention(module) == [f"1 x attention: {DROPPED}"]


@pytest.mark.parametrize(
    "mask_of",
    [
        lambda n: torch.arange(n)[None, :] >= 1,
        lambda n: torch.arange(-1, n - 1)[None, :] >= 0,
        lambda n: (torch.arange(n) - 3)[None, :] >= 0,
        lambda n: torch.arange(n)[None, :] <= torch.arange(n)[:, None],
        lambda n: ~(torch.arange(n)[None, :] >= 0) | (torch.arange(n)[:, None] > 2),
    ],
)
def test_what_may_mask_at_some_size_stays(mask_of: Callable[[Any], Any]) -> None:
    def function(q: Any, k: Any, v: Any) -> Any:
        n = q.shape[2]
        return sdpa(q, k, v, attn_mask=mask_of(n).expand(n, n).contiguous())

    assert keep_attention(traced(function, *operands(), dynamic=True)) == []


def test_bias_behind_a_condition_that_always_holds() -> None:
    """T5's bias: heads innermost, selected by a mask that masks nothing, with a gradient."""
    table = torch.randn(2 * LENGTH, HEADS, requires_grad=True)

    def function(q: Any, k: Any, v: Any, table: Any) -> Any:
        bias = table[positions()[None, :] - rows() + LENGTH].permute(2, 0, 1).unsqueeze(0)
        mask = expanded((positions() >= 0)[None, None, None, :].expand(2, 1, LENGTH, LENGTH))
        bias = torch.where(mask, bias, torch.finfo(torch.float32).min)
        return sdpa(q, k, v, attn_mask=bias) + sdpa(v, k, q, attn_mask=bias)

    module = traced(function, *operands(), table)
    before = clone_graph(module)
    assert keep_attention(module) == [
        f"2 x attention: {CONTIGUOUS}",
        f"2 x attention: {DROPPED}",
    ]
    first, second = calls(module)
    assert first.kwargs["attn_mask"] is second.kwargs["attn_mask"]  # one copy
    bias = first.kwargs["attn_mask"].meta["example_value"]
    assert bias.stride(-1) == 1 and bias.shape == (1, HEADS, LENGTH, LENGTH)
    check_equal(module, before, (*operands(), table))
    gradients = []
    for each in (before, module):
        result = each(*((*operands(), table)[index] for index in module.order))
        (result[0] if isinstance(result, tuple) else result).square().sum().backward()
        gradients.append(table.grad)
        table.grad = None
    torch.testing.assert_close(gradients[1], gradients[0])


def test_operands_with_another_last_stride() -> None:
    def function(q: Any, k: Any, v: Any, m: Any) -> Any:
        return sdpa(q, k.mT.contiguous().mT, v, attn_mask=m.expand(2, HEADS, LENGTH, LENGTH))

    inputs = (*operands(), torch.randn(1, 1, LENGTH, 1))
    module = traced(function, *inputs)
    before = clone_graph(module)
    assert keep_attention(module) == [f"1 x attention: {CONTIGUOUS}"]
    (call,) = calls(module)
    for name in ("key", "attn_mask"):
        assert call.kwargs[name].meta["example_value"].stride(-1) == 1
    # A mask is copied once for the heads that share it.
    assert call.kwargs["attn_mask"].meta["example_value"].shape == (1, 1, LENGTH, LENGTH)
    check_equal(module, before, inputs)


def test_dropout_keeps_its_random_numbers() -> None:
    module = traced(
        lambda q, k, v: sdpa(q, k, v, attn_mask=ALL_TRUE["ones"](), dropout_p=0.5), *operands()
    )
    code = module.code
    assert keep_attention(module) == []
    assert module.code == code
    assert DROPOUT  # named where another call changed


def test_mask_that_broadcasts_the_result_stays() -> None:
    """Attention of one batch with a mask of three has three results."""
    q, k, v = (x[:1] for x in operands())
    module = traced(
        lambda q, k, v: sdpa(q, k, v, attn_mask=torch.ones(3, 1, LENGTH, LENGTH) > 0), q, k, v
    )
    assert keep_attention(module) == []


def test_writes_to_other_memory_do_not_matter() -> None:
    def function(q: Any, k: Any, v: Any, values: Any) -> Any:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(LENGTH)
        other = torch.ones(LENGTH, LENGTH).masked_fill_(values > 0, 0.0)
        return sdpa(q, k, v, attn_mask=mask), (2 * values).neg_(), other

    module = traced(function, *operands(), torch.randn(LENGTH, LENGTH))
    assert keep_attention(module) == [f"1 x attention: {CAUSAL}"]


def test_a_failure_leaves_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    module = traced(lambda q, k, v: sdpa(q, k, v, attn_mask=ALL_TRUE["ones"]()), *operands())
    code = module.code

    def fails(self: Any, mask: Any) -> Any:
        raise RuntimeError("of PyTorch")

    monkeypatch.setattr(attention.Masks, "without_condition", fails)
    assert keep_attention(module) == []
    assert module.code == code


@pytest.mark.parametrize(
    ("method", "writes"),
    [("__eq__", False), ("__and__", False), ("__setitem__", True), ("__iadd__", True),
     ("add_", True), ("cumsum", False)],
)  # fmt: skip
def test_methods_that_write_are_known_by_their_names(method: str, writes: bool) -> None:
    """Dynamo of torch 2.11 calls comparisons as methods: ``x.__eq__(y)``."""
    graph = torch.fx.Graph()
    assert attention.may_write(graph.call_method(method, (graph.placeholder("x"),))) is writes
