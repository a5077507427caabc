"""Operators of a joint graph with their strategies: from PyTorch's FX to :class:`ShardingGraph`.

nostall's own sharding rules, for operators that DTensor has none for.

Each rule gives the strategies of an operator on one mesh dimension, besides the replicated one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from nostall.parallel.errors import BadModel
from nostall.parallel.module.job import Job
from nostall.parallel.sharding.capture import dtensor_rules
from nostall.parallel.sharding.capture.joint import JointGraph, trace_step
from nostall.parallel.sharding.graph import Operator, OperatorKind, ShardingGraph, TensorInfo
from nostall.parallel.sharding.placements import (
    PARTIAL_SUM,
    REPLICATED,
    Placement,
    Strategy,
    is_partial,
    local_shape,
    shard,
)

Rule = Callable[[Sequence[Any], dict[str, Any]], list[Strategy]]
_aten = torch.ops.aten


def _attention(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Strategy]:
    """Attention on CPUs: samples and heads are independent; (query, key, value, mask)."""
    mask = kwargs.get("attn_mask")
    return [
        Strategy((p, p, p, *_mask_placement(mask, d)), (p, p))
        for d, p in ((0, shard(0)), (1, shard(1)))
        if _same_heads(args[:3])
    ]


def _attention_backward(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Strategy]:
    """Its backward pass; (gradient, query, key, value, output, logsumexp, mask)."""
    mask = kwargs.get("attn_mask")
    return [
        Strategy((p,) * 6 + _mask_placement(mask, d), (p, p, p))
        for d, p in ((0, shard(0)), (1, shard(1)))
        if _same_heads(args[1:4])
    ]


def _same_heads(tensors: Sequence[torch.Tensor]) -> bool:
    return len({t.shape[:2] for t in tensors}) == 1


def _mask_placement(mask: torch.Tensor | None, dim: int) -> tuple[str, ...]:
    """Placement of an attention mask, whose last dimensions are broadcast against the scores."""
    if mask is None:
        return ()
    own = dim - (4 - mask.dim())
    return (shard(own) if own >= 0 and mask.shape[own] > 1 else REPLICATED,)


def _group_norm(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Strategy]:
    """Samples are independent; (input, weight, bias)."""
    parameters = sum(isinstance(a, torch.Tensor) for a in args[1:3])
    return [Strategy((shard(0), *(REPLICATED,) * parameters), (shard(0),) * 3)]


def _group_norm_backward(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Strategy]:
    """Gradients of weight and bias are sums over samples; (gradient, input, mean, rstd, weight)."""
    weight = (REPLICATED,) if isinstance(args[4], torch.Tensor) else ()
    return [Strategy((shard(0),) * 4 + weight, (shard(0), PARTIAL_SUM, PARTIAL_SUM))]


def _elementwise(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Strategy]:
    """A copy of one tensor."""
    placements = [*map(shard, range(args[0].dim())), PARTIAL_SUM]
    return [Strategy((p,), (p,)) for p in placements]


def _convolution(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Strategy]:
    """Samples and output channels are independent; (input, weight, bias)."""
    has_bias, groups = isinstance(args[2], torch.Tensor), args[8]
    samples = Strategy((shard(0), REPLICATED, *(REPLICATED,) * has_bias), (shard(0),))
    if groups != 1:
        return [samples]
    return [samples, Strategy((REPLICATED, shard(0), *(shard(0),) * has_bias), (shard(1),))]


def _convolution_backward(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Strategy]:
    """Gradients of weight and bias are sums over samples, that of the input over output channels;
    (gradient, input, weight)."""
    samples = Strategy((shard(0), shard(0), REPLICATED), (shard(0), PARTIAL_SUM, PARTIAL_SUM))
    if args[9] != 1:  # groups
        return [samples]
    channels = Strategy((shard(1), REPLICATED, shard(0)), (PARTIAL_SUM, shard(0), shard(0)))
    return [samples, channels]


def _max_pool(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Strategy]:
    """Samples and channels are independent; the indices count within a plane."""
    return [Strategy((shard(d),), (shard(d), shard(d))) for d in range(args[0].dim() - 2)]


def _max_pool_backward(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Strategy]:
    """(gradient, input, ..., indices)."""
    return [Strategy((shard(d),) * 3, (shard(d),)) for d in range(args[0].dim() - 2)]


def _scatter_value(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Strategy]:
    """Write one number at indices along a dimension; the others are independent;
    (tensor, dimension, indices)."""
    tensor, indices = args[0], args[2]
    written = args[1] % max(1, tensor.dim())
    return [
        Strategy((shard(d), shard(d)), (shard(d),))
        for d in range(tensor.dim())
        if d != written and tensor.shape[d] == indices.shape[d]
    ]


def _cat(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Strategy]:
    """Tensors one after the other along a dimension; the other dimensions are independent."""
    tensors, joined = args[0], args[1] if len(args) > 1 else 0
    dims = tensors[0].dim()
    if any(tensor.dim() != dims for tensor in tensors):  # empty ones may have one
        return []
    others = (shard(d) for d in range(dims) if d != joined % dims)
    return [Strategy((p,) * len(tensors), (p,)) for p in (*others, PARTIAL_SUM)]


def _stack(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Strategy]:
    """Tensors along a new dimension; all others are independent."""
    tensors, new = args[0], args[1] if len(args) > 1 else 0
    dims = tensors[0].dim()
    shards = [(shard(d), shard(d + (d >= new % (dims + 1)))) for d in range(dims)]
    return [Strategy((p,) * len(tensors), (q,)) for p, q in (*shards, (PARTIAL_SUM, PARTIAL_SUM))]


RULES: dict[Any, Rule] = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    _aten.native_group_norm.default: _group_norm,
    _aten.native_group_norm_backward.default: _group_norm_backward,
    _aten.lift_fresh_copy.default: _elementwise,
    _aten.cat.default: _cat,
    _aten.stack.default: _stack,
}
"""Rules by operator; they replace DTensor's, which replicate a list of tensors that each may have
several placements."""
FALLBACK_RULES: dict[Any, Rule] = {
    _aten.convolution.default: _convolution,
    _aten.convolution_backward.default: _convolution_backward,
    _aten.max_pool2d_with_indices.default: _max_pool,
    _aten.max_pool2d_with_indices_backward.default: _max_pool_backward,
    _aten.scatter.value: _scatter_value,
}
"""Rules by operator for versions of torch in which DTensor has none or shards nothing (2.11)."""


_FLOATING = ("float", "bfloat", "complex")
_IDENTITIES = {_aten.detach.default: 0, _aten.copy.default: 1}
"""Operators that return an input, and its position; the graph does without them.  ``copy`` does so
if its inputs have one shape and type: changes in place are traced as such copies."""
_SPARSE_READS = {_aten.embedding.default: frozenset({0})}
"""Positions of inputs of which an operator reads only a few rows."""
_ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu.default
_ATTENTION_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
"""Attention on CPUs, which PyTorch's counter of FLOP does not know."""


@dataclass(frozen=True, eq=False)
class CapturedStep:
    """The graph of a training step, and the FX nodes that its operators stand for."""

    joint: JointGraph
    graph: ShardingGraph
    nodes: tuple[Node | None, ...]
    """For each operator its FX node; None for branches and the loss."""
    output_indices: tuple[tuple[int, ...], ...]
    """For each operator, the places of its outputs in the value of its FX node."""


def capture(job: Job, samples: int, mesh: Sequence[int], name: str = "") -> CapturedStep:
    """Trace the training step of a job and collect the strategies of its operators on a mesh.

    Raises :class:`BadModel` if the job cannot be traced, and :class:`MissingPart` if the installed
    torch has other sharding rules than those that nostall reads.
    """
    dtensor_rules.require_parts()
    joint = trace_step(job, samples)
    return _GraphBuilder(joint, tuple(mesh), name or type(job.module).__name__).build()


@dataclass
class _GraphBuilder:
    """Translates a joint graph node by node."""

    joint: JointGraph
    mesh: tuple[int, ...]
    name: str
    tensors: list[TensorInfo] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    nodes: list[Node | None] = field(default_factory=list)
    indices: list[tuple[int, ...]] = field(default_factory=list)
    numbers: dict[Node, int] = field(default_factory=dict)
    """Number of the tensor that consumers of a node read: behind its branch, if it has one."""
    without_rule: list[str] = field(default_factory=list)
    cache: dict[tuple[str, int], tuple[Strategy, ...]] = field(default_factory=dict)

    def build(self) -> CapturedStep:
        joint = self.joint
        _skip_identities(joint)
        forward = _ancestors(joint.loss)
        kinds: dict[Node, tuple[OperatorKind, str]] = {
            **{node: ("parameter", name) for name, node in joint.parameters.items()},
            **{node: ("constant", name) for name, node in joint.buffers.items()},
            **{node: ("input", f"batch {leaf}") for leaf, node in joint.inputs.items()},
            joint.tangent: ("constant", "gradient of the loss"),
            **{node: ("constant", node.target) for node in joint.graph.find_nodes(op="get_attr")},
        }
        for node in joint.graph.nodes:
            if node in kinds:
                self._add_source(node, *kinds[node])
            elif node.op == "call_function" and node.target is not operator.getitem:
                self._add_operation(node, is_forward=node in forward)
        loss = self.numbers[joint.loss]
        unsharded = tuple((Strategy((REPLICATED,), ()),) for _ in self.mesh)
        self._append(Operator("loss", "loss", "loss", (loss,), (), unsharded), None, ())
        self._connect_gradients()
        graph = ShardingGraph(
            self.name,
            self.mesh,
            tuple(self.tensors),
            tuple(self.operators),
            tuple(self.without_rule),
        )
        return CapturedStep(joint, graph, tuple(self.nodes), tuple(self.indices))

    def _add_source(self, node: Node, kind: OperatorKind, target: str) -> None:
        """Add a parameter, a buffer or a tensor of the batch; a constant is replicated."""
        if node.op == "get_attr":
            value = getattr(self.joint.graph_module, node.target)
            if not isinstance(value, torch.Tensor):
                raise BadModel(
                    f"the step uses a {type(value).__name__} of its own, which shards would not "
                    "share; write the forward pass without it"
                )
            node.meta["val"] = value
        info = _info(node.meta["val"])
        number = self._new_tensor(info)
        placements = [
            [REPLICATED] if kind == "constant" else _whole_placements(info, size)
            for size in self.mesh
        ]
        strategies = tuple(tuple(Strategy((), (p,)) for p in own) for own in placements)
        signature = f"{kind} {info}"
        self._append(
            Operator(
                node.name, kind, target, (), (number,), strategies, moves_memory=False,
                signature=signature,
            ),
            node,
            (0,),
        )  # fmt: skip
        self._number(node, number, len(node.users), is_forward=True)

    def _add_operation(self, node: Node, *, is_forward: bool) -> None:
        inputs = _tensor_arguments(node)
        value = node.meta["val"]
        is_tuple = isinstance(value, list | tuple)
        users: dict[int, list[Node]] = {0: [node]}
        if is_tuple:
            users = {}
            for user in node.users:
                users.setdefault(int(user.args[1]), []).append(user)
        used = tuple(sorted(users))
        if not used:
            return  # its results are not read
        returned = [value[i] for i in used] if is_tuple else [value]
        if not all(isinstance(own, torch.Tensor) for own in returned):
            raise BadModel(
                f"{node.target} returns a {type(returned[0]).__name__}; a step can be sharded only "
                "if all of its values are tensors; write the forward pass without this operator"
            )
        if inputs and not _has_rule(node.target):
            self.without_rule.append(str(node.target))
        infos = [_info(own) for own in returned]
        signature = _signature(node)
        strategies = tuple(
            self._strategies(node, signature, size, infos, used) for size in self.mesh
        )
        numbers = tuple(self._new_tensor(info) for info in infos)
        self._append(
            Operator(
                node.name,
                "operation",
                str(node.target),
                tuple(self.numbers[argument] for argument in inputs),
                numbers,
                strategies,
                _flops(node),
                _SPARSE_READS.get(node.target, frozenset()),
                not _is_view(node),
                is_forward,
                signature,
                _may_fuse(node),
            ),
            node,
            used,
        )
        for index, number in zip(used, numbers, strict=True):
            readers = sum(len(user.users) for user in users[index]) if is_tuple else len(node.users)
            for user in users[index]:
                if user is users[index][0]:
                    self._number(user, number, readers, is_forward=is_forward)
                self.numbers[user] = self.numbers[users[index][0]]

    def _number(self, node: Node, tensor: int, readers: int, *, is_forward: bool) -> None:
        """Record the tensor that consumers of a node read; several consumers get a branch."""
        info = self.tensors[tensor]
        if readers > 1 and info.elements > 1:
            branch = self._new_tensor(info)
            strategies = tuple(
                tuple(Strategy((p,), (p,)) for p in [*_whole_placements(info, size), PARTIAL_SUM])
                for size in self.mesh
            )
            self._append(
                Operator(
                    f"{node.name}.branch", "branch", "branch", (tensor,), (branch,), strategies,
                    moves_memory=False, is_forward=is_forward, signature=f"branch {info}",
                ),
                None,
                (0,),
            )  # fmt: skip
            tensor = branch
        self.numbers[node] = tensor

    def _strategies(
        self,
        node: Node,
        signature: str,
        devices: int,
        infos: Sequence[TensorInfo],
        used: tuple[int, ...],
    ) -> tuple[Strategy, ...]:
        """Strategies with even shards; operators with equal signatures share them."""
        inputs = [_info(argument.meta["val"]) for argument in _tensor_arguments(node)]
        key = (f"{signature} {used}", devices)
        if key not in self.cache:
            self.cache[key] = _even_strategies(node, devices, inputs, infos, used)
        return self.cache[key]

    def _connect_gradients(self) -> None:
        """Let each parameter read its gradient, in the placement that the parameter has."""
        for name, node in self.joint.gradients.items():
            number = self.nodes.index(self.joint.parameters[name])
            parameter = self.operators[number]
            strategies = tuple(
                tuple(Strategy(s.outputs, s.outputs) for s in own) for own in parameter.strategies
            )
            self.operators[number] = replace(
                parameter, inputs=(self.numbers[node],), strategies=strategies
            )

    def _new_tensor(self, info: TensorInfo) -> int:
        self.tensors.append(info)
        return len(self.tensors) - 1

    def _append(self, added: Operator, node: Node | None, indices: tuple[int, ...]) -> None:
        self.operators.append(added)
        self.nodes.append(node)
        self.indices.append(indices)


def _even_strategies(
    node: Node,
    devices: int,
    inputs: Sequence[TensorInfo],
    outputs: Sequence[TensorInfo],
    used: tuple[int, ...],
) -> tuple[Strategy, ...]:
    """The replicated strategy, then those of the rules that shard inputs and outputs evenly."""
    count = len(inputs)
    result = [Strategy((REPLICATED,) * count, (REPLICATED,) * len(outputs))]
    if not inputs:
        return tuple(result)
    args, kwargs = (map_arg(a, lambda n: n.meta["val"]) for a in (node.args, node.kwargs))
    for rule in _rules(node.target, args, kwargs, devices):
        if len(rule.inputs) != count or len(rule.outputs) <= max(used):
            continue
        strategy = Strategy(rule.inputs, tuple(rule.outputs[i] for i in used))
        read = [*zip(inputs, rule.inputs, strict=True)]
        returned = [*zip(outputs, strategy.outputs, strict=True)]
        is_even = all(_is_even(info, p, devices) for info, p in (*read, *returned))
        if is_even and not _truncates(read, returned) and strategy not in result:
            result.append(strategy)
    return tuple(result)


def _truncates(
    read: Iterable[tuple[TensorInfo, Placement]], returned: Iterable[tuple[TensorInfo, Placement]]
) -> bool:
    """Whether a partial sum of floating-point numbers is cast to integers, which is not linear."""
    partial = any(is_partial(p) and info.dtype.startswith(_FLOATING) for info, p in read)
    return partial and any(
        is_partial(p) and not info.dtype.startswith(_FLOATING) for info, p in returned
    )


def _is_even(info: TensorInfo, placement: Placement, devices: int) -> bool:
    return placement != "" and local_shape(info.shape, (placement,), (devices,)) is not None


def _rules(
    target: Any, args: Sequence[Any], kwargs: dict[str, Any], devices: int
) -> list[Strategy]:
    """nostall's strategies of an operator, or DTensor's; the fallback's if those shard nothing."""
    if target in RULES:
        return RULES[target](args, kwargs)
    found = dtensor_rules.strategies(target, args, kwargs, devices)
    if any(strategy.splits_work for strategy in found) or target not in FALLBACK_RULES:
        return found
    return FALLBACK_RULES[target](args, kwargs)


def _has_rule(target: Any) -> bool:
    return dtensor_rules.has_rule(target) or target in RULES or target in FALLBACK_RULES


def _whole_placements(info: TensorInfo, devices: int) -> list[Placement]:
    """Replicated, and every even shard."""
    shards = [shard(d) for d in range(len(info.shape))]
    return [REPLICATED, *(p for p in shards if _is_even(info, p, devices))]


def _info(value: torch.Tensor) -> TensorInfo:
    name = str(value.dtype).removeprefix("torch.")
    return TensorInfo(tuple(map(int, value.shape)), name, value.dtype.itemsize)


def _tensor_arguments(node: Node) -> list[Node]:
    """The arguments of a node that are tensors, in order; an argument may be listed twice."""
    leaves = tree_leaves([node.args, node.kwargs])
    return [leaf for leaf in leaves if isinstance(leaf, Node)]


def _signature(node: Node) -> str:
    """Text of the target, the shapes of tensors and all other arguments."""

    def describe(value: Any) -> Any:
        return str(_info(value.meta["val"])) if isinstance(value, Node) else value

    args, kwargs = (tree_map(describe, a) for a in (list(node.args), dict(node.kwargs)))
    return f"{node.target} {args} {kwargs}"


def _flops(node: Node) -> float:
    """Floating-point operations of a matrix product, convolution or attention, else 0."""
    shapes = [a.meta["val"].shape for a in _tensor_arguments(node)]
    if node.target == _ATTENTION:
        return float(sdpa_flop_count(*shapes[:3]))
    if node.target == _ATTENTION_BACKWARD:
        return float(sdpa_backward_flop_count(*shapes[:4]))
    count: Callable[..., Any] | None = flop_registry.get(
        getattr(node.target, "overloadpacket", None)
    )
    if count is None:
        return 0.0
    args, kwargs = (map_arg(a, lambda n: n.meta["val"]) for a in (node.args, node.kwargs))
    return float(count(*args, **kwargs, out_val=node.meta["val"]))


_FUSED = frozenset(
    {
        "_to_copy", "clone", "copy", "full", "full_like", "zeros_like", "ones_like", "arange",
        "scatter", "gather", "cat", "mean", "amax", "amin", "argmax", "argmin", "var_mean", "var",
        "_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data",
        "native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm",
        "_fused_rms_norm_backward", "nll_loss_forward", "nll_loss_backward", "gelu_backward",
        "silu_backward", "threshold_backward", "native_group_norm", "native_dropout", "cumsum",
    }
)  # fmt: skip
"""Operators without the tag of elementwise ones that Inductor generates code for and joins."""


def _may_fuse(node: Node) -> bool:
    """Whether Inductor may join an operator with others of its size.

    A sum over the first dimension, as of the gradient of a bias, goes another way through memory.
    """
    target: Any = node.target
    if target in (_aten.sum.dim_IntList, _aten.sum.default):
        value = node.args[0].meta["val"]
        dims = node.args[1] if len(node.args) > 1 else ()
        is_last = any(d in (-1, value.dim() - 1) for d in dims or ())
        return bool(is_last or not dims)
    name = getattr(target, "_schema", None)
    name = name.name.partition("::")[2] if name is not None else ""
    return name in _FUSED or torch.Tag.pointwise in getattr(target, "tags", ())


def _is_view(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if node.target is _aten._unsafe_view.default:
        return True
    return schema is not None and any(
        value.alias_info is not None and not value.alias_info.is_write for value in schema.returns
    )


def _skip_identities(joint: JointGraph) -> None:
    for node in list(joint.graph.nodes):
        if node.op == "call_function" and node.target in _IDENTITIES:
            source = node.args[_IDENTITIES[node.target]]
            value, own = node.meta["val"], source.meta["val"]
            if value.shape == own.shape and value.dtype == own.dtype:
                node.replace_all_uses_with(source)
                joint.graph.erase_node(node)
    joint.graph.eliminate_dead_code()  # what was copied over


def _ancestors(node: Node) -> set[Node]:
    found: set[Node] = set()
    stack: list[Node] = [node]
    while stack:
        current = stack.pop()
        if current not in found:
            found.add(current)
            inputs: Iterable[Node] = current.all_input_nodes
            stack.extend(inputs)
    return found
