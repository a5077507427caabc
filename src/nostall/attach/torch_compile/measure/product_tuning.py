"""Generate the kernels of matrix products for all tile configurations, in a worker process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from nostall.attach.torch_compile.measure.plan_tuning import PlanCandidates
from nostall.attach.torch_compile.store.kernel_store import KernelStore
from nostall.fusion.codegen.tiling.product_config import ProductConfig, configs
from nostall.fusion.graph.graph import Graph
from nostall.fusion.hardware import H200, Hardware
from nostall.fusion.products.emit import emit_products
from nostall.fusion.products.product_graph import ProductGraph


@dataclass
class ProductTuning:
    """Lists the product kernels to measure, with the interface of :class:`PlanTuning`."""

    # The GPU of the user's process; a worker has none.
    hardware: Hardware = H200
    # Plans of other kernels: none.
    candidates: list[PlanCandidates] = field(default_factory=list)

    def prepare(self, graph: Graph) -> Iterator[str]:
        """Write the kernels of a product's graph to the store and yield their names."""
        for _, kernel, _ in product_kernels(ProductGraph(graph), KernelStore(), self.hardware):
            yield kernel


def product_kernels(
    product: ProductGraph, store: KernelStore, hardware: Hardware
) -> Iterator[tuple[ProductConfig, str, tuple[int, ...]]]:
    """Each configuration with the name of its kernel and the nodes that the kernel reads."""
    for config in configs(product.shape, hardware):
        program = emit_products(product, config, hardware)
        yield config, store.put(program), program.inputs
