"""Compare the loss's Triton kernel with operators, in Triton's interpreter; prints JSON."""

from __future__ import annotations

import itertools
import json
from typing import Any

import torch
from tools.interpreters.triton_interpreter import prepare

from nostall.attach.torch_compile.runtime import chunked_loss

IGNORED = -100
FORMS = [
    *((smoothing, weighted, False) for smoothing in (0.0, 0.2) for weighted in (False, True)),
    (0.0, False, True),
]
"""Label smoothing, class weights, and whether entropies are computed."""


def by_kernel(*args: Any, **kwargs: Any) -> None:
    options = {"statistics": True, "with_sum": False, "class_weight": None} | kwargs
    chunked_loss.launch_rows(*args, *options.values())


def results(
    hidden: Any, weight: Any, labels: Any, class_weight: Any, smoothing: float, cap: float,
    with_entropy: bool,
) -> list[Any]:  # fmt: skip
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    loss = chunked_loss.LINEAR_LOSS(
        *leaves,
        None,
        labels,
        class_weight,
        IGNORED,
        smoothing,
        0.7,
        cap,
        True,
        True,
        True,
        False,
        3,
    )[0]
    picked, lse, mean, entropy = chunked_loss.LINEAR_LOG_PROBS(
        *leaves, None, labels.clamp(min=0), 0.7, cap, 3, with_entropy
    )
    grads = torch.autograd.grad((2 * picked + 3 * lse - mean).sum() + entropy.sum(), leaves)
    return [loss, *torch.autograd.grad(loss, leaves), picked, lse, mean, entropy, *grads]


def main() -> None:
    prepare()
    torch.manual_seed(0)
    plain = chunked_loss._run_rows
    different, cases = [], 0
    for classes, cap, (smoothing, weighted, with_entropy) in itertools.product(
        (37, 4096, 9000), (0.0, 5.0), FORMS
    ):
        hidden, weight = torch.randn(4, 8), torch.randn(classes, 8)
        labels = torch.randint(0, classes, (4,))
        labels[2] = IGNORED
        class_weight = torch.rand(classes, 2)[:, 0] if weighted else None
        found = []
        for rows in (plain, by_kernel):
            chunked_loss._run_rows = rows
            found.append(
                results(hidden, weight, labels, class_weight, smoothing, cap, with_entropy)
            )
        cases += 1
        try:
            torch.testing.assert_close(*found)
        except AssertionError as error:
            different.append(f"{classes} {cap} {smoothing} {weighted} {with_entropy}: {error}")
    print(json.dumps({"cases": cases, "different": different}))


if __name__ == "__main__":
    main()
