"""Linear layers of vLLM that run as a measured table over M says.

    NOSTALL_VLLM_LINEAR=table.json vllm serve MODEL

The table is written by ``nostall serving tune MODEL`` on the GPU that serves.  Layers without rows
in it, quantised layers and other dtypes keep vLLM's own product.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nostall.attach.vllm.counts import count_left, count_served
from nostall.core.errors import BadInput
from nostall.serving.gemm.config import LinearShape
from nostall.serving.gemm.gpu_layer import library_versions
from nostall.serving.gemm.linear import Scratch, linear
from nostall.serving.gemm.table import GemmTable, load_tables

LAYERS = (
    "ReplicatedLinear",
    "ColumnParallelLinear",
    "MergedColumnParallelLinear",
    "QKVParallelLinear",
    "RowParallelLinear",
)
"""Classes of ``vllm.model_executor.layers.linear`` that are replaced."""
_log = logging.getLogger("nostall")
_tables: dict[LinearShape, GemmTable] = {}


def register_layers(path: Path, device: str) -> bool:
    """Let vLLM make linear layers that use the table in ``path``.

    ``device``: the GPU's name, as PyTorch gives it.  Returns whether the table is usable; if it is
    not, this is logged once and vLLM runs without it.
    """
    try:
        tables = load_tables(path, device, library_versions())
    except BadInput as error:
        _log.warning("nostall: linear layers stay vLLM's own: %s", error)
        return False
    use_tables(tables)
    from vllm.model_executor.custom_op import PluggableLayer
    from vllm.model_executor.layers import linear as layers

    method = method_class(layers)
    for name in LAYERS:
        replaced = _layer_class(getattr(layers, name), layers.UnquantizedLinearMethod, method)
        PluggableLayer.register_oot(replaced, name=name)
    _log.info("nostall: linear layers of %d shapes run by %s", len(tables), path)
    return True


def use_tables(tables: Mapping[LinearShape, GemmTable]) -> None:
    """Replace the tables of this process."""
    _tables.clear()
    _tables.update(tables)


def shape_of(weight: Tensor) -> LinearShape:
    """The layer of a weight (N, K)."""
    return LinearShape(weight.shape[0], weight.shape[1], str(weight.dtype).removeprefix("torch."))


def method_class(layers: Any) -> type:
    """vLLM's method for layers without quantisation, with the product of the table."""

    class TableLinearMethod(layers.UnquantizedLinearMethod):
        """y = x W^T + bias, as the table of the layer's shape says."""

        def process_weights_after_loading(self, layer: Any) -> None:
            layer.runs_by_table = shape_of(layer.weight) in _tables
            if layer.runs_by_table:
                count_served("linear layer")
                return  # vLLM's CPU build would replace the weight by a packed one.
            count_left("linear layers of shapes without a table")
            super().process_weights_after_loading(layer)

        def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            if not getattr(layer, "runs_by_table", False) or x.dtype != layer.weight.dtype:
                own: Tensor = super().apply(layer, x, bias)
                return own
            rows = x.reshape(-1, x.shape[-1])
            y = torch.ops.nostall.table_linear(rows, layer.weight, bias)
            return y.reshape(*x.shape[:-1], layer.weight.shape[0])

    return TableLinearMethod


def _layer_class(base: type, own: type, method: type) -> type:
    """A layer class of vLLM that uses ``method`` in place of exactly ``own``."""

    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, *args, **kwargs)  # type: ignore[misc]
        if type(self.quant_method) is own:
            self.quant_method = method()

    return type(f"Table{base.__name__}", (base,), {"__init__": initialise, "__doc__": base.__doc__})


@cache
def _scratch(device: torch.device) -> Scratch:
    """Buffers that all layers of a device share; they are allocated before graphs are captured."""
    return Scratch.on(device)


def _table_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product of x (M, K) and the weight (N, K) by the table of this process."""
    table = _tables.get(shape_of(weight))
    result = linear(table, x.contiguous(), weight, bias, _scratch(x.device))
    # A custom operator must not return one of its arguments or a view of it.
    return result.clone() if result.data_ptr() == x.data_ptr() else result


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


# vLLM compiles the model; the number of rows decides at run time, so the product is one operator.
torch.library.custom_op(
    "nostall::table_linear",
    _table_linear,
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
).register_fake(_fake)
