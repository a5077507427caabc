"""Keys of stages, by which equal stages share a price and a sharding."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.node import map_arg
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from nostall.parallel.module.model import Model
from nostall.parallel.module.segment import Segment

Signature = tuple[object, ...]


def signature(model: Model, first: int, end: int, samples: int) -> Signature:
    """Key of a stage in the price table.

    Two stages with equal keys run the same operators on the same shapes and dtypes, so that one
    price holds for both.
    """
    segment = model.segment(first, end, samples, torch.device("cpu"))
    nodes = list(segment.function.graph.nodes)
    numbers = {node: f"node {i}" for i, node in enumerate(nodes)}
    given = _given_tensors(model, segment, samples)
    operators = [
        (
            str(node.target),
            repr(map_arg((node.args, node.kwargs), lambda n: numbers[n])),
            *(_shape_and_dtype(value) for value in tree_leaves(node.meta.get("val"))),
        )
        for node in nodes
        if node.op != "placeholder"
    ]
    return (len(segment.sent), *given, *operators)


def _given_tensors(model: Model, segment: Segment, samples: int) -> list[Signature]:
    """Role, shape and dtype of a segment's arguments."""
    batch = tree_leaves(model.job.example_batch(samples))
    return [
        *((_role(tensor), *_shape_and_dtype(tensor)) for tensor in segment.own),
        *(("input", *_shape_and_dtype(batch[i])) for i in segment.leaves),
        *(
            ("received", str(model.shape(name, samples)), str(model.dtype(name)))
            for name in segment.used
        ),
    ]


def _role(own: Any) -> str:
    if not isinstance(own, Parameter):
        return "buffer"
    return "parameter" if own.requires_grad else "frozen parameter"


def _shape_and_dtype(value: Any) -> Signature:
    """Both as text; a value that is no tensor stands for itself."""
    if not hasattr(value, "dtype"):
        return (repr(value),)
    return str(tuple(value.shape)), str(value.dtype)
