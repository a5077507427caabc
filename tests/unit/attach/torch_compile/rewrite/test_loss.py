"""Losses in graphs that Dynamo traces: those that are recognised are equal, all others stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._dynamo.backends.debugging import aot_eager  # noqa: E402

from nostall.attach.torch_compile.rewrite import loss as rewrite  # noqa: E402
from nostall.attach.torch_compile.rewrite.loss import chunk_losses  # noqa: E402
from nostall.attach.torch_compile.runtime.chunked_loss import (  # noqa: E402
    LINEAR_LOG_PROBS,
    LINEAR_LOSS,
)

F = torch.nn.functional
BATCH, LENGTH, WIDTH, CLASSES = 3, 6, 8, 21
IGNORED = -100


class Operands:
    """Leaves of the programs; with bias, and the weight in both layouts."""

    def __init__(self, dtype: Any = torch.float64) -> None:
        g = torch.Generator().manual_seed(0)

        def leaf(*shape: int) -> Any:
            values = torch.randn(shape, generator=g, dtype=torch.float64)
            return values.to(dtype).requires_grad_()

        self.hidden = leaf(BATCH, LENGTH, WIDTH)
        self.weight, self.bias, self.stored = (
            leaf(CLASSES, WIDTH),
            leaf(CLASSES),
            leaf(WIDTH, CLASSES),
        )
        self.classes = torch.rand(CLASSES, generator=g, dtype=torch.float64).to(dtype) + 0.1
        self.labels = torch.randint(CLASSES, (BATCH, LENGTH), generator=g)
        self.ignored = self.labels.clone()
        self.ignored[0, :3] = IGNORED

    @property
    def leaves(self) -> list[Any]:
        return [self.hidden, self.weight, self.bias, self.stored]


o = Operands()


def hugging_face(h: Any, y: Any) -> Any:
    logits = F.linear(h, o.weight).double()
    shifted = F.pad(y, (0, 1), value=IGNORED)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES), shifted.view(-1), ignore_index=IGNORED)


def shifted_and_capped(h: Any, y: Any) -> Any:
    logits = 3.0 * torch.tanh((h @ o.weight.T) / 3.0)
    logits = logits[..., :-1, :].contiguous().view(-1, CLASSES)
    return F.cross_entropy(logits, y[..., 1:].reshape(-1), o.classes, label_smoothing=0.1)


def nll(h: Any, y: Any) -> Any:
    logits = F.linear(h, o.weight, o.bias).flatten(0, 1)
    return F.nll_loss(F.log_softmax(logits, dim=-1), y.flatten(), o.classes, reduction="sum")


def direct_preference(h: Any, y: Any) -> Any:
    logits = F.linear(h, o.weight, o.bias)[:, :-1]
    known = logits.log_softmax(-1)
    mask = y[:, 1:] != IGNORED
    labels = y[:, 1:].clamp(min=0)
    tokens = torch.gather(known, dim=2, index=labels.unsqueeze(2)).squeeze(2)
    return (tokens * mask).sum(-1)


def with_z_loss(h: Any, y: Any) -> Any:
    logits = (h @ o.stored + o.bias).view(-1, CLASSES)
    return F.cross_entropy(logits, y.view(-1)), torch.logsumexp(logits, -1).pow(2).mean()


def z_loss_first(h: Any, y: Any) -> Any:
    logits = F.linear(h, o.weight)
    penalty = torch.logsumexp(logits, dim=-1, keepdim=True).square()
    return F.cross_entropy(logits.transpose(1, 2), y, reduction="none"), penalty


def policy(h: Any, y: Any) -> Any:
    logits = F.linear(h, o.weight)[:, :-1] / 0.7
    tokens = logits.log_softmax(-1).gather(-1, y[:, 1:].clamp(min=0)[..., None]).squeeze(-1)
    with torch.no_grad():
        known = logits.log_softmax(-1)
        weight = -(known.exp() * known).sum(-1)
    return tokens * weight


def entropy_bonus(h: Any, y: Any) -> Any:
    logits = F.linear(h, o.weight, o.bias)
    entropy = logits.logsumexp(-1) - torch.sum(logits.softmax(-1) * logits, dim=-1)
    return F.cross_entropy(logits.flatten(0, 1), y.flatten()), entropy


def metric_without_gradients(h: Any, y: Any) -> Any:
    logits = F.linear(h, o.weight).view(-1, CLASSES)
    with torch.no_grad():
        metric = logits.logsumexp(-1).mean()
    return F.cross_entropy(logits, y.view(-1)) + metric


def detached_entropy(h: Any, y: Any) -> Any:
    logits = F.linear(h, o.weight)
    known = logits.detach().log_softmax(-1)
    tokens = logits.log_softmax(-1).gather(-1, y.clamp(min=0)[..., None])
    return tokens * torch.sum(-known * torch.exp(known), -1, keepdim=True)


ONE_PASS: dict[str, Callable[..., Any]] = {
    "as Hugging Face writes it": hugging_face,
    "shifted, soft cap, class weights, smoothed": shifted_and_capped,
    "nll of log-probabilities": nll,
    "classes on the second axis": lambda h, y: F.cross_entropy(
        F.linear(h, o.weight).transpose(1, 2), y
    ),
    "einsum, permuted": lambda h, y: F.cross_entropy(
        torch.einsum("bsd,vd->bsv", h, o.weight).permute(0, 2, 1), y, reduction="sum"
    ),
    "einsum of a stored transpose": lambda h, y: F.cross_entropy(
        torch.einsum("bsd,dv->bsv", h, o.stored).flatten(0, 1), y.flatten()
    ),
    "an own bias and a temperature": lambda h, y: F.cross_entropy(
        (torch.matmul(h, o.weight.t()) + o.bias).view(BATCH * LENGTH, -1) / 0.7, y.view(-1)
    ),
    "the last token": lambda h, y: F.cross_entropy(F.linear(h, o.weight)[:, -1], y[:, -1]),
    "half of the tokens, in place": lambda h, y: F.cross_entropy(
        F.linear(h[:, ::2], o.weight).reshape(-1, CLASSES).mul_(0.5), y[:, ::2].reshape(-1)
    ),
    "converted by type": lambda h, y: F.cross_entropy(
        F.linear(h, o.weight).type(torch.float64).view(-1, CLASSES), y.view(-1)
    ),
    "a module": lambda h, y: torch.nn.CrossEntropyLoss(ignore_index=2)(
        F.linear(h, o.weight).view(-1, CLASSES), y.clamp(min=0).view(-1)
    ),
}
PER_TOKEN: dict[str, Callable[..., Any]] = {
    "log-probabilities": direct_preference,
    "a z-loss": with_z_loss,
    "a z-loss before": z_loss_first,
    "none, smoothed": lambda h, y: F.cross_entropy(
        F.linear(h, o.weight, o.bias).transpose(1, 2), y, reduction="none", label_smoothing=0.2
    ),
    "none, class weights": lambda h, y: F.cross_entropy(
        F.linear(h, o.weight).flatten(0, 1), y.flatten(), o.classes, reduction="none"
    ),
    "a policy weighted by its entropy": policy,
    "an entropy before the labels": entropy_bonus,
    "a metric without gradients": metric_without_gradients,
    "an entropy of detached logits": detached_entropy,
    "an entropy whose arguments have names": lambda h, y: (
        lambda x: -torch.neg(input=torch.exp(input=x.log_softmax(-1)) * x.log_softmax(-1)).sum(-1)
    )(F.linear(h, o.weight)),
    "the entropy of all tokens": lambda h, y: (lambda x: (x.softmax(-1) * x.log_softmax(-1)).sum())(
        3 * torch.tanh(F.linear(h, o.weight, o.bias) / 3)
    ),
    "the logit less its logsumexp": lambda h, y: (
        lambda x: x.gather(-1, y.clamp(min=0)[..., None]).squeeze(-1) - x.logsumexp(-1)
    )(F.linear(h, o.weight) / 2),
    "a mean beside a logsumexp, class weights": lambda h, y: (
        lambda x: (F.cross_entropy(x, y.view(-1), o.classes), x.logsumexp(1).sum())
    )(F.linear(h, o.weight).view(-1, CLASSES)),
}


def changed_weight(h: Any, y: Any) -> Any:
    weight = o.weight * 1.0
    logits = F.linear(h, weight).view(-1, CLASSES)
    weight.mul_(2.0)
    return F.cross_entropy(logits, y.view(-1)) + weight.sum()


def partial_gradient(h: Any, y: Any) -> Any:
    logits = F.linear(h, o.weight)
    with torch.no_grad():
        p = logits.softmax(-1)
    return -(p * logits.log_softmax(-1)).sum(-1)


def gradient_of_a_bias(h: Any, y: Any) -> Any:
    logits = (h @ o.stored).detach() + o.bias
    return F.cross_entropy(logits.view(-1, CLASSES), y.view(-1))


def distilled(h: Any, y: Any) -> Any:
    with torch.no_grad():
        taught = F.linear(h, o.weight.flip(0))
    log_p = (F.linear(h, o.weight) / 2).log_softmax(-1)
    return F.kl_div(log_p, (taught / 2).softmax(-1), reduction="batchmean")


def product_without_gradients(h: Any, y: Any) -> Any:
    with torch.no_grad():
        logits = h @ o.weight.T
    return F.cross_entropy((logits + o.bias).view(-1, CLASSES), y.view(-1))


def product_in_autocast(h: Any, y: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        logits = F.linear(h, o.weight)
    return F.cross_entropy(logits.view(-1, CLASSES), y.view(-1))


def scaled_by_a_view(h: Any, y: Any) -> Any:
    logits = F.linear(h, o.weight)
    logits.view(-1, CLASSES).mul_(0.5)
    return F.cross_entropy(logits.view(-1, CLASSES), y.view(-1))


def scaled_by_another_name(h: Any, y: Any) -> Any:
    logits = F.linear(h, o.weight).view(-1, CLASSES)
    scaled = logits
    scaled *= 0.5
    return F.cross_entropy(logits, y.view(-1))


def scaled_in_part(h: Any, y: Any) -> Any:
    logits = F.linear(h, o.weight)
    logits[:, :3].mul_(0.5)
    return F.cross_entropy(logits.view(-1, CLASSES), y.view(-1))


def scaled_twice(h: Any, y: Any) -> Any:
    logits = F.linear(h, o.weight).view(-1, CLASSES)
    first, second = logits, logits
    first *= 0.5
    second *= 0.5
    labels = y.view(-1)
    return F.cross_entropy(first, labels) + F.cross_entropy(second, labels)


def unread_branch(h: Any, y: Any) -> Any:
    logits = F.linear(h, o.weight)
    logits[:, :-1].contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES), y.view(-1))


def late_class_weights(h: Any, y: Any) -> Any:
    logits = F.linear(h, o.weight).view(-1, CLASSES)
    penalty = logits.logsumexp(-1).square().mean()
    scale = 1.0 + penalty.detach() * 0.0
    return F.cross_entropy(logits, y.view(-1), o.classes * scale) + penalty


STAYS: dict[str, tuple[Callable[..., Any], str]] = {
    "a part of an entropy's gradient": (partial_gradient, "softmax reads its logits"),
    "a bias that is learnt alone": (
        gradient_of_a_bias, "its bias has a gradient where its product has none"
    ),
    "entropies of parts": (
        lambda h, y: torch.cat([
            -(x.softmax(-1) * x.log_softmax(-1)).sum(-1)
            for x in F.linear(h, o.weight).flatten(0, 1).split(7)
        ]),
        "split reads its logits",
    ),
    "distillation": (distilled, "kl_div reads all log-probabilities"),
    "a product without gradients": (
        product_without_gradients, "the gradient mode changes between its product and its loss"
    ),
    "a product in autocast": (
        product_in_autocast, "autocast changes between its product and its loss"
    ),
    "scaled by a view": (
        scaled_by_a_view, "nothing reads the result of mul_, which reads its logits"
    ),
    "scaled by another name": (
        scaled_by_another_name, "nothing reads the result of imul, which reads its logits"
    ),
    "scaled in part": (
        scaled_in_part, "nothing reads the result of mul_, which reads its logits"
    ),
    "scaled twice": (scaled_twice, "its logits are changed in place"),
    "a branch that nothing reads": (
        unread_branch, "nothing reads the result of contiguous, which reads its logits"
    ),
    "class weights of a logsumexp": (
        late_class_weights, "its labels or class weights are computed after other losses are read"
    ),
    "two ignored labels": (
        lambda h, y: (
            lambda x, y: F.cross_entropy(x, y, ignore_index=2) + F.cross_entropy(x, y)
        )(F.linear(h, o.weight).flatten(0, 1), y.flatten().clamp(min=0)),
        "its losses ignore different labels",
    ),
    "a wide bias": (
        lambda h, y: F.cross_entropy(
            (h.float() @ o.stored.float()).flatten(0, 1) + o.bias, y.flatten()
        ),
        "its bias would be rounded",
    ),
    "returned": (
        lambda h, y: (lambda x: (F.cross_entropy(x.flatten(0, 1), y.flatten()), x))(
            F.linear(h, o.weight)
        ),
        "the graph returns its logits, so they must exist",
    ),
    "accuracy": (
        lambda h, y: (
            lambda x: F.cross_entropy(x, y.flatten()) + (x.argmax(-1) == y.flatten()).sum()
        )(F.linear(h, o.weight).flatten(0, 1)),
        "argmax reads its logits",
    ),
    "all log-probabilities": (
        lambda h, y: (lambda x: x.gather(-1, y.clamp(min=0)[..., None]).sum() - x.sum())(
            F.linear(h, o.weight).log_softmax(-1)
        ),
        "sum reads all log-probabilities",
    ),
    "some classes": (
        lambda h, y: F.cross_entropy(F.linear(h, o.weight)[0, :, :9], y[0].clamp(0, 8)),
        "only some classes of its logits count",
    ),
    "probabilities": (
        lambda h, y: F.cross_entropy(
            F.linear(h, o.weight)[:, 0], torch.ones(BATCH, CLASSES, dtype=torch.float64) / CLASSES
        ),
        "its targets are probabilities",
    ),
    "over tokens": (
        lambda h, y: F.cross_entropy(F.linear(h, o.weight), torch.zeros(
            BATCH, CLASSES, dtype=torch.int64)),
        "its cross-entropy is not over the classes of the product",
    ),
    "order of tokens": (
        lambda h, y: F.cross_entropy(
            F.linear(h, o.weight).transpose(0, 1).reshape(-1, CLASSES), y.t().reshape(-1)
        ),
        "transpose changes the order of tokens",
    ),
    "narrow": (
        lambda h, y: F.cross_entropy(F.linear(h, o.weight).flatten(0, 1).to(torch.float32),
                                     y.flatten()),
        "its logits are converted to torch.float32",
    ),
    "a learnt scale": (
        lambda h, y: F.cross_entropy((F.linear(h, o.weight) * o.bias[0]).flatten(0, 1),
                                     y.flatten()),
        "mul of its logits has a factor that is no constant",
    ),
    "no product": (
        lambda h, y: F.cross_entropy(h.flatten(0, 1), y.flatten().clamp(max=WIDTH - 1)),
        "they are no product of this graph; if a graph break is between them, "
        "TORCH_LOGS=graph_breaks names it",
    ),
    "two temperatures": (
        lambda h, y: (
            lambda x: F.cross_entropy(x, y.flatten()) + (x / 2).logsumexp(-1).sum()
        )(F.linear(h, o.weight).flatten(0, 1)),
        "several losses read different tokens, or different scales of them",
    ),
}  # fmt: skip


def compiled(
    function: Callable[..., Any], given: list[Any], dynamic: bool | None = False, **options: Any
) -> Any:
    """The function with chunked losses, by AOTAutograd if it changes.

    ``given`` gets what became of them.
    """

    def backend(module: Any, inputs: Any) -> Any:
        given.append(chunk_losses(module, **({"forced": True} | options)))
        module.graph.lint()
        given[-1].targets = [node.target for node in module.graph.nodes]
        given[-1].flags = next(
            (node.args[-4:-1] for node in module.graph.nodes if node.target is LINEAR_LOSS), None
        )
        return aot_eager(module, inputs) if given[-1].changed else module.forward

    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)


def outcome(function: Callable[..., Any], leaves: list[Any], labels: Any) -> list[Any]:
    """Results and gradients for seeds that differ from element to element."""
    results = function(leaves[0], labels)
    results = results if isinstance(results, tuple) else (results,)
    seeds = [torch.arange(1.0, 1.0 + x.numel()).view_as(x).to(x.dtype) for x in results]
    gradients = torch.autograd.grad(results, leaves, seeds, allow_unused=True)
    return [*results, *gradients]


def check_equal(function: Callable[..., Any], given: list[Any], **options: Any) -> None:
    found = outcome(compiled(function, given, **options), o.leaves, o.ignored)
    for a, b in zip(found, outcome(function, o.leaves, o.ignored), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ONE_PASS)
def test_a_mean_or_sum_is_one_operator_with_its_gradients(name: str) -> None:
    given: list[Any] = []
    check_equal(ONE_PASS[name], given)
    assert given[0].changed.total() == 1 and not given[0].left
    assert LINEAR_LOSS in given[0].targets
    assert not {F.cross_entropy, F.linear, torch.matmul} & set(given[0].targets)


@pytest.mark.parametrize("name", PER_TOKEN)
def test_losses_of_tokens_compute_logits_again(name: str) -> None:
    given: list[Any] = []
    check_equal(PER_TOKEN[name], given)
    (text,) = given[0].lines(given[0].changed)
    assert text.endswith("(modelled); the backward pass computes them again")
    assert LINEAR_LOG_PROBS in given[0].targets and not given[0].left


@pytest.mark.parametrize("name", STAYS)
def test_other_readers_keep_the_logits_by_name(name: str) -> None:
    function, reason = STAYS[name]
    given: list[Any] = []
    check_equal(function, given)
    assert given[0].lines(given[0].left) == [f"1 x loss: its logits stay: {reason}"]
    assert not given[0].changed


def test_labels_that_pytorch_refuses_stay_with_it() -> None:
    def function(h: Any, y: Any) -> Any:
        return F.cross_entropy(F.linear(h, o.weight).flatten(0, 1), y.flatten())

    given: list[Any] = []
    with pytest.raises(RuntimeError, match="target"):
        compiled(function, given)(o.hidden.detach(), o.ignored.clamp(min=0).int())
    (text,) = given[0].lines(given[0].left)
    assert text.endswith("its targets are torch.int32; PyTorch's operator takes int64")


@pytest.mark.parametrize("name", ["as Hugging Face writes it", "log-probabilities"])
def test_a_batch_of_any_size_is_chunked(name: str) -> None:
    program = {**ONE_PASS, **PER_TOKEN}[name]

    def function(h: Any, y: Any) -> Any:
        # The sum needs one batch size for both, which a gather does not.
        return program(h, y) + (h[..., 0] * y).sum()

    given: list[Any] = []
    run = compiled(function, given, dynamic=None)
    for batch in (2, 5, 4):
        hidden, labels = o.hidden.detach().repeat(2, 1, 1)[:batch], o.ignored.repeat(2, 1)[:batch]
        torch.testing.assert_close(run(hidden, labels), function(hidden, labels))
    assert [each.lines(each.left) for each in given] == [[], []]
    assert [each.changed.total() for each in given] == [1, 1]


def test_classes_of_any_number_stay() -> None:
    given: list[Any] = []
    check_equal(ONE_PASS["the last token"], given, dynamic=True)
    (text,) = given[0].left
    assert text == "its logits stay: the width or the number of its classes is dynamic"


def test_an_operand_that_changes_before_the_loss_keeps_the_logits() -> None:
    given: list[Any] = []
    with torch.no_grad():
        found = compiled(changed_weight, given)(o.hidden, o.ignored)
        torch.testing.assert_close(found, changed_weight(o.hidden, o.ignored))
    (text,) = given[0].left
    assert text.endswith("an operand of their product is changed in place before the loss")


@pytest.mark.parametrize("changes_labels", [True, False])
def test_labels_that_change_between_losses_keep_the_logits(changes_labels: bool) -> None:
    def function(h: Any, y: Any) -> Any:
        labels, classes = y.flatten().clone(), o.classes.clone()
        logits = F.linear(h, o.weight).flatten(0, 1)
        first = F.cross_entropy(logits, labels, classes)
        if changes_labels:
            labels[:9] = IGNORED
        else:
            classes[:9] = 7.0
        return first + F.cross_entropy(logits, labels, classes, reduction="sum")

    given: list[Any] = []
    with torch.no_grad():
        found = compiled(function, given)(o.hidden, o.ignored)
        torch.testing.assert_close(found, function(o.hidden, o.ignored))
    assert (
        given[0]
        .lines(given[0].left)[0]
        .endswith("its labels or class weights are changed in place between its losses")
    )


def test_autocast_computes_the_product_in_its_dtype() -> None:
    wide = Operands(torch.float32)

    def function(h: Any, y: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(F.linear(h, wide.weight, wide.bias).flatten(0, 1), y.flatten())

    given: list[Any] = []
    found = outcome(compiled(function, given), wide.leaves, o.ignored)
    expected = outcome(function, wide.leaves, o.ignored)
    assert given[0].changed.total() == 1 and found[0].dtype == torch.float32
    for a, b in zip(found[:4], expected[:4], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3 * b.abs().max().item())


def test_fp16_waits_for_the_scale_of_the_loss() -> None:
    narrow = Operands(torch.float16)

    def function(h: Any, y: Any) -> Any:
        logits = F.linear(h, narrow.weight).flatten(0, 1).float()
        return F.cross_entropy(logits, y.flatten()) * 1e-6

    given: list[Any] = []
    found = compiled(function, given)(narrow.hidden, o.ignored)
    assert LINEAR_LOG_PROBS in given[0].targets
    (gradient,) = torch.autograd.grad(found * 1e6, narrow.weight)
    expected = torch.autograd.grad(function(narrow.hidden, o.ignored) * 1e6, narrow.weight)[0]
    torch.testing.assert_close(gradient, expected, rtol=1e-2, atol=1e-3)
    # In the forward pass these gradients would round to 0.
    assert float(gradient.abs().max()) > 1e-3


def test_a_frozen_weight_has_no_gradient_in_memory() -> None:
    weight = o.weight.detach()
    given: list[Any] = []
    run = compiled(
        lambda h, y: F.cross_entropy(F.linear(h, weight).flatten(0, 1), y.flatten()), given
    )
    torch.autograd.grad(run(o.hidden, o.ignored), o.hidden)
    assert given[0].flags == (True, False, False)
    with torch.no_grad():
        run(o.hidden, o.ignored)
    assert given[1].flags == (False, False, False)


def test_small_logits_and_chunks_of_few_tokens_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    check_equal(hugging_face, given, forced=False)
    (text,) = given[0].left
    assert text == "its logits stay: they take 0.0 MB, and less than 67 stay"
    monkeypatch.setattr(rewrite, "LEAST_BYTES", 0)
    check_equal(hugging_face, given, forced=False)
    (text,) = given[1].left
    assert text == "its logits stay: a chunk has 3 tokens, and less than 256 stay"
    monkeypatch.setattr(rewrite, "LEAST_ROWS", 3)
    check_equal(hugging_face, given, forced=False)
    assert given[2].changed.total() == 1
    (text,) = given[2].lines(given[2].changed)
    assert text == (
        "1 x loss: its logits (18 x 21 float64, 3.02e-06 GB) are not written; chunks of 3 tokens "
        "take 5.04e-07 GB (modelled)"
    )


def test_two_losses_of_tied_weights_are_both_chunked() -> None:
    def function(h: Any, y: Any) -> Any:
        first = F.cross_entropy(F.linear(h, o.weight).flatten(0, 1), y.flatten())
        embedded = F.embedding(y.clamp(min=0), o.weight)
        return first + F.cross_entropy(F.linear(embedded, o.weight).flatten(0, 1), y.flatten())

    given: list[Any] = []
    check_equal(function, given)
    assert given[0].changed.total() == 2
