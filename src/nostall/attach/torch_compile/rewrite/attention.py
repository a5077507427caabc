"""Keep calls of attention whole that PyTorch would decompose into products and a softmax.

``scaled_dot_product_attention`` has fused back ends, which never write the scores to memory. They
need operands whose last stride is 1, and the fastest takes no mask at all. Programs miss them by

* a mask that masks nothing, or only what lies in the future, computed from positions: libraries
  build one while they are traced, and expand it, which makes its last stride 0;
* a bias whose heads lie innermost, as a table of relative positions has them.

The graph is changed before AOTAutograd: behind it the forward pass saves fp32 probabilities. What
is not proven here keeps its mask.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from nostall.attach.torch_compile.rewrite.constant_masks import Masks
from nostall.attach.warning import warn_once
from nostall.core.errors import one_line

ATTENTION = torch.nn.functional.scaled_dot_product_attention
OPERANDS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
"""Operands of attention that may be given by position, in their order."""
DROPPED = "its mask masks nothing, and is left out"
CAUSAL = "its mask is causal, and is given as such"
CONTIGUOUS = "an operand's last stride is not 1; it is copied once"
DROPOUT = "it has dropout, whose random numbers would change; left as it is"


def calls_attention(module: GraphModule) -> bool:
    """Whether a graph of Dynamo calls attention, outside of sub-graphs."""
    return any(node.target is ATTENTION for node in module.graph.nodes)


def keep_attention(module: GraphModule) -> list[str]:
    """Change the calls of attention in a graph of Dynamo, in place; says what changed.

    Empty if nothing changed. Calls of sub-graphs (checkpointing) stay as they are.
    """
    graph, done = module.graph, Counter[str]()
    masks, copies = Masks(graph), dict[Node, Node]()
    for node in graph.nodes:
        if node.op == "call_function" and node.target is ATTENTION:
            try:
                done.update(_keep_whole(graph, node, masks, copies))
            except Exception as error:  # must not end the user's compilation
                warn_once(f"a call of attention is left as it is: {one_line(error)}")
    if not done.keys() - {DROPOUT}:
        return []
    module.recompile()
    return [f"{count} x attention: {what}" for what, count in sorted(done.items())]


def _keep_whole(graph: Graph, node: Node, masks: Masks, copies: dict[Node, Node]) -> list[str]:
    """Change one call; the names of the changes."""
    operands: dict[str, Any] = dict(zip(OPERANDS, node.args, strict=False)) | dict(node.kwargs)
    if operands.get("dropout_p", 0.0) != 0.0:
        return [DROPOUT]
    done = []
    mask = operands.get("attn_mask")
    if isinstance(mask, Node) and _fits(mask, operands):
        mask = masks.without_condition(mask)
        if masks.masks_nothing(mask):
            mask, done = None, [DROPPED]
        elif not operands.get("is_causal") and masks.is_causal(mask):
            mask, operands["is_causal"], done = None, True, [CAUSAL]
        elif mask is not operands["attn_mask"]:
            done = [DROPPED]
        operands["attn_mask"] = mask
    strided = [name for name in OPERANDS[:4] if _is_strided(operands.get(name))]
    for name in strided:
        operands[name] = _copied(graph, operands[name], name == "attn_mask", copies)
    if strided:
        done.append(CONTIGUOUS)
    if done:
        node.args, node.kwargs = (), operands
    return done


def _fits(mask: Node, operands: Mapping[str, Any]) -> bool:
    """Whether the mask of a call has no axis that the other operands lack: it cannot broadcast."""
    values = [_fake(operands[name]) for name in OPERANDS[:2]]
    value, query, key = _fake(mask), *values
    if value is None or query is None or key is None or value.dim() > query.dim():
        return False
    scores = (*query.shape[:-1], key.shape[-2])[-value.dim() :]
    return all(_is_equal(a, 1) or _is_equal(a, b) for a, b in zip(value.shape, scores, strict=True))


def _is_equal(a: Any, b: Any) -> bool:
    """Whether two sizes are equal without a new guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return str(a) == str(b)


def _is_strided(node: Any) -> bool:
    """Whether an operand's last stride keeps it from the fused back ends."""
    value = _fake(node) if isinstance(node, Node) else None
    if value is None or value.dim() < 2:
        return False
    last = value.stride(-1)
    return isinstance(last, int) and last != 1 and not _is_equal(value.shape[-1], 1)


def _copied(graph: Graph, node: Node, is_mask: bool, copies: dict[Node, Node]) -> Node:
    """A contiguous copy of a node, made once; of a mask one head or batch where all are equal."""
    if node in copies:
        return copies[node]
    value = _fake(node)
    assert value is not None
    expanded = [is_mask and isinstance(s, int) and s == 0 for s in value.stride()[:-2]]
    source, result = node, value
    # Behind the operand, so that the copy comes before every call of attention that takes it.
    with graph.inserting_after(node):
        if any(expanded):
            index = (*(slice(0, 1) if each else slice(None) for each in expanded), ...)
            source, result = graph.call_function(operator.getitem, (node, index)), value[index]
            source.meta["example_value"] = result
    with graph.inserting_after(source):
        copy = graph.call_method("contiguous", (source,))
    copy.meta["example_value"] = result.contiguous()
    copies[node] = copy
    return copy


def _fake(node: Any) -> Tensor | None:
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    return value if isinstance(value, Tensor) else None
