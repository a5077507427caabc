"""Random readers of logits: log-probabilities, entropies and losses, some without gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from nostall.attach.torch_compile.rewrite import loss as rewrite  # noqa: E402
from tests.unit.attach.torch_compile.rewrite.test_loss import (  # noqa: E402
    CLASSES,
    compiled,
    o,
)

F = torch.nn.functional


def log_probability(x: Any, y: Any) -> Any:
    return x.log_softmax(-1).gather(-1, y.clamp(min=0)[..., None]).squeeze(-1)


def entropy(x: Any, y: Any) -> Any:
    log_p = x.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def without_gradients(reader: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: Any, y: Any) -> Any:
        with torch.no_grad():
            return reader(x, y)

    return run


READERS: list[Callable[..., Any]] = [
    log_probability,
    entropy,
    lambda x, y: (x.softmax(-1) * x.log_softmax(-1)).sum((-1,)),
    lambda x, y: x.logsumexp(-1) - (x * F.softmax(x, -1)).sum(2),
    lambda x, y: F.cross_entropy(x.transpose(1, 2), y, reduction="none"),
    lambda x, y: entropy(x.detach(), y),
    without_gradients(entropy),
    without_gradients(log_probability),
]
STEPS: list[Callable[..., Any]] = [
    lambda x: x,
    lambda x: x / 0.7,
    lambda x: 5.0 * torch.tanh(x / 5.0),
    lambda x: x[:, 1:].contiguous() * 0.3,
]


@pytest.mark.slow
@settings(max_examples=60)
@given(
    readers=st.lists(st.integers(0, len(READERS) - 1), min_size=1, max_size=4),
    step=st.sampled_from(STEPS),
    biased=st.booleans(),
    repeats=st.booleans(),
)
def test_losses_of_any_readers_are_those_of_pytorch(
    readers: list[int], step: Callable[..., Any], biased: bool, repeats: bool
) -> None:
    def function(h: Any, y: Any) -> Any:
        x = step(F.linear(h, o.weight, o.bias if biased else None))
        y = y[:, -x.shape[1] :]
        found = [READERS[reader](x, y) for reader in readers]
        product = found[0]
        for each in found[1:]:
            product = product * each
        return (product + 0.0 * o.bias.sum(), *(found if repeats else ()))

    def run(program: Callable[..., Any]) -> list[Any]:
        results = program(o.hidden, o.ignored)
        wanted = [x for x in results if x.requires_grad]
        return [*results, *torch.autograd.grad([x.sum() for x in wanted], o.leaves[:3],
                                               allow_unused=True)]  # fmt: skip

    given_changes: list[Any] = []
    found, expected = run(compiled(function, given_changes)), run(function)
    assert given_changes[0].left or given_changes[0].changed
    for a, b in zip(found, expected, strict=True):
        assert (a is None or not a.any()) if b is None else True
        if a is not None and b is not None:
            torch.testing.assert_close(a, b)


def picked_and_added(h: Any, y: Any) -> Any:
    x = F.linear(h, o.weight)
    return x.gather(-1, y[..., None]).sum() + x.sum()


def of_some_tokens(h: Any, y: Any) -> Any:
    kept = (y > 3).nonzero()[:, 0]
    return F.linear(h[kept], o.weight).gather(-1, y[kept][:, None]).sum()


def dynamic_tokens(count: int) -> tuple[Any, Any]:
    hidden, labels = o.hidden.detach().flatten(0, 1)[:count], o.labels.flatten()[:count]
    hidden, labels = hidden.clone(), labels.clone()
    for each in (hidden, labels):
        torch._dynamo.mark_dynamic(each, 0)
    return hidden, labels


def test_sizes_of_logits_that_stay_are_not_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "LEAST_BYTES", 10 * CLASSES * 8)
    given_changes: list[Any] = []
    run = compiled(picked_and_added, given_changes, None, forced=False)
    for count in (4, 12):
        operands = dynamic_tokens(count)
        torch.testing.assert_close(run(*operands), picked_and_added(*operands))
    assert len(given_changes) == 1


def test_logits_of_an_unknown_number_of_tokens_stay() -> None:
    given_changes: list[Any] = []
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        operands = dynamic_tokens(12)
        found = compiled(of_some_tokens, given_changes, None, forced=False)(*operands)
    torch.testing.assert_close(found, of_some_tokens(*operands))
    assert not given_changes[0].changed


def probabilities_in(h: Any, out: Any) -> Any:
    known = F.linear(h, o.weight).log_softmax(-1)
    return (torch.exp(known, out=out) * known).sum(-1)


def entropy_in(h: Any, out: Any) -> Any:
    known = F.linear(h, o.weight).log_softmax(-1)
    return torch.sum(known.exp() * known, -1, out=out[..., 0].clone())


def tokens_in(h: Any, out: Any) -> Any:
    known = torch.log_softmax(F.linear(h, o.weight), -1, out=out)
    return known.gather(-1, o.labels[..., None])


@pytest.mark.parametrize("reader", [probabilities_in, entropy_in, tokens_in])
def test_results_that_are_written_elsewhere_keep_the_logits(reader: Callable[..., Any]) -> None:
    def function(h: Any, _: Any) -> tuple[Any, Any]:
        out = torch.zeros(*h.shape[:-1], CLASSES, dtype=h.dtype)
        with torch.no_grad():
            found = reader(h, out)
        return found, out

    given_changes: list[Any] = []
    found = compiled(function, given_changes)(o.hidden, o.labels)
    torch.testing.assert_close(found, function(o.hidden, o.labels))
    assert list(given_changes[0].left) == ["its logits stay: an argument out takes a result"]
