"""Rates of one GPU that the cost of operators depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nostall.core.errors import BadHardware


@dataclass(frozen=True)
class DeviceRates:
    """Rates that operators reach: peak rates times the share of them that large operators reach."""

    name: str
    flops: Mapping[str, float]
    """FLOP/s by element type (``float32``, ``bfloat16``)."""
    memory: float
    """Bytes/s of GPU memory, reads and writes together."""
    kernel_s: float = 0.0
    """Seconds that each operator takes at least."""
    launch_s: float = 0.0
    """Seconds in which the processor launches one operator; GPUs run behind it."""
    send_s: float = 0.0
    """Seconds in which the processor starts one collective."""
    contention: float = 0.0
    """Share of their speed that operators lose while a collective runs, between 0 and 1."""
    wait_s: float = 0.0
    """Seconds that a collective beside operators waits for multiprocessors that they have."""
    start_s: float = 0.0
    """Seconds that each kernel takes beside its arithmetic and its memory."""

    def compute_s(self, flops: float, dtype: str) -> float:
        """Seconds of ``flops`` floating-point operations on elements of type ``dtype``.

        Raises :class:`BadHardware` if the rate of this type is unknown.
        """
        if flops <= 0:
            return 0.0
        if dtype not in self.flops:
            raise BadHardware(
                f"hardware {self.name!r} has no FLOP/s for {dtype}, which a matrix product of the "
                f"module needs; it has {', '.join(self.flops)}; use other hardware, or a module "
                "with one of these types"
            )
        return flops / self.flops[dtype]
