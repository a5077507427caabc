"""Which kind an operator of PyTorch is, by its name."""

from __future__ import annotations

import re

from nostall.workload.jobs.operators import OperatorKind

_BY_NAME = (
    (OperatorKind.ATTENTION, r"attention"),
    (OperatorKind.CONVOLUTION, r"conv"),
    (OperatorKind.EMBEDDING, r"embedding|index_select|\bgather|index_put|scatter"),
    (OperatorKind.NORMALISATION, r"norm(?!al)|softmax"),
    (
        OperatorKind.REDUCTION,
        r"\.(?:sum|mean|amax|amin|max|min|argmax|var|std|prod|any|all|cumsum|logsumexp)\b|"
        r"var_mean|pool|nll_loss|linalg_vector",
    ),
)
_PATTERNS = tuple((kind, re.compile(pattern)) for kind, pattern in _BY_NAME)


def kind_of_operator(name: str, flops: float) -> OperatorKind:
    """The kind of ``aten.name.overload``.

    What nothing here knows is a product where PyTorch counts its FLOP, else elementwise, as most of
    the rest is.
    """
    for kind, pattern in _PATTERNS:
        if pattern.search(name):
            return kind
    return OperatorKind.PRODUCT if flops else OperatorKind.ELEMENTWISE
