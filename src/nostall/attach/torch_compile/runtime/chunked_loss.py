"""Operators of losses whose logits are not written to memory as a whole.

``torch.ops.nostall.linear_loss`` computes a product with its cross-entropy, a chunk of tokens after
the other. The gradient of each token is known with its loss if the loss is a mean or a sum, so the
gradients of the operands are computed in the same pass, from the same logits; the backward pass
scales them. ``torch.ops.nostall.linear_log_probs`` returns what losses of single tokens need, if
asked their entropy too; its backward pass computes the logits again, which is a fourth product.

Rounding: logits have the dtype of the operands, as those of the product alone; the softmax is fp32,
or fp64 for fp64 operands. Products of chunks add to the weight's gradient in its own dtype (cuBLAS,
beta = 1), so it is rounded once for each chunk; a chunk's sum is fp32 inside cuBLAS.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNKS, FEWER_CHUNKS = 8, 4
"""Chunks of a loss: each further one reads and writes the weight's gradient once more."""
MAX_GROWTH = 1.08
"""A chunk may have so many times the rows of an equal share, to have a multiple of a tile's."""

_LIBRARY = torch.library.Library("nostall", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)
_LIBRARY.define(
    "linear_loss(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, Tensor? class_weight, "
    "int ignore_index, float label_smoothing, float inner, float cap, bool is_mean, "
    "bool hidden_grad, bool weight_grad, bool bias_grad, int chunks) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
_LIBRARY.define(
    "linear_log_probs(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, "
    "float inner, float cap, int chunks, bool with_entropy=False) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
_LIBRARY.define(
    "linear_log_probs_backward(Tensor picked_grad, Tensor lse_grad, Tensor mean_grad, "
    "Tensor entropy_grad, Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, Tensor lse, "
    "Tensor entropy, "
    "float inner, float cap, bool hidden_grad, bool weight_grad, bool bias_grad, int chunks) "
    "-> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)


def chunk_rows(tokens: int, chunks: int = CHUNKS) -> int:
    """Rows of a chunk: an equal share, rounded up to the rows of a tile where that is not far."""
    share = max(1, -(-tokens // chunks))
    for multiple in (128, 16):
        rows = -(-share // multiple) * multiple
        if rows <= MAX_GROWTH * share:
            return rows
    return share


@dataclass(frozen=True)
class _Rows:
    """Coefficients of each row's gradient; see :func:`loss_kernel.loss_rows`."""

    share: Tensor
    label_share: Tensor
    constant: Tensor
    # Empty if there is none.
    entropy: Tensor

    def __getitem__(self, rows: slice) -> _Rows:
        known = self.share, self.label_share, self.constant, self.entropy
        return _Rows(*(each[rows] for each in known))


@dataclass(frozen=True)
class _Head:
    """The product that makes logits: hidden (tokens x width), weight (classes x width)."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    inner: float
    # 0: logits have no soft cap.
    cap: float
    chunks: int

    @property
    def wide(self) -> torch.dtype:
        """The dtype of the softmax."""
        return torch.float64 if self.hidden.dtype == torch.float64 else torch.float32

    def logits(self) -> Iterator[tuple[slice, Tensor]]:
        """Chunks of tokens with their logits, which all have the same memory."""
        tokens, size = self.hidden.shape[0], chunk_rows(self.hidden.shape[0], self.chunks)
        memory = self.hidden.new_empty(min(tokens, size), self.weight.shape[0])
        for start in range(0, tokens, size):
            rows = slice(start, min(tokens, start + size))
            logits = memory[: rows.stop - start]
            if self.bias is None:
                torch.mm(self.hidden[rows], self.weight.t(), out=logits)
            else:
                torch.addmm(self.bias, self.hidden[rows], self.weight.t(), out=logits)
            yield rows, logits


class _Gradients:
    """Gradients of a head's operands, to which chunks add theirs; those not wanted are empty."""

    def __init__(self, head: _Head, hidden: bool, weight: bool, bias: bool) -> None:
        self._head, self._weight_known = head, False
        # Results of an operator must not share memory, so each empty one is another tensor.
        self.hidden = torch.empty_like(head.hidden) if hidden else head.hidden.new_empty(0)
        self.weight = torch.empty_like(head.weight) if weight else head.hidden.new_empty(0)
        self._bias = head.hidden.new_zeros(head.weight.shape[0] if bias else 0, dtype=head.wide)
        self._wanted = hidden, weight, bias

    def add(self, rows: slice, logits_grad: Tensor) -> None:
        """Add a chunk, given the gradient of its logits."""
        hidden, weight, bias = self._wanted
        if hidden:
            torch.mm(logits_grad, self._head.weight, out=self.hidden[rows])
        if weight and self._weight_known:
            self.weight.addmm_(logits_grad.t(), self._head.hidden[rows])
        elif weight:
            torch.mm(logits_grad.t(), self._head.hidden[rows], out=self.weight)
            self._weight_known = True
        if bias:
            self._bias += logits_grad.sum(0, dtype=self._bias.dtype)

    def all(self) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of hidden, weight and bias."""
        if self._wanted[1] and not self._weight_known:
            self.weight.zero_()
        return self.hidden, self.weight, self._bias.to(self._head.hidden.dtype)


@dataclass(frozen=True)
class _Statistics:
    """Of each token: log of the sum of exponentials, the label's logit, the weighted sum.

    And the entropy, which is empty if it is not computed.
    """

    lse: Tensor
    picked: Tensor
    total: Tensor
    entropy: Tensor

    @classmethod
    def empty(cls, head: _Head, with_entropy: bool = False) -> _Statistics:
        tokens = head.hidden.shape[0]
        sizes = tokens, tokens, tokens, tokens if with_entropy else 0
        return cls(*(head.hidden.new_empty(size, dtype=head.wide) for size in sizes))

    def __getitem__(self, rows: slice) -> _Statistics:
        known = self.lse, self.picked, self.total, self.entropy
        return _Statistics(*(each[rows] for each in known))


def _run_rows(
    head: _Head,
    logits: Tensor,
    labels: Tensor,
    known: _Statistics,
    gradient: _Rows | None,
    *,
    statistics: bool = True,
    with_sum: bool = False,
    class_weight: Tensor | None = None,
) -> None:
    """Write statistics of a chunk's logits, and their gradients over them."""
    if logits.device.type == "cuda" and logits.dtype != torch.float64:
        launch_rows(head, logits, labels, known, gradient, statistics, with_sum, class_weight)
        return
    x = logits.to(head.wide) * head.inner
    if head.cap:
        x = head.cap * torch.tanh(x)
    if statistics:
        known.lse.copy_(x.logsumexp(1))
        known.picked.copy_(x.gather(1, labels[:, None])[:, 0])
        if with_sum:
            known.total.copy_((x if class_weight is None else x * class_weight).sum(1))
        if len(known.entropy):
            log_p = x - known.lse[:, None]
            known.entropy.copy_(-(log_p.exp() * log_p).sum(1))
    if gradient is None:
        return
    result = gradient.share[:, None] * (x - known.lse[:, None]).exp()
    result += gradient.constant[:, None] * (1.0 if class_weight is None else class_weight)
    result.scatter_add_(1, labels[:, None], -gradient.label_share[:, None])
    if len(known.entropy):
        share, log_p = gradient.entropy[:, None], x - known.lse[:, None]
        spread = share * log_p.exp() * (log_p + known.entropy[:, None])
        # One that nothing reads may be no number.
        result -= torch.where(share != 0.0, spread, 0.0)
    if head.cap:
        result *= head.cap * (1.0 - (x / head.cap).square())
    logits.copy_(result * head.inner)


def launch_rows(
    head: _Head,
    logits: Tensor,
    labels: Tensor,
    known: _Statistics,
    gradient: _Rows | None,
    statistics: bool,
    with_sum: bool,
    class_weight: Tensor | None,
) -> None:
    """:func:`_run_rows` by the Triton kernel."""
    from nostall.attach.torch_compile.runtime.loss_kernel import launch_shape, loss_rows

    block, warps = launch_shape(logits.shape[1])
    unused = known.lse
    coefficients = gradient or _Rows(unused, unused, unused, unused)
    with torch.cuda.device_of(logits):
        loss_rows[(logits.shape[0],)](
            logits, logits.stride(0), labels, head.inner, head.cap,
            known.lse, known.picked, known.total,
            coefficients.share, coefficients.label_share, coefficients.constant,
            unused if class_weight is None else class_weight,
            known.entropy, coefficients.entropy,
            CLASSES=logits.shape[1], CAP=head.cap != 0.0, STATISTICS=statistics, SUM=with_sum,
            GRADIENT=gradient is not None, WEIGHTS=class_weight is not None,
            ENTROPY=len(known.entropy) > 0, BLOCK=block, num_warps=warps,
        )  # fmt: skip


def _checked(labels: Tensor, classes: int, ignore_index: int | None) -> tuple[Tensor, Tensor]:
    """Labels, those that are ignored as 0, and which count.

    Raises IndexError for a label that is no class; on a GPU such a label ends the kernels of the
    process, as one of PyTorch's own loss does.
    """
    is_valid = (
        labels != ignore_index if ignore_index is not None else torch.ones_like(labels).bool()
    )
    is_class = (labels >= 0) & (labels < classes)
    are_known = (is_class | ~is_valid).all()
    if labels.device.type == "cuda":
        torch._assert_async(are_known)
    elif not are_known:
        wrong = labels[is_valid & ~is_class][0].item()
        raise IndexError(
            f"a label is {wrong}; allowed is 0 to {classes - 1}"
            + (f", or {ignore_index} for one that is ignored" if ignore_index is not None else "")
        )
    return torch.where(is_valid, labels, 0).long(), is_valid


@dataclass(frozen=True)
class _LossCall:
    """Arguments of ``linear_loss``, in their order."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    class_weight: Tensor | None
    ignore_index: int
    label_smoothing: float
    inner: float
    cap: float
    is_mean: bool
    hidden_grad: bool
    weight_grad: bool
    bias_grad: bool
    chunks: int


def _linear_loss(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss (a scalar), gradients of hidden, weight and bias for a loss's gradient of 1."""
    call = _LossCall(*arguments)
    head = _Head(call.hidden, call.weight, call.bias, call.inner, call.cap, call.chunks)
    classes, wide, class_weight = call.weight.shape[0], head.wide, call.class_weight
    safe, is_valid = _checked(call.labels, classes, call.ignore_index)
    if class_weight is not None:
        class_weight = class_weight.to(wide).contiguous()
        of_label, of_all = class_weight[safe], class_weight.sum()
    else:
        of_label = torch.ones_like(safe, dtype=wide)
        of_all = torch.full((), float(classes), dtype=wide, device=call.hidden.device)
    of_label = torch.where(is_valid, of_label, 0.0)
    # Where no label counts a mean is 0 / 0, and the gradients are 0.
    total = of_label.sum() if call.is_mean else torch.ones_like(of_all)
    share = torch.where(is_valid, 1.0 / total, 0.0)
    smooth = call.label_smoothing / classes
    label_share = share * (1.0 - call.label_smoothing) * of_label
    wanted = call.hidden_grad, call.weight_grad, call.bias_grad
    known, gradients = _Statistics.empty(head), _Gradients(head, *wanted)
    rows = _Rows(label_share + share * smooth * of_all, label_share, -share * smooth, known.entropy)
    for chunk, logits in head.logits():
        _run_rows(
            head, logits, safe[chunk], known[chunk], rows[chunk] if any(wanted) else None,
            with_sum=call.label_smoothing > 0.0, class_weight=class_weight,
        )  # fmt: skip
        gradients.add(chunk, logits)
    losses = (1.0 - call.label_smoothing) * of_label * (known.lse - known.picked)
    if call.label_smoothing > 0.0:
        losses = losses + smooth * (of_all * known.lse - known.total)
    return torch.where(is_valid, losses, 0.0).sum() / total, *gradients.all()


def _fake_linear_loss(hidden: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    hidden_grad, weight_grad, bias_grad = rest[-4:-1]
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    loss = hidden.new_empty((), dtype=wide)
    return loss, *_fake_gradients(hidden, weight, hidden_grad, weight_grad, bias_grad)


def _fake_gradients(
    hidden: Tensor, weight: Tensor, hidden_grad: bool, weight_grad: bool, bias_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(hidden) if hidden_grad else hidden.new_empty(0),
        torch.empty_like(weight) if weight_grad else hidden.new_empty(0),
        hidden.new_empty(weight.shape[0] if bias_grad else 0),
    )


def _save_loss(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])
    ctx.wanted = inputs[-4:-1]


def _loss_backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    wanted = [
        known * grad if is_wanted and grad is not None else None
        for known, is_wanted in zip(ctx.saved_tensors, ctx.wanted, strict=True)
    ]
    return *wanted, *(None,) * 11


def _linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    inner: float,
    cap: float,
    chunks: int,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each token: its label's logit, log of the sum of exponentials, mean logit, entropy."""
    head = _Head(hidden, weight, bias, inner, cap, chunks)
    safe, _ = _checked(labels, weight.shape[0], None)
    known = _Statistics.empty(head, with_entropy)
    for chunk, logits in head.logits():
        _run_rows(head, logits, safe[chunk], known[chunk], None, with_sum=True)
    return known.picked, known.lse, known.total / weight.shape[0], known.entropy


def _fake_log_probs(hidden: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    tokens, with_entropy = hidden.shape[0], rest[6:] == (True,)
    sizes = tokens, tokens, tokens, tokens if with_entropy else 0
    return tuple(hidden.new_empty((size,), dtype=wide) for size in sizes)


def _save_log_probs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, labels, ctx.inner, ctx.cap, ctx.chunks, _ = inputs
    ctx.save_for_backward(hidden, weight, bias, labels, output[1], output[3])


def _log_probs_backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    wanted = [bool(each) for each in ctx.needs_input_grad[:3]]
    found = torch.ops.nostall.linear_log_probs_backward.default(
        *grads, *ctx.saved_tensors, ctx.inner, ctx.cap, *wanted, ctx.chunks
    )
    kept = [grad if is_wanted else None for grad, is_wanted in zip(found, wanted, strict=True)]
    return *kept, None, None, None, None, None


def _linear_log_probs_backward(
    picked_grad: Tensor,
    lse_grad: Tensor,
    mean_grad: Tensor,
    entropy_grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight and bias; logits are computed once more."""
    lse, entropy, inner, cap, *wanted, chunks = rest
    head = _Head(hidden, weight, bias, inner, cap, chunks)
    known, labels = _Statistics(lse, lse, lse, entropy), labels.long().contiguous()
    rows = _Rows(
        lse_grad.contiguous(), -picked_grad.contiguous(), mean_grad.contiguous() / weight.shape[0],
        entropy_grad.contiguous(),
    )  # fmt: skip
    gradients = _Gradients(head, *wanted)
    for chunk, logits in head.logits():
        _run_rows(head, logits, labels[chunk], known[chunk], rows[chunk], statistics=False)
        gradients.add(chunk, logits)
    return gradients.all()


def _fake_log_probs_backward(*args: Any) -> tuple[Tensor, ...]:
    return _fake_gradients(args[4], args[5], *args[-4:-1])


for _name, _run, _fake in (
    ("linear_loss", _linear_loss, _fake_linear_loss),
    ("linear_log_probs", _linear_log_probs, _fake_log_probs),
    ("linear_log_probs_backward", _linear_log_probs_backward, _fake_log_probs_backward),
):
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, _fake, "Meta")
torch.library.register_autograd(
    "nostall::linear_loss", _loss_backward, setup_context=_save_loss, lib=_LIBRARY
)
torch.library.register_autograd(
    "nostall::linear_log_probs", _log_probs_backward, setup_context=_save_log_probs, lib=_LIBRARY
)

LINEAR_LOSS = torch.ops.nostall.linear_loss.default
"""``LINEAR_LOSS(hidden, weight, …)``: loss, and gradients that only its backward pass reads."""
LINEAR_LOG_PROBS = torch.ops.nostall.linear_log_probs.default
"""``LINEAR_LOG_PROBS(hidden, weight, …)``: label's logit, log-sum-exp, mean logit, entropy."""
