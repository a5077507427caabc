"""Operator documents: how often a program calls each operator, by the size of its result.

A document is a bag of words.  A word is an operator's name and, if sizes are known, the base-8
logarithm of the number of elements of its result: ``mm`` or ``mm 7``.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nostall.core.errors import BadInput
from nostall.core.files.atomic import create_folder, write_atomically

Floats = NDArray[np.float64]
FORMAT = "nostall operator documents 1"


@dataclass(frozen=True, slots=True)
class Document:
    """One program."""

    name: str
    kind: str
    """Kind of work, or an empty string if nobody labelled it."""
    counts: dict[str, int]
    """Calls of each word."""

    @property
    def operators(self) -> dict[str, int]:
        """Calls of each operator, of all sizes."""
        calls: dict[str, int] = {}
        for word, count in self.counts.items():
            operator = word.partition(" ")[0]
            calls[operator] = calls.get(operator, 0) + count
        return calls


def canonical_operator(name: str) -> str | None:
    """Name of an operator on every device, in place or not; None for bookkeeping.

    ``aten::cudnn_batch_norm`` and ``aten::native_batch_norm`` are one operator, as are all fused
    implementations of attention.  Allocations, copies and optimizer steps do not tell kinds of
    models apart; views do no work, and composite operators call others that are counted.
    """
    if not name.startswith("aten::"):
        return None
    stem = name.removeprefix("aten::").rstrip("_")
    if _BOOKKEEPING.fullmatch(stem.lstrip("_")) or _VIEWS_AND_COMPOSITES.fullmatch(stem):
        return None
    for pattern, replacement in _IMPLEMENTATIONS:
        stem = pattern.sub(replacement, stem)
    return stem


_BOOKKEEPING = re.compile(
    r"(?:empty|zeros|ones|full|rand\w*|new)(?:_\w+)?|fill|zero|copy|to_copy|clone|detach|resize\w*|"
    r"set|arange|scalar_tensor|item|local_scalar_dense|result_type|reshape\w*|unsafe_view|"
    r"bernoulli|normal|uniform|random|foreach_\w+|fused_(?:adam|sgd)\w*|amp_\w+|lift\w*"
)
_VIEWS_AND_COMPOSITES = re.compile(
    r"view\w*|t|transpose|as_strided|expand\w*|permute|slice|select|squeeze|unsqueeze|narrow|split\w*|"
    r"chunk|unbind|alias|contiguous|to|flatten|unflatten|movedim|matmul|linear|einsum|conv\dd|"
    r"conv_transpose\dd|_convolution|(?:cudnn|miopen|mkldnn)_convolution\w*|batch_norm|"
    r"_batch_norm_impl_index\w*|layer_norm|group_norm|rms_norm|dropout|softmax|log_softmax|"
    r"cross_entropy_loss|nll_loss|nll_loss_nd|nll_loss2d|embedding_bag|adaptive_avg_pool2d|max_pool2d|"
    r"scaled_dot_product_attention|_(?:flash|efficient|cudnn)_attention_\w+|clamp_min|lstm|gru|"
    r"_scaled_dot_product_attention_math\w*|pad|stride|size|is_nonzero|broadcast_\w+"
)
_IMPLEMENTATIONS = (
    (
        re.compile(r"^_scaled_dot_product_(?:fused_|flash_|efficient_|cudnn_)*attention"
                   r"(?:_for_cpu|_overrideable|_for_mps)*"),
        "fused_attention",
    ),
    (re.compile(r"^(?:cudnn|miopen)_batch_norm"), "native_batch_norm"),
)  # fmt: skip


def word(operator: str, elements: int | None) -> str:
    """The word of a call whose result has ``elements`` elements; None if it is not known."""
    if elements is None:
        return operator
    return f"{operator} {(max(1, elements).bit_length() - 1) // 3}"


def count_matrix(bags: Sequence[dict[str, int]], vocabulary: Sequence[str]) -> Floats:
    """Calls by document and word, shape (documents, words); other words are left out."""
    column = {w: i for i, w in enumerate(vocabulary)}
    counts = np.zeros((len(bags), len(vocabulary)))
    for row, bag in enumerate(bags):
        for w, count in bag.items():
            if w in column:
                counts[row, column[w]] += count
    return counts


def vocabulary_of(bags: Iterable[dict[str, int]]) -> list[str]:
    return sorted({w for bag in bags for w in bag})


def write_documents(path: Path, documents: Sequence[Document]) -> None:
    """Write documents as compressed JSON; equal documents give equal bytes."""
    vocabulary = vocabulary_of(document.counts for document in documents)
    number = {w: i for i, w in enumerate(vocabulary)}
    body = {
        "format": FORMAT,
        "words": vocabulary,
        "documents": [
            {"name": d.name, "kind": d.kind, "counts": [[number[w], d.counts[w]] for w in d.counts]}
            for d in documents
        ],
    }
    text = json.dumps(body, separators=(",", ":"))
    create_folder(path.parent)
    write_atomically(path, gzip.compress(text.encode(), mtime=0))


def read_documents(path: Path) -> list[Document]:
    """Read what :func:`write_documents` wrote.

    Raises :class:`~nostall.core.errors.BadInput` for a file that cannot be read.
    """
    try:
        body = json.loads(gzip.decompress(path.read_bytes()))
        if body["format"] != FORMAT:
            raise BadInput(
                f"{path} has the format {body['format']!r}; allowed is {FORMAT!r}; write it again "
                "with `nostall characterize --learn`"
            )
        return [_parse(document, body["words"]) for document in body["documents"]]
    except _DAMAGE as error:
        raise BadInput(
            f"{path} does not hold operator documents ({type(error).__name__}: {error}); give a "
            "file that `nostall characterize --learn` wrote"
        ) from error
    except OSError as error:
        raise BadInput(
            f"cannot read {path}: {error.strerror or error}; give a file that `nostall "
            "characterize --learn` wrote"
        ) from error


_DAMAGE = (gzip.BadGzipFile, zlib.error, EOFError, ValueError, KeyError, TypeError, IndexError)


def _parse(document: dict[str, Any], words: list[str]) -> Document:
    counts = {str(words[number]): int(count) for number, count in document["counts"]}
    return Document(str(document["name"]), str(document["kind"]), counts)
