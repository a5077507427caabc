"""Layers that PyTorch's tensor parallelism cuts, by Megatron's rules for their names."""

from __future__ import annotations

import re

import torch

from nostall.parallel.sharding.engine_file import Style
from nostall.parallel.sharding.planners.rules import HEADS, megatron_dim

_EMBEDDINGS = r"(^|\.)(embed_tokens|wte|word_embeddings)$"


def tensor_styles(module: torch.nn.Module, ranks: int) -> dict[str, Style]:
    """Styles of the linear layers inside the blocks of a module, by name, and of embeddings and
    heads.

    Empty if the rules know no layer whose outputs are cut and none that joins them, if sizes are no
    multiple of ``ranks``, or if such a layer shares its weight.  Embeddings and heads stay whole
    then.
    """
    weights = [id(p) for _, p in module.named_parameters(remove_duplicate=False)]
    found: dict[str, Style] = {}
    for name, part in module.named_modules():
        dim = megatron_dim(f"{name}.weight") if type(part) is torch.nn.Linear else None
        if dim is None:
            continue
        assert isinstance(part, torch.nn.Linear)
        if part.weight.shape[dim] % ranks or weights.count(id(part.weight)) > 1:
            return {}
        found[name] = "colwise" if dim == 0 else "rowwise"
    if len(set(found.values())) != 2:
        return {}
    for name, part in module.named_modules():
        if type(part) is torch.nn.Embedding and re.search(_EMBEDDINGS, name):
            style: Style = "words"
        elif type(part) is torch.nn.Linear and re.search(HEADS, name):
            style = "classes"
        else:
            continue
        if part.weight.shape[0] % ranks == 0 and weights.count(id(part.weight)) == 1:
            found[name] = style
    return found
