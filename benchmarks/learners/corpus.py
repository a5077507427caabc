"""Operator documents of training steps of models of random size.

    python -m benchmarks run learners.corpus --out src/nostall/workload/learning/corpus.json.gz

The models have shapes but neither weights nor data (PyTorch's meta device), so no GPU and no
memory is needed.  A document counts the operators that forward and backward pass dispatch.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from nostall.workload.learning.documents import Document, word, write_documents

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
            if tensors and not func.is_view:
                name = str(func).split(".")
                calls[word(f"{name[0]}::{name[1]}", max(t.numel() for t in tensors))] += 1
            return out

    with torch.device("meta"):
        step = builder(rng)
        with Recorder():
            step().backward()
    return dict(sorted(calls.items()))
