"""``torch.ops.nostall.stitched_lists``: the operator of kernels that change tensors in place.

Kernels over lists write results where the graph would copy them to: into its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nostall.attach.torch_compile.runtime import custom_op

_LIBRARY = torch.library.Library("nostall", "FRAGMENT")
_LIBRARY.define(
    "stitched_lists(Tensor(a!)[] changed, Tensor[] inputs, str kernel) -> Tensor[]",
    tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag),
)


def launch_lists(changed: Sequence[Tensor], inputs: Sequence[Tensor], kernel: str) -> list[Tensor]:
    """Run a kernel past PyTorch's dispatcher, as :func:`custom_op.launch` does."""
    return custom_op.launch([*changed, *inputs], kernel)


def _run_op(changed: list[Tensor], inputs: list[Tensor], kernel: str) -> list[Tensor]:
    return custom_op.run_op([*changed, *inputs], kernel)


def _run_fake(changed: list[Tensor], inputs: list[Tensor], kernel: str) -> list[Tensor]:
    return custom_op.load_op(kernel).allocate_outputs([*changed, *inputs])


def _run_functionalized(changed: list[Tensor], inputs: list[Tensor], kernel: str) -> list[Tensor]:
    """Never called: passes insert the operator after functionalization.

    Inductor accepts an operator that mutates and returns a list only with such a kernel.
    """
    raise NotImplementedError("stitched_lists is inserted after functionalization only")


_LIBRARY.impl("stitched_lists", _run_functionalized, "Functionalize")
_LIBRARY.impl("stitched_lists", _run_op, "CompositeExplicitAutograd")
_LIBRARY.impl("stitched_lists", _run_fake, "Meta")

LISTS_OP = torch.ops.nostall.stitched_lists.default
"""The operator in a graph: ``LISTS_OP(changed, inputs, kernel)``."""
