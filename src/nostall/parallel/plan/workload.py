"""What is to be planned: a profile, a cluster, and how many samples make an iteration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from nostall.parallel.cluster import Cluster
from nostall.parallel.cluster.route import Route, route
from nostall.parallel.errors import BadProfile
from nostall.parallel.profile import Profile

DEFAULT_GLOBAL_BATCH = 128
ADAM_FP32 = 4.0
"""Parameters, gradients and Adam's two moments, each as large as the parameters."""
HALF = 0.5


@dataclass(frozen=True, eq=False)
class Workload:
    """One planning problem.

    ``micro_batch`` None takes the profile's batch.  Times and sizes are linear in samples: a
    micro-batch of b samples over r replicas takes b / (r x profile batch) of the profiled time.
    That is the rule of DAPPLE's planner; slices below one sample are modelled only.
    ``state_factor`` is bytes of parameters, gradients and optimiser state per parameter byte.
    ``weight_gradient_share`` stands in for ``weight_gradient_s`` where the profile has none; it is
    an assumption, and results that rest on it say so.
    """

    profile: Profile
    cluster: Cluster
    global_batch: int = DEFAULT_GLOBAL_BATCH
    micro_batch: int | None = None
    state_factor: float = ADAM_FP32
    weight_gradient_share: float = HALF
    _routes: dict[tuple[tuple[int, ...], tuple[int, ...]], Route] = field(
        default_factory=dict, repr=False
    )
    _allreduce: dict[tuple[int, ...], tuple[float, float]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        m = self.micro_batch if self.micro_batch is not None else self.profile.batch
        if m is None:
            raise BadProfile(
                f"profile {self.profile.name!r} does not say for how many samples it was taken; "
                "give --micro-batch (the profile then counts as one for that many samples)"
            )
        if m < 1 or self.global_batch < 1:
            raise BadProfile(
                f"global batch {self.global_batch} and micro-batch {m}: allowed are numbers >= 1"
            )
        if not (math.isfinite(self.state_factor) and self.state_factor >= 1):
            raise BadProfile(
                f"state factor {self.state_factor}: allowed is >= 1 (parameters alone are 1)"
            )

    @cached_property
    def samples(self) -> int:
        """Samples of a micro-batch that was asked for."""
        wanted = self.micro_batch or self.profile.batch
        assert wanted is not None  # checked above
        return wanted

    @cached_property
    def micro_batches(self) -> int:
        """M: micro-batches of an iteration, the last of which may be smaller."""
        return max(1, math.ceil(self.global_batch / self.samples))

    @cached_property
    def scale(self) -> float:
        """Mean samples of a micro-batch / samples of the profile."""
        return self.global_batch / self.micro_batches / (self.profile.batch or self.samples)

    @cached_property
    def forward(self) -> list[float]:
        """Seconds of a micro-batch in the first 0, 1, ... layers on one GPU."""
        return self._sums([layer.forward_s * self.scale for layer in self.profile.layers])

    @cached_property
    def backward(self) -> list[float]:
        """As :attr:`forward`, for the whole backward pass."""
        return self._sums([layer.backward_s * self.scale for layer in self.profile.layers])

    @cached_property
    def weight_gradient(self) -> list[float]:
        """As :attr:`forward`, for the part of the backward pass that zero-bubble orders delay."""
        share = self.weight_gradient_share
        return self._sums(
            [
                self.scale
                * (
                    layer.weight_gradient_s
                    if layer.weight_gradient_s is not None
                    else (share * layer.backward_s if layer.parameter_bytes else 0.0)
                )
                for layer in self.profile.layers
            ]
        )

    @cached_property
    def parameters(self) -> list[float]:
        """Bytes of parameters of the first 0, 1, ... layers."""
        return self._sums([layer.parameter_bytes for layer in self.profile.layers])

    @cached_property
    def stored(self) -> list[float]:
        """Bytes that a micro-batch keeps for the backward pass in the first 0, 1, ... layers.

        Where nobody measured it, a layer's output: a lower bound.
        """
        pairs = zip(self.profile.layers, self.profile.output_bytes, strict=True)
        return self._sums(
            [
                self.scale * (layer.stored_bytes if layer.stored_bytes is not None else float(out))
                for layer, out in pairs
            ]
        )

    @cached_property
    def cut(self) -> list[float]:
        """Bytes of a micro-batch that cross the cut at each position."""
        return [float(size) * self.scale for size in self.profile.cut_bytes]

    @cached_property
    def cut_back(self) -> list[float]:
        """Bytes of gradients of a micro-batch that come back over the cut at each position."""
        return [float(size) * self.scale for size in self.profile.gradient_bytes]

    @cached_property
    def sequential_s(self) -> float:
        """Seconds of an iteration with all micro-batches one after another on one GPU."""
        return self.micro_batches * (self.forward[-1] + self.backward[-1])

    def route(self, source: tuple[int, ...], target: tuple[int, ...]) -> Route:
        """How a tensor gets from the replicas of one stage to those of the next."""
        key = (source, target)
        found = self._routes.get(key)
        if found is None:
            found = self._routes[key] = route(self.cluster, source, target)
        return found

    def allreduce_s(self, gpus: tuple[int, ...], size: float) -> float:
        """Seconds to sum ``size`` bytes of gradients over the replicas of a stage."""
        if size <= 0 or len(gpus) < 2:
            return 0.0
        found = self._allreduce.get(gpus)
        if found is None:
            one = self.cluster.allreduce_s(gpus, 1e9)
            two = self.cluster.allreduce_s(gpus, 2e9)
            found = self._allreduce[gpus] = (2 * one - two, (two - one) * 1e-9)
        return found[0] + size * found[1]

    @staticmethod
    def _sums(values: Sequence[float]) -> list[float]:
        total, sums = 0.0, [0.0]
        for value in values:
            total += value
            sums.append(total)
        return sums
