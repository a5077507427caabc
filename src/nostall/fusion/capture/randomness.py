"""Replacement of ATen's random calls by Philox numbers that fused kernels can compute.

As in Inductor, one call draws all seeds of a graph from PyTorch's generator. So
``torch.manual_seed`` makes results repeatable, and each replay of a CUDA graph draws new seeds. Any
kernel can compute the numbers of a seed, always with the same values. A backward pass reads the
dropout mask that the forward pass saved.

A Philox counter value gives four numbers of 32 bits. If a random tensor is only compared with
probabilities (dropout masks), a counter value gives eight numbers of 16 bits instead. They are
compared in fp32 before rounding to the program's dtype, so the probability of a mask is a multiple
of 2^-16.
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
_DTYPES = ("float32", "float16", "bfloat16")
_CASTS = (_aten._to_copy.default, torch.ops.prims.convert_element_type.default)
_COMPARISONS = tuple(getattr(_aten, name).Scalar for name in ("lt", "le", "gt", "ge"))
MIN_PROBABILITY_16_BIT = 2**-9
"""Smallest probability for which numbers of 16 bits are used; the largest is 1 minus it.

Numbers of 16 bits change a probability by at most 2^-17, which is 0.4 % of this one.
"""


def seeds(count: int, device: torch.device) -> Tensor:
    """Draw ``count`` int64 seeds from PyTorch's generator of the device.

    In a CUDA graph, the kernel that draws them runs in parallel with the kernels before it
    (:func:`~nostall.gpu.capture_branch.run_on_branch`). On its own it would leave the GPU nearly
    idle for microseconds.
    """
    if device.type != "cuda":
        return seeds_in_order(count, device)
    with torch.cuda.device(device):
        return run_on_branch(lambda: seeds_in_order(count, device))


def seeds_in_order(count: int, device: torch.device) -> Tensor:
    """Draw ``count`` int64 seeds on the current stream, in order with the kernels around."""
    return torch.randint(-(2**63), 2**63 - 1, (count,), dtype=torch.int64, device=device)


def uniform(seed: Tensor, size: Sequence[int], dtype: torch.dtype, words: int) -> Tensor:
    """Numbers in [0, 1) equal to those of a fused kernel for this seed (a tensor of one element).

    ``words`` (4 or 8) is the count of numbers made from each counter value.
    """
    return uniform_numbers(seed, size, dtype, words)


torch.library.custom_op("nostall::seeds", seeds, mutates_args=())
torch.library.custom_op("nostall::uniform", uniform, mutates_args=())
SEEDS = torch.ops.nostall.seeds.default
"""The operator that draws seeds; capture makes its result a graph input, not an opaque node."""
UNIFORM = torch.ops.nostall.uniform.default
"""The operator that makes uniform numbers from a seed; a fused kernel can compute it."""


def numbers_depend_on_kernels() -> bool:
    """Whether Inductor's random numbers on a GPU depend on the shape of its kernels.

    They do from PyTorch 2.13 on (pytorch#198333). Other kernels cannot reproduce them then.
    """
    from torch._inductor.runtime import triton_helpers

    return hasattr(triton_helpers, "rand4x")


def replace_random_ops(original: GraphModule) -> GraphModule:
    """A copy in which ``nostall::uniform`` computes the uniform random tensors from seeds.

    Normal random tensors and those with a generator of their own do not change. A module without
    uniform random tensors is returned as it is.
    """
    if not any(map(_is_uniform, original.graph.nodes)):
        return original
    module = GraphModule(original, copy.deepcopy(original.graph))
    random = [node for node in module.graph.nodes if _is_uniform(node)]
    first = random[0].meta["val"]
    random = [node for node in random if node.meta["val"].device == first.device]
    start = next(node for node in module.graph.nodes if node.op not in ("placeholder", "get_attr"))
    with module.graph.inserting_before(start):
        all_seeds = module.graph.call_function(SEEDS, (len(random), first.device))
    all_seeds.meta["val"] = _fake_seeds(first, len(random))
    for place, node in enumerate(random):
        with module.graph.inserting_before(node):
            numbers = _insert_uniform(module, all_seeds, place, node)
        for replaced in (*_casts(node), node) if numbers.args[-1] == 8 else (node,):
            replaced.replace_all_uses_with(numbers)
            module.graph.erase_node(replaced)
    module.recompile()
    return module


def _is_uniform(node: Node) -> bool:
    if node.target not in (_aten.rand.default, _aten.rand_like.default):
        return False
    value = node.meta["val"]
    return value.dim() > 0 and value.is_contiguous() and dtype_name(value.dtype) in _DTYPES


def _is_only_compared(node: Node) -> bool:
    """Whether a tensor is read only by comparisons with numbers for which 16 bits are enough."""
    casts = _casts(node)
    readers = [user for tensor in (node, *casts) for user in tensor.users if user not in casts]
    return bool(readers) and all(
        user.target in _COMPARISONS and _allows_16_bits(user.args[1]) for user in readers
    )


def _casts(node: Node) -> list[Node]:
    """The readers of a random tensor that only cast it to another float dtype."""
    return [
        user for user in node.users if user.target in _CASTS and _changes_only_dtype(user, node)
    ]


def _changes_only_dtype(cast: Node, node: Node) -> bool:
    """Whether a cast of ``node`` keeps device and row-major strides, to a dtype of `_DTYPES`."""
    result, operand = cast.meta["val"], node.meta["val"]
    keeps_layout = result.device == operand.device and result.is_contiguous()
    return keeps_layout and dtype_name(result.dtype) in _DTYPES


def _allows_16_bits(number: object) -> bool:
    if not isinstance(number, (int, float)):
        return False
    return MIN_PROBABILITY_16_BIT <= number <= 1 - MIN_PROBABILITY_16_BIT


def _fake_seeds(like: Tensor, count: int) -> Tensor:
    """A fake tensor of ``count`` seeds, in the fake mode and on the device of ``like``."""
    return like.new_empty((count,), dtype=torch.int64)


def _insert_uniform(module: GraphModule, all_seeds: Node, place: int, node: Node) -> Node:
    """Insert the call that makes the numbers of a random call from the seed at ``place``."""
    value = node.meta["val"]
    seed = module.graph.call_function(_aten.slice.Tensor, (all_seeds, 0, place, place + 1))
    seed.meta["val"] = _fake_seeds(value, 1)
    sizes: Any = node.args[0]
    if isinstance(sizes, Node):
        sizes = [_size(module, sizes, axis) for axis in range(value.dim())]
    words = 8 if _is_only_compared(node) else 4
    if words == 8:
        value = value.new_empty(value.shape, dtype=torch.float32)
    numbers = module.graph.call_function(UNIFORM, (seed, sizes, value.dtype, words))
    numbers.meta.update(node.meta, val=value)
    return numbers


def _size(module: GraphModule, tensor: Node, axis: int) -> int | Node:
    """The size of an axis: an int, or a node that computes it if it is dynamic."""
    size = tensor.meta["val"].shape[axis]
    if isinstance(size, int):
        return size
    node = module.graph.call_function(_aten.sym_size.int, (tensor, axis))
    node.meta["val"] = size
    return node
