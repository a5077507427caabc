"""FLOP and bytes of one training step of a PyTorch module, operator by operator.

The step (forward, a scalar loss, backward) runs on fake tensors, which have shapes but no data, so
the model may be larger than the memory of the machine.  FLOP come from PyTorch's FLOP counter and
are halved for causal attention, because its kernels skip the masked half.  Bytes are what each
operator reads and writes once if nothing is cached or fused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nostall.core.errors import BadJob, MissingPart
from nostall.workload.jobs.record import Architecture, Job, Operator

if TYPE_CHECKING:
    import torch

_PRECISIONS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}


@dataclasses.dataclass(frozen=True, slots=True)
class ModuleFeatures:
    """FLOP and bytes of one step of a module, per replica."""

    flops: float
    """FLOP of matrix products, convolutions and attention."""
    product_bytes: float
    """Bytes that these operators read and write."""
    memory_bytes: float
    """Bytes that all other operators read and write."""
    input_bytes: float
    """Bytes of the batch."""
    dense_bytes: float
    """Bytes of all parameters that are not embedding tables."""
    embedding_bytes: float
    """Bytes of the embedding tables."""
    touched_bytes: float
    """Bytes of the embedding rows that the batch looks up, with repetition."""
    precision: str
    """Precision of most parameters."""
    operators: tuple[Operator, ...]


def module_features(
    module: torch.nn.Module,
    batch: Sequence[Any] | Mapping[str, Any],
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    training: bool = True,
) -> ModuleFeatures:
    """Count one step of ``module(*batch)``, or ``module(**batch)``, without computing it.

    ``loss`` maps the output of the module to a scalar; the default sums all floating-point tensors
    of the output.  ``training=False`` omits the backward pass.  Raises
    :class:`~nostall.core.errors.MissingPart` if PyTorch is not installed, and
    :class:`~nostall.core.errors.BadJob` if the step cannot be traced.
    """
    try:
        import torch
    except ImportError as error:
        raise MissingPart(
            "module features need PyTorch, which is not installed; pip install 'nostall[torch]'"
        ) from error
    from nostall.workload.modules.operator_counter import count_step

    inputs = list(batch.values()) if isinstance(batch, Mapping) else list(batch)
    counts = count_step(module, batch, loss, training)
    embeddings = {
        id(m.weight): m.weight
        for m in module.modules()
        if isinstance(m, torch.nn.Embedding | torch.nn.EmbeddingBag)
    }
    parameters = {id(p): p for p in module.parameters()}
    embedding_bytes = sum(_num_bytes(w) for w in embeddings.values())
    dtypes = [p.dtype for p in parameters.values() if p.is_floating_point()]
    dtype = max(set(dtypes), key=dtypes.count) if dtypes else torch.float32
    return ModuleFeatures(
        flops=counts.flops,
        product_bytes=counts.product_bytes,
        memory_bytes=counts.memory_bytes,
        input_bytes=float(sum(_num_bytes(t) for t in inputs if isinstance(t, torch.Tensor))),
        dense_bytes=float(sum(_num_bytes(p) for p in parameters.values()) - embedding_bytes),
        embedding_bytes=float(embedding_bytes),
        touched_bytes=counts.touched_bytes,
        precision=_PRECISIONS.get(str(dtype).removeprefix("torch."), "fp32"),
        operators=counts.operators,
    )


def job_from_features(
    features: ModuleFeatures,
    name: str,
    architecture: Architecture,
    *,
    replicas: int = 1,
    batch: float = 1,
) -> Job:
    """The job that trains the module; the closed forms of the model give its weight traffic."""
    if not features.flops + features.memory_bytes:
        raise BadJob(f"module {name!r} does no work in a step; give a module that computes")
    fields = {f.name: getattr(features, f.name) for f in dataclasses.fields(features)}
    del fields["product_bytes"]
    return Job(name, architecture, replicas, batch, **fields)


def _num_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())
