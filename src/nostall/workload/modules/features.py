"""FLOP and bytes of one training step of a PyTorch module, operator by operator.

The step (forward, a scalar loss, backward) runs under fake tensors: shapes are computed, data are
not, so that a model larger than this machine's memory can be described.  FLOP are those of
PyTorch's own FLOP counter, halved for causal attention, whose kernels skip what is masked.  Bytes
are what each operator has to read and write once when nothing is cached or fused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nostall.core.errors import BadJob, MissingPart
from nostall.workload.jobs.operators import Operator
from nostall.workload.jobs.record import Architecture, Job

if TYPE_CHECKING:
    import torch

_PRECISION = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}


@dataclass(frozen=True, slots=True)
class ModuleFeatures:
    """What one step of a module does, per replica.

    ``flops`` and ``product_bytes``: of products, convolutions and attention; ``memory_bytes``: of
    all other operators.  ``touched_bytes``: embedding rows that the
    batch looks up, with repetition.
    """

    flops: float
    product_bytes: float
    memory_bytes: float
    input_bytes: float
    dense_bytes: float
    embedding_bytes: float
    touched_bytes: float
    precision: str
    operators: tuple[Operator, ...]


def module_features(
    module: torch.nn.Module,
    batch: Sequence[Any] | Mapping[str, Any],
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    training: bool = True,
) -> ModuleFeatures:
    """Describe one step of ``module(*batch)`` (or ``**batch``); nothing is computed.

    ``loss`` maps the module's output to a scalar; without it every floating-point tensor of the
    output is summed.  ``training=False`` leaves the backward pass out.  Raises
    :class:`~nostall.core.errors.MissingPart` without PyTorch and
    :class:`~nostall.core.errors.BadJob` where the step cannot be traced.
    """
    try:
        import torch
    except ImportError as error:
        raise MissingPart(
            "describing a module needs PyTorch, which is missing; pip install 'nostall[torch]'"
        ) from error
    from nostall.workload.modules.counting import count_step

    given = list(batch.values()) if isinstance(batch, Mapping) else list(batch)
    counted = count_step(module, batch, loss, training)
    embeddings = {
        id(m.weight): m.weight
        for m in module.modules()
        if isinstance(m, torch.nn.Embedding | torch.nn.EmbeddingBag)
    }
    own = {id(p): p for p in module.parameters()}
    tables = sum(_size(w) for w in embeddings.values())
    floating = [p.dtype for p in own.values() if p.is_floating_point()]
    dtype = max(set(floating), key=floating.count) if floating else torch.float32
    return ModuleFeatures(
        flops=counted.flops,
        product_bytes=counted.product_bytes,
        memory_bytes=counted.memory_bytes,
        input_bytes=float(sum(_size(t) for t in given if isinstance(t, torch.Tensor))),
        dense_bytes=float(sum(_size(p) for p in own.values()) - tables),
        embedding_bytes=float(tables),
        touched_bytes=counted.touched_bytes,
        precision=_PRECISION.get(str(dtype).removeprefix("torch."), "fp32"),
        operators=counted.operators,
    )


def job_of(
    features: ModuleFeatures,
    name: str,
    architecture: Architecture,
    *,
    replicas: int = 1,
    batch: float = 1,
) -> Job:
    """The record that the model takes; its weight traffic follows from the closed forms."""
    if not features.flops + features.memory_bytes:
        raise BadJob(f"module {name!r} does no work in a step; give a module that computes")
    return Job(
        name=name,
        architecture=architecture,
        replicas=replicas,
        batch=batch,
        flops=features.flops,
        memory_bytes=features.memory_bytes,
        input_bytes=features.input_bytes,
        dense_bytes=features.dense_bytes,
        embedding_bytes=features.embedding_bytes,
        touched_bytes=features.touched_bytes,
        precision=features.precision,
        operators=features.operators,
    )


def _size(tensor: torch.Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())
