"""Random numbers that a fused kernel can make: Philox from a seed in memory.

As Inductor does it: one call draws the seeds of a graph from PyTorch's generator, so
``torch.manual_seed`` repeats them and a CUDA graph draws new ones on every replay.  What they are
used for is computed wherever it is needed, always the same.  Backward passes read the mask that the
forward pass saved.

Numbers have 32 bits, four to a counter of Philox.  Those that nothing reads but comparisons with a
probability, as dropout's masks, have 16, eight to a counter, and are compared in fp32 whatever
dtype the program has them in: the mask is by the number that is not rounded, with a probability
that is a multiple of 2^-16.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from nostall.fusion.capture.call import dtype_name
from nostall.fusion.codegen.runtime.eager import uniform_numbers
from nostall.gpu.capture_branch import run_on_branch

_aten = torch.ops.aten
_MADE = ("float32", "float16", "bfloat16")
_CASTS = (_aten._to_copy.default, torch.ops.prims.convert_element_type.default)
_COMPARISONS = tuple(getattr(_aten, name).Scalar for name in ("lt", "le", "gt", "ge"))
LEAST_OF_16_BITS = 2**-9
"""A probability is off by 2^-17 at most where numbers have 16 bits: by 0.4 % of this one.  Masks
with a lower one, or a higher one than 1 less this, are of numbers of 32 bits."""


def seeds(count: int, device: torch.device) -> Tensor:
    """``count`` seeds, int64, from PyTorch's generator of the device.

    In a CUDA graph they are drawn on a parallel branch
    (:func:`~nostall.gpu.capture_branch.run_on_branch`): the kernel that draws a few numbers takes
    microseconds in which nothing else would run.
    """
    if device.type != "cuda":
        return seeds_in_order(count, device)
    with torch.cuda.device(device):
        return run_on_branch(lambda: seeds_in_order(count, device))


def seeds_in_order(count: int, device: torch.device) -> Tensor:
    """The same, on the current stream."""
    return torch.randint(-(2**63), 2**63 - 1, (count,), dtype=torch.int64, device=device)


def uniform(seed: Tensor, size: Sequence[int], dtype: torch.dtype, words: int) -> Tensor:
    """Numbers in [0, 1) for a seed of one element, as a fused kernel makes them, ``words`` (4 or 8)
    of each counter."""
    return uniform_numbers(seed, size, dtype, words)


torch.library.custom_op("nostall::seeds", seeds, mutates_args=())
torch.library.custom_op("nostall::uniform", uniform, mutates_args=())
SEEDS = torch.ops.nostall.seeds.default
"""A call that is none: what it draws is given, as far as kernels are concerned."""
UNIFORM = torch.ops.nostall.uniform.default


def numbers_depend_on_kernels() -> bool:
    """Whether Inductor's numbers on a GPU depend on the form of the kernel that makes them (from
    PyTorch 2.13 on, its issue 198333): nobody else can make the same ones then."""
    from torch._inductor.runtime import triton_helpers

    return hasattr(triton_helpers, "rand4x")


def seeded(given: GraphModule) -> GraphModule:
    """A copy in which uniform random tensors come from seeds; normal ones and those of own
    generators stay.  A module without any is given back as it is."""
    if not any(map(_is_uniform, given.graph.nodes)):
        return given
    module = GraphModule(given, copy.deepcopy(given.graph))
    found = [node for node in module.graph.nodes if _is_uniform(node)]
    first = found[0].meta["val"]
    found = [node for node in found if node.meta["val"].device == first.device]
    start = next(node for node in module.graph.nodes if node.op not in ("placeholder", "get_attr"))
    with module.graph.inserting_before(start):
        drawn = module.graph.call_function(SEEDS, (len(found), first.device))
    drawn.meta["val"] = _seed_like(first, len(found))
    for place, node in enumerate(found):
        with module.graph.inserting_before(node):
            made = _from_seed(module, drawn, place, node)
        for one in (*_casts(node), node) if made.args[-1] == 8 else (node,):
            one.replace_all_uses_with(made)
            module.graph.erase_node(one)
    module.recompile()
    return module


def _is_uniform(node: Node) -> bool:
    if node.target not in (_aten.rand.default, _aten.rand_like.default):
        return False
    value = node.meta["val"]
    return value.dim() > 0 and value.is_contiguous() and dtype_name(value.dtype) in _MADE


def _only_compared(node: Node) -> bool:
    """Whether a tensor is read by nothing but comparisons with numbers for which 16 bits do."""
    readers = [user for one in (node, *_casts(node)) for user in one.users]
    others = [user for user in readers if user not in _casts(node)]
    return bool(others) and all(
        user.target in _COMPARISONS and _is_coarse(user.args[1]) for user in others
    )


def _casts(node: Node) -> list[Node]:
    """The readers of a random tensor that make another float of it."""
    return [user for user in node.users if user.target in _CASTS and _is_alike(user, node)]


def _is_alike(cast: Node, node: Node) -> bool:
    """Whether nothing but the dtype tells a cast from what it reads."""
    one, other = cast.meta["val"], node.meta["val"]
    there = one.device == other.device and one.is_contiguous()
    return there and dtype_name(one.dtype) in _MADE


def _is_coarse(number: object) -> bool:
    if not isinstance(number, (int, float)):
        return False
    return LEAST_OF_16_BITS <= number <= 1 - LEAST_OF_16_BITS


def _seed_like(value: Tensor, count: int) -> Tensor:
    """What stands for seeds while nothing is computed."""
    return value.new_empty((count,), dtype=torch.int64)


def _from_seed(module: GraphModule, drawn: Node, place: int, node: Node) -> Node:
    value = node.meta["val"]
    seed = module.graph.call_function(_aten.slice.Tensor, (drawn, 0, place, place + 1))
    seed.meta["val"] = _seed_like(value, 1)
    sizes: Any = node.args[0]
    if isinstance(sizes, Node):
        sizes = [_size(module, sizes, axis) for axis in range(value.dim())]
    words = 8 if _only_compared(node) else 4
    if words == 8:
        value = value.new_empty(value.shape, dtype=torch.float32)
    made = module.graph.call_function(UNIFORM, (seed, sizes, value.dtype, words))
    made.meta.update(node.meta, val=value)
    return made


def _size(module: GraphModule, tensor: Node, axis: int) -> int | Node:
    size = tensor.meta["val"].shape[axis]
    if isinstance(size, int):
        return size
    made = module.graph.call_function(_aten.sym_size.int, (tensor, axis))
    made.meta["val"] = size
    return made
