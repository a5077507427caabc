"""What the schemas of calls say: the memory that values share, and who draws random numbers."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

CHECKPOINTED_DRAWS = (
    "run_and_save_rng_state",
    "run_with_rng_state",
    "graphsafe_run_with_rng_state",
)


def draws_random_numbers(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of ATen draws random numbers; attention does so only with dropout."""
    if is_checkpointed_draw(operator):
        return True
    if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ()):
        return False
    for place, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get("dropout_p")
            return bool((argument.default_value if given is None else given) != 0.0)
    return True


def is_checkpointed_draw(operator: Any) -> bool:
    """Whether an operator runs another one with a random state that checkpointing keeps."""
    return getattr(operator, "__name__", "") in CHECKPOINTED_DRAWS and not hasattr(
        operator, "_schema"
    )


def shared_memory(nodes: Iterable[Node]) -> dict[Node, Node]:
    """For each node, the first node whose memory it is a view of, or the node itself."""
    return _memory(nodes)[0]


def mutated_tensors(nodes: Iterable[Node]) -> set[Node]:
    """Nodes whose memory a call writes in place, with all views of the same memory."""
    memory, written = _memory(nodes)
    return {node for node in memory if memory[node] in written}


def _memory(nodes: Iterable[Node]) -> tuple[dict[Node, Node], set[Node]]:
    """The memory of each node, and the memories that a call writes."""
    memory: dict[Node, Node] = {}
    written: set[Node] = set()
    for node in nodes:
        memory[node] = node
        if node.target is operator.getitem and isinstance(node.args[0], Node):
            memory[node] = memory[node.args[0]]
        schema = getattr(node.target, "_schema", None)
        for place, argument in enumerate(schema.arguments if schema is not None else ()):
            if argument.alias_info is None:
                continue
            operand = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            for item in operand if isinstance(operand, (list, tuple)) else [operand]:
                if isinstance(item, Node):
                    memory[node] = memory[item]
                    if argument.alias_info.is_write:
                        written.add(memory[item])
    return memory, written
