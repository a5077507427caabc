"""Operator documents of training steps of models of random size.

    python -m benchmarks run learners.corpus --out src/nostall/workload/learning/corpus.json.gz

The models have shapes but neither weights nor data (PyTorch's meta device), so no GPU and no
memory is needed.  A document counts the operators that forward and backward pass dispatch.
Dropout and attention are one operator each, as on a GPU.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from nostall.workload.learning.documents import (
    Document,
    canonical_operator,
    word,
    write_documents,
)

SIZES = 20
"""Models of each kind."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sizes", type=int, default=SIZES, help="models of each kind")
    parser.add_argument("--kinds", nargs="*", help="only these kinds")


def main(options: argparse.Namespace) -> None:
    from benchmarks.learners.families.language import LANGUAGE
    from benchmarks.learners.families.other import OTHER
    from benchmarks.learners.families.vision import VISION

    documents = []
    for kind, builders in {**LANGUAGE, **VISION, **OTHER}.items():
        if options.kinds and kind not in options.kinds:
            continue
        start = time.perf_counter()
        for number in range(options.sizes):
            rng = np.random.default_rng([number, *kind.encode()])
            builder = builders[number % len(builders)]
            documents.append(Document(f"{kind}-{number}", kind, trace(builder, rng)))
        calls = [sum(d.counts.values()) for d in documents[-options.sizes :]]
        words = [len(d.counts) for d in documents[-options.sizes :]]
        seconds = time.perf_counter() - start
        print(f"{kind}: {min(calls)}-{max(calls)} calls, {max(words)} words, {seconds:.0f} s")
    write_documents(options.out, documents)


def trace(builder: Any, rng: np.random.Generator) -> dict[str, int]:
    """Calls of each word in one training step of a model of random size."""
    import torch
    from torch.nn import functional
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    calls: Counter[str] = Counter()

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default:
                return True  # "is no token masked?" and the like: there is no data to look at
            out = func(*args, **(kwargs or {}))
            tensors = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
            if not tensors or func.is_view:
                return out
            operator = canonical_operator(func.name().partition(".")[0])
            if operator is not None:
                calls[word(operator, max(t.numel() for t in tensors))] += 1
            return out

    def dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return torch.native_dropout(x, p, True)[0] if training else x

    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    by_parts = functional.scaled_dot_product_attention

    def attend(
        query: Any, key: Any, value: Any, attn_mask: Any = None, *_: Any, **more: Any
    ) -> Any:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(repeats, -3) if repeats > 1 else t for t in (key, value))
        if attn_mask is not None and attn_mask.requires_grad:
            return by_parts(query, key, value, attn_mask)
        is_causal = more.get("is_causal", False)
        return attention(query, key, value, 0.0, is_causal, attn_mask=attn_mask)[0]

    with (
        mock.patch.object(functional, "dropout", dropout),
        mock.patch.object(functional, "scaled_dot_product_attention", attend),
        torch.device("meta"),
    ):
        step = builder(rng)
        with Recorder():
            step().backward()
    return dict(sorted(calls.items()))
