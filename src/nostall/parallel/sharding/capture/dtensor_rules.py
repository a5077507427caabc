"""Adapter to the private sharding rules of DTensor: the strategies of one operator on one mesh.

No other module of nostall uses these parts.  DTensor keeps rules in two registries and moves
operators from the first to the second with each version:

- ``op_strategy_funcs``: functions of an operator whose inputs have lists of placements;
- ``op_single_dim_strategy_funcs``: functions of an operator and the shapes of its inputs.

Tested with torch 2.11 to 2.13; if another version lacks a part, the error names it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial, reduce
from importlib import import_module
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from nostall.core.errors import MissingPart, one_line
from nostall.parallel.module.effects import schema_arguments
from nostall.parallel.sharding.placements import (
    PARTIAL_MEAN,
    PARTIAL_SUM,
    REPLICATED,
    Placement,
    Strategy,
    shard,
)

_PACKAGE = "torch.distributed.tensor"
_PARTS = (
    "_api.DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs",
    "_api.DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs",
    "_dtensor_spec.DTensorSpec",
    "_dtensor_spec.TensorMeta",
    "_op_schema.OpSchema",
    "_op_schema.OpSpec",
    "_op_schema.OpStrategy",
    "_op_schema.TupleStrategy",
    "_ops.single_dim_strategy._ShardingPlaceholder",
    "device_mesh.DeviceMesh",
    "placement_types.Partial",
    "placement_types.Replicate",
    "placement_types.Shard",
)
_MEAN = 1
"""Value of the argument ``reduction`` of losses that return a mean."""
_REDUCTIONS = {"sum": PARTIAL_SUM, "avg": PARTIAL_MEAN}
"""Placements by the reduction of DTensor's Partial; strategies with other reductions are left
out."""


@cache
def missing_part() -> str:
    """The first part in use that the installed torch lacks; empty if it has all."""
    for path in _PARTS:
        try:
            _part(path)
        except (ImportError, AttributeError):
            return f"{_PACKAGE}.{path}"
    return ""


def require_parts() -> None:
    """Raise :class:`MissingPart` if the installed torch lacks a part."""
    if part := missing_part():
        raise MissingPart(
            f"torch {torch.__version__} has no {part}; versions that have it are 2.11 to 2.13; "
            "install one (pip install 'torch>=2.11,<2.14')"
        )


@cache
def _part(path: str) -> Any:
    module, _, rest = path.partition(".")
    if module == "_ops":
        name, _, rest = rest.partition(".")
        module = f"{module}.{name}"
    return reduce(getattr, rest.split("."), import_module(f"{_PACKAGE}.{module}"))


def has_rule(target: Any) -> bool:
    """Whether DTensor has a sharding rule for an operator."""
    return any(target in _part(path) for path in _PARTS[:2])


def is_known(target: Any) -> bool:
    """Whether DTensor has a rule or a handler of its own for an operator."""
    handlers = getattr(_part("_api.DTensor._op_dispatcher"), "_custom_op_handlers", {})
    return has_rule(target) or target in handlers


def is_mean(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an operator is a loss, or its gradient, that divides by a count or by weights.

    A shard has another count than the whole; DTensor's rules for such operators are wrong for
    weights or ignored targets (nll_loss in torch 2.13).
    """
    return bool(schema_arguments(target, args, kwargs).get("reduction") == _MEAN)


def is_replaceable(target: Any) -> bool:
    """Whether ``register_sharding`` replaces DTensor's rule: it does in the first registry only."""
    return target not in _part(_PARTS[1])


def strategies(
    target: Any, args: Sequence[Any], kwargs: dict[str, Any], devices: int
) -> list[Strategy]:
    """DTensor's strategies of an operator on a mesh dimension of ``devices`` devices.

    ``args`` and ``kwargs`` have tensors (real or fake) where the operator reads tensors.  The
    strategies may shard dimensions unevenly and may be listed twice.  Empty if there is no rule, if
    the rule does not accept these arguments, or for a mean (see :func:`is_mean`).
    """
    if is_mean(target, args, kwargs):
        return []
    old, new = (_part(path) for path in _PARTS[:2])
    if target in old:
        return _from_placements(old[target], target, args, kwargs, devices)
    if target in new:
        return _from_shapes(new[target], target, args, kwargs)
    return []


def _from_shapes(
    rule: Any, target: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[Strategy]:
    """Strategies of the second registry: lists of the placements of outputs, then of inputs."""

    def shapes(values: Any) -> Any:
        return tuple(map(shapes, values)) if isinstance(values, list | tuple) else _meta(values)

    by_name = {name: shapes(v) for name, v in kwargs.items()}
    rows = _call(target, rule.func, target, tuple(map(shapes, args)), by_name) or []
    inputs = _count_tensors([args, list(kwargs.values())])
    result = []
    for row in rows:
        placements = [_placement(p) for p in row]
        outputs, read = placements[: len(row) - inputs], placements[len(row) - inputs :]
        strategy = _strategy(read, outputs)
        if strategy is not None:
            result.append(strategy)
    return result


def _from_placements(
    rule: Callable[[Any], Any],
    target: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    devices: int,
) -> list[Strategy]:
    """Strategies of the first registry, for every placement of the inputs.

    A rule may reject one placement with an error, such as a view that cannot be sharded; then the
    placements of the first input are tried one by one.  A rule may also expect lists of equal
    length, such as that of layer norm in torch 2.11; then all inputs are sharded alike.
    """
    mesh = _mesh(devices)

    def ask(chosen: _Chosen) -> list[Strategy]:
        return _ask(rule, target, *(_with_strategies(v, mesh, chosen) for v in (args, kwargs)))

    first = next(iter(_tensors([args, kwargs])), None)
    count = 0 if first is None else len(_all_placements(first))

    def one_by_one(choose: Callable[[int], _Chosen]) -> list[Strategy]:
        return [s for number in range(count) for s in ask(choose(number))]

    return (
        ask(lambda tensor: None)
        or one_by_one(lambda number: lambda tensor: number if tensor is first else None)
        or one_by_one(lambda number: partial(_alike, first, number))
    )


_Chosen = Callable[[torch.Tensor], int | None]
"""The number of the one placement that a tensor has; None for all placements."""


def _alike(first: torch.Tensor | None, number: int, tensor: torch.Tensor) -> int:
    """The placement of a tensor that is sharded as the first one is, if it has that dimension."""
    dim = number - 1  # number 0 is replicated
    assert first is not None
    has_dim = 0 <= dim < min(first.dim(), tensor.dim()) and tensor.shape[dim] == first.shape[dim]
    return number if has_dim and tensor.dim() == first.dim() else 0


_REJECTIONS = (RuntimeError, LookupError, ValueError, AssertionError)
"""Errors by which rules say that they do not accept arguments."""


def _call(target: Any, rule: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a rule of DTensor; None if the rule rejects the arguments or is defective.

    An error of another class is a defect of the rule, or of the arguments that nostall gives it:
    the operator runs replicated, and a warning names it.
    """
    try:
        return rule(*arguments)
    except _REJECTIONS:
        return None
    except Exception as error:  # a rule of another library may have any defect; the warning says it
        warnings.warn(
            f"DTensor's sharding rule of {target} failed ({one_line(error)}); the operator runs "
            "replicated",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _ask(rule: Any, target: Any, args: Any, kwargs: Any) -> list[Strategy]:
    result, returns = [], len(target._schema.returns)
    found = _call(target, rule, _part("_op_schema.OpSchema")(target, tuple(args), kwargs))
    for spec in found.strategies if found is not None else ():
        outputs = spec.output_specs
        # One entry stands for all outputs.
        outputs = list(outputs) if isinstance(outputs, list | tuple) else [outputs] * returns
        count = _count_strategies([args, list(kwargs.values())])
        inputs = list(spec.input_specs or [outputs[0]] * count)
        strategy = _strategy(
            [_placement(s.placements[0] if s is not None else None) for s in inputs],
            [_placement(s.placements[0] if s is not None else None) for s in outputs],
        )
        if strategy is not None and len(inputs) == count:
            result.append(strategy)
    return result


def _with_strategies(values: Any, mesh: Any, chosen: _Chosen) -> Any:
    """The arguments with a DTensor strategy in place of each tensor; lists become tuples of them.

    A strategy lists all placements of its tensor, or the chosen one.
    """
    strategy, spec = _part("_op_schema.OpStrategy"), _part("_op_schema.OpSpec")
    tensor_spec, group = _part("_dtensor_spec.DTensorSpec"), _part("_op_schema.TupleStrategy")

    def convert(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            placements, number = _all_placements(value), chosen(value)
            if number is not None:
                placements = [placements[number]]
            meta = _meta(value)
            return strategy([spec(tensor_spec(mesh, (p,), meta)) for p in placements])
        if isinstance(value, list | tuple) and any(isinstance(v, torch.Tensor) for v in value):
            return group(tuple(map(convert, value)))
        return value

    if isinstance(values, dict):
        return {name: convert(value) for name, value in values.items()}
    return [convert(value) for value in values]


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _all_placements(tensor: torch.Tensor) -> list[Any]:
    shards = [_part("placement_types.Shard")(d) for d in range(tensor.dim())]
    partial = [_part("placement_types.Partial")("sum")] if tensor.is_floating_point() else []
    return [_part("placement_types.Replicate")(), *shards, *partial]


def _strategy(
    inputs: Sequence[Placement | None], outputs: Sequence[Placement | None]
) -> Strategy | None:
    """The strategy; None if one of its placements is none that nostall has."""
    if any(p is None for p in (*inputs, *outputs)):
        return None
    return Strategy(
        tuple(p for p in inputs if p is not None), tuple(p for p in outputs if p is not None)
    )


def _placement(placement: Any) -> Placement | None:
    """A placement as text; ``""`` for an output that is not computed, None for an unknown one."""
    if placement is None:
        return ""
    if type(placement) in (
        _part("placement_types.Shard"),
        _part("_ops.single_dim_strategy._ShardingPlaceholder"),
    ):
        return shard(placement.dim)
    if type(placement) is _part("placement_types.Partial"):
        return _REDUCTIONS.get(placement.reduce_op)
    return REPLICATED if type(placement) is _part("placement_types.Replicate") else None


def _meta(value: Any) -> Any:
    def meta(tensor: torch.Tensor) -> Any:
        return _part("_dtensor_spec.TensorMeta")(
            torch.Size(tensor.shape), tuple(tensor.stride()), tensor.dtype
        )

    return tree_map_only(torch.Tensor, meta, value)


def _count_tensors(values: Any) -> int:
    if isinstance(values, list | tuple):
        return sum(map(_count_tensors, values))
    return isinstance(values, torch.Tensor)


def _count_strategies(values: Any) -> int:
    if isinstance(values, list | tuple):
        return sum(map(_count_strategies, values))
    if isinstance(values, _part("_op_schema.TupleStrategy")):
        return len(values.children)
    return isinstance(values, _part("_op_schema.OpStrategy"))


@cache
def _mesh(devices: int) -> Any:
    """A mesh without processes: rules read only its size."""
    return _part("device_mesh.DeviceMesh")(
        "cpu", torch.arange(devices), _init_backend=False, _rank=0
    )
