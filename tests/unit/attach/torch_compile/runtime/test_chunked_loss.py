"""The chunked loss: numbers against PyTorch's own in fp64, edges, and the Triton kernel."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from nostall.attach.torch_compile.runtime.chunked_loss import (  # noqa: E402
    LINEAR_LOG_PROBS,
    LINEAR_LOSS,
    chunk_rows,
)
from tests.corpus.catalogue import OLD_TRITON  # noqa: E402
from tests.unit.fusion.codegen.interpreter_process import run_interpreted  # noqa: E402

F = torch.nn.functional
IGNORED = -100
ROOT = Path(__file__).resolve().parents[5]


def operands(
    tokens: int, classes: int, seed: int, dtype: Any = torch.float64, width: int = 5
) -> tuple[Any, Any, Any, Any]:
    """Leaves hidden, weight and bias, and labels of which some are ignored."""
    g = torch.Generator().manual_seed(seed)
    shapes = ((tokens, width), (classes, width), (classes,))
    leaves = [torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes]
    labels = torch.randint(classes, (tokens,), generator=g)
    labels[torch.rand(tokens, generator=g) < 0.3] = IGNORED
    hidden, weight, bias = (x.requires_grad_() for x in leaves)
    return hidden, weight, bias, labels


def logits_of(hidden: Any, weight: Any, bias: Any, inner: float, cap: float) -> Any:
    x = F.linear(hidden, weight, bias) * inner
    return cap * torch.tanh(x) if cap else x


def chunked(hidden: Any, weight: Any, bias: Any, labels: Any, **given: Any) -> Any:
    known = {
        "class_weight": None, "label_smoothing": 0.0, "inner": 1.0, "cap": 0.0, "is_mean": True,
        "chunks": 8,
    } | given  # fmt: skip
    return LINEAR_LOSS(
        hidden, weight, bias, labels, known["class_weight"], IGNORED, known["label_smoothing"],
        known["inner"], known["cap"], known["is_mean"], True, True, bias is not None,
        known["chunks"],
    )[0]  # fmt: skip


@given(
    tokens=st.integers(1, 40),
    classes=st.integers(1, 30),
    seed=st.integers(0, 99),
    chunks=st.integers(1, 9),
    smoothing=st.sampled_from((0.0, 0.1, 1.0)),
    is_mean=st.booleans(),
    scale=st.sampled_from(((1.0, 0.0), (-0.5, 0.0), (0.3, 3.0))),
    weighted=st.booleans(),
    biased=st.booleans(),
)
def test_loss_and_gradients_are_those_of_pytorch(
    tokens: int, classes: int, seed: int, chunks: int, smoothing: float, is_mean: bool,
    scale: tuple[float, float], weighted: bool, biased: bool,
) -> None:  # fmt: skip
    hidden, weight, bias, labels = operands(tokens, classes, seed)
    bias = bias if biased else None
    leaves = [x for x in (hidden, weight, bias) if x is not None]
    class_weight = torch.rand(classes, dtype=torch.float64) + 0.1 if weighted else None
    inner, cap = scale
    expected = F.cross_entropy(
        logits_of(hidden, weight, bias, inner, cap), labels, class_weight, ignore_index=IGNORED,
        reduction="mean" if is_mean else "sum", label_smoothing=smoothing,
    )  # fmt: skip
    found = chunked(
        hidden, weight, bias, labels, class_weight=class_weight, label_smoothing=smoothing,
        inner=inner, cap=cap, is_mean=is_mean, chunks=chunks,
    )  # fmt: skip
    torch.testing.assert_close(found, expected, equal_nan=True)
    for a, b in zip(
        torch.autograd.grad(3.0 * found, leaves), torch.autograd.grad(3.0 * expected, leaves),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(a, b, equal_nan=True)


@given(
    tokens=st.integers(1, 40),
    classes=st.integers(1, 30),
    seed=st.integers(0, 99),
    chunks=st.integers(1, 9),
    scale=st.sampled_from(((1.0, 0.0), (-0.5, 0.0), (0.3, 3.0))),
)
def test_log_probabilities_have_the_gradients_of_each_token(
    tokens: int, classes: int, seed: int, chunks: int, scale: tuple[float, float]
) -> None:
    hidden, weight, bias, labels = operands(tokens, classes, seed)
    labels, (inner, cap) = labels.clamp(min=0), scale
    x = logits_of(hidden, weight, bias, inner, cap)
    log_p = x.log_softmax(1)
    entropy = -(log_p.exp() * log_p).sum(1)
    expected = x.gather(1, labels[:, None])[:, 0], x.logsumexp(1), x.mean(1), entropy
    found = LINEAR_LOG_PROBS(hidden, weight, bias, labels, inner, cap, chunks, True)
    factors = torch.randn(4, tokens, dtype=torch.float64)
    torch.testing.assert_close(found, expected)
    gradients = [
        torch.autograd.grad(
            sum((part * factor).sum() for part, factor in zip(each, factors, strict=True)),
            (hidden, weight, bias),
        )
        for each in (found, expected)
    ]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entropies_are_as_exact_as_pytorchs(dtype: Any) -> None:
    hidden, weight, _, labels = operands(256, 64, 0, dtype, width=32)
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]

    def entropy(logits: Any) -> Any:
        log_p = logits.log_softmax(1)
        return -(log_p.exp() * log_p).sum(1).mean()

    exact = entropy(F.linear(*wide))
    wanted = [exact.detach(), *torch.autograd.grad(exact, wide)]

    def error(loss: Any) -> list[float]:
        found = [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]
        return [float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]

    theirs = error(entropy(F.linear(hidden, weight).float()))
    known = LINEAR_LOG_PROBS(hidden, weight, None, labels.clamp(min=0), 1.0, 0.0, 8, True)[3]
    ours = error(known.mean())
    # The log-sum-exp is rounded to fp32, at logits of up to 20.
    tolerance = 20 * torch.finfo(torch.float32).eps
    assert ours[0] < 1.2 * theirs[0] + tolerance and ours[1] < 1.2 * theirs[1] + tolerance
    # One rounding of the weight's gradient for each chunk.
    assert ours[2] < 2.5 * theirs[2] + tolerance


def test_an_entropy_that_nothing_reads_may_be_no_number() -> None:
    hidden, weight, bias, _ = operands(6, 4, 0)
    with torch.no_grad():
        bias[2] = -math.inf
    labels = torch.tensor([0, 1, 3, 3, 1, 0])
    picked, _, _, entropy = LINEAR_LOG_PROBS(hidden, weight, bias, labels, 1.0, 0.0, 3, True)
    assert bool(entropy.isnan().all())
    found = torch.autograd.grad(picked.sum(), (hidden, weight))
    logits = F.linear(hidden, weight)
    expected = torch.autograd.grad(logits.gather(1, labels[:, None]).sum(), (hidden, weight))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("is_mean", [True, False])
def test_a_loss_without_labels_is_that_of_pytorch(is_mean: bool) -> None:
    hidden, weight, _, labels = operands(7, 5, 0)
    labels[:] = IGNORED
    found = chunked(hidden, weight, None, labels, is_mean=is_mean)
    assert math.isnan(found.item()) if is_mean else found.item() == 0.0
    gradients = torch.autograd.grad(found, (hidden, weight))
    assert all(bool((gradient == 0.0).all()) for gradient in gradients)


@pytest.mark.parametrize("is_mean", [True, False])
def test_an_empty_batch_has_an_empty_gradient(is_mean: bool) -> None:
    hidden, weight, bias, labels = operands(0, 5, 0)
    found = chunked(hidden, weight, bias, labels, is_mean=is_mean)
    assert math.isnan(found.item()) if is_mean else found.item() == 0.0
    gradients = torch.autograd.grad(found, (hidden, weight, bias))
    assert gradients[0].shape == (0, 5)
    assert bool((gradients[1] == 0.0).all() & (gradients[2] == 0.0).all())


def test_a_label_that_is_no_class_is_named() -> None:
    hidden, weight, _, labels = operands(7, 5, 0)
    labels[3] = 5
    with pytest.raises(IndexError, match="a label is 5; allowed is 0 to 4, or -100"):
        chunked(hidden, weight, None, labels)
    with pytest.raises(IndexError, match=r"a label is -100; allowed is 0 to 4$"):
        LINEAR_LOG_PROBS(hidden, weight, None, torch.full((7,), IGNORED), 1.0, 0.0, 8)


def test_infinite_logits_have_the_loss_of_pytorch() -> None:
    hidden, weight, bias, labels = operands(6, 4, 0)
    with torch.no_grad():
        bias[2] = -math.inf
    labels = torch.tensor([0, 1, 2, 3, IGNORED, 0])
    expected = F.cross_entropy(F.linear(hidden, weight, bias), labels)
    assert chunked(hidden, weight, bias, labels).item() == expected.item() == math.inf
    labels[2] = 1
    expected = F.cross_entropy(F.linear(hidden, weight, bias), labels)
    torch.testing.assert_close(chunked(hidden, weight, bias, labels), expected)


def test_bf16_is_as_exact_as_pytorchs_but_for_a_rounding_for_each_chunk() -> None:
    hidden, weight, _, labels = operands(512, 64, 0, torch.bfloat16, width=32)
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact = torch.autograd.grad(F.cross_entropy(F.linear(*wide), labels), wide)

    def error(loss: Any) -> list[float]:
        found = torch.autograd.grad(loss, (hidden, weight))
        return [float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]

    theirs = error(F.cross_entropy(F.linear(hidden, weight).float(), labels))
    ours = error(chunked(hidden, weight, None, labels))
    assert ours[0] < 1.2 * theirs[0]
    # Eight roundings of growing sums: sqrt(1 + 2 + … + 8) / 8 times as much as one, and its own.
    assert ours[1] < 2.5 * theirs[1]


def test_a_chunk_is_an_equal_share_of_the_tokens_or_a_little_more() -> None:
    assert chunk_rows(8192) == 1024
    assert chunk_rows(8184) == 1024
    assert chunk_rows(1200) == 160
    assert chunk_rows(100) == 13
    assert chunk_rows(0) == 1
    for tokens in range(1, 5000, 7):
        rows = chunk_rows(tokens)
        assert math.ceil(tokens / 8) <= rows <= 1.08 * math.ceil(tokens / 8)


def test_a_transposed_weight_has_a_gradient_of_its_layout() -> None:
    hidden, weight, _, labels = operands(9, 6, 0)
    stored = weight.detach().t().contiguous().requires_grad_()
    loss = chunked(hidden, stored.t(), None, labels)
    (gradient,) = torch.autograd.grad(loss, stored)
    expected = F.cross_entropy(hidden @ stored, labels)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, stored)[0])
    assert gradient.is_contiguous()


def test_pytorch_accepts_the_operators() -> None:
    hidden, weight, bias, labels = operands(9, 6, 0)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    given_loss = (
        hidden, weight, bias, labels, None, IGNORED, 0.1, 1.0, 0.0, True, True, True, True, 4
    )  # fmt: skip
    torch.library.opcheck(LINEAR_LOSS, given_loss, test_utils=tests)
    known = (hidden, weight, bias, labels.clamp(min=0), 1.0, 0.0, 4)
    torch.library.opcheck(LINEAR_LOG_PROBS, known, test_utils=tests)
    torch.library.opcheck(LINEAR_LOG_PROBS, (*known, True), test_utils=tests)


def test_the_kernel_computes_what_operators_do() -> None:
    result = run_interpreted("tests.unit.attach.torch_compile.runtime.interpreted_loss")
    assert result["cases"] == 30
    assert result["different"] == []


@pytest.mark.parametrize("triton", ["installed", "3.6.0"])
def test_the_kernel_compiles_for_sm_90(triton: str) -> None:
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    if triton == "3.6.0":
        if not OLD_TRITON.is_dir():
            pytest.skip(f"{OLD_TRITON} does not exist; run `make test`")
        paths.insert(0, str(OLD_TRITON))
    module = "tests.unit.attach.torch_compile.runtime.compiled_loss"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    sizes = [int(size) for size in done.stdout.split()]
    assert len(sizes) == 12 and min(sizes) > 1000
