"""Classification of PyTorch operators into kinds, by their names."""

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


def operator_kind(name: str, flops: float) -> OperatorKind:
    """The kind of the operator ``aten.name.overload``.

    An unrecognised operator is a matrix product if PyTorch's FLOP counter has a formula for it
    (``flops`` > 0), else elementwise.
    """
    for kind, pattern in _PATTERNS:
        if pattern.search(name):
            return kind
    return OperatorKind.PRODUCT if flops else OperatorKind.ELEMENTWISE
