"""A planning problem: a model's profile, a cluster, and the batch sizes of an iteration."""

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
ADAM_STATE_FACTOR = 4.0
"""Parameters, gradients and Adam's two moments, all fp32: four times the parameters' bytes."""
DEFAULT_WEIGHT_GRADIENT_SHARE = 0.5
MAX_SAMPLES = 1 << 40
PASSES_PER_S = 200_000
"""Forward passes that the simulator runs in a second, in an order that is slow to simulate."""
MAX_PASSES = 4_000_000
"""Forward passes of an iteration that is simulated: micro-batches times stages."""


@dataclass(frozen=True, eq=False)
class Workload:
    """One planning problem.

    Times and sizes are modelled as linear in samples.  A GPU runs whole samples, so a micro-batch
    of b samples over r replicas takes ceil(b / r) / profile batch of the profiled time.  With
    ``fractions`` it takes b / (r x profile batch), as in DAPPLE's planner, which also allows
    slices of less than one sample.

    Lists of sums below have one entry per cut: entry l covers the first l layers.  Raises
    :class:`BadProfile` if a batch size is unknown, below 1 or above :data:`MAX_SAMPLES`, if there
    are too many micro-batches to simulate, if ``state_factor`` is below 1, or if
    ``weight_gradient_share`` is not between 0 and 1.
    """

    profile: Profile
    cluster: Cluster
    global_batch: int = DEFAULT_GLOBAL_BATCH
    """Samples of an iteration."""
    micro_batch: int | None = None
    """Samples of a micro-batch; None for the profile's batch."""
    state_factor: float = ADAM_STATE_FACTOR
    """Bytes of parameters, gradients and optimiser state per byte of parameters."""
    weight_gradient_share: float = DEFAULT_WEIGHT_GRADIENT_SHARE
    """Share of the backward time assumed for weight gradients of layers whose profile has no
    ``weight_gradient_s``; reports state this assumption."""
    fractions: bool = False
    """Whether a replica may run a fraction of a sample."""
    _routes: dict[tuple[tuple[int, ...], tuple[int, ...]], Route] = field(
        default_factory=dict, repr=False
    )
    _allreduce_costs: dict[tuple[int, ...], tuple[float, float]] = field(
        default_factory=dict, repr=False
    )

    def __post_init__(self) -> None:
        m = self.micro_batch if self.micro_batch is not None else self.profile.batch
        if m is None:
            raise BadProfile(
                f"profile {self.profile.name!r} does not state for how many samples it was "
                "measured; give --micro-batch (the profile's times are then taken for that many "
                "samples)"
            )
        if m < 1 or self.global_batch < 1:
            raise BadProfile(
                f"global batch {self.global_batch} and micro-batch {m}: allowed are numbers >= 1"
            )
        largest = max(m, self.global_batch, self.profile.batch or 1)
        if largest > MAX_SAMPLES:
            raise BadProfile(
                f"a batch of {str(largest)[:20]} samples: allowed are up to {MAX_SAMPLES}; correct "
                "the batch sizes"
            )
        stages = min(len(self.profile), len(self.cluster))
        if self.micro_batches * stages > MAX_PASSES:
            raise BadProfile(
                f"{self.global_batch} samples in micro-batches of {m} are {self.micro_batches} "
                f"micro-batches, too many to simulate on up to {stages} stages; allowed are "
                f"{MAX_PASSES // max(1, stages)}: give a larger --micro-batch or a smaller "
                "--global-batch"
            )
        if not (math.isfinite(self.state_factor) and self.state_factor >= 1):
            raise BadProfile(
                f"state factor {self.state_factor}: allowed is >= 1 (1 is the parameters alone)"
            )
        if not 0 <= self.weight_gradient_share <= 1:
            raise BadProfile(
                f"weight_gradient_share {self.weight_gradient_share}: allowed is 0 to 1, as a "
                "share of the backward time"
            )

    @cached_property
    def micro_batch_samples(self) -> int:
        """Requested samples of a micro-batch: ``micro_batch``, or the profile's batch."""
        samples = self.micro_batch or self.profile.batch
        assert samples is not None  # __post_init__ checks it
        return samples

    @cached_property
    def micro_batches(self) -> int:
        """M, the micro-batches of an iteration, which share its samples as evenly as possible."""
        return -(-self.global_batch // self.micro_batch_samples)

    @cached_property
    def scale(self) -> float:
        """Mean samples of a micro-batch, divided by the samples of the profile."""
        profile_batch = self.profile.batch or self.micro_batch_samples
        return self.global_batch / self.micro_batches / profile_batch

    def slice_share(self, replicas: int) -> float:
        """Share of a micro-batch's samples that the replica with most samples runs, on average."""
        if self.fractions:
            return 1.0 / replicas
        smaller, larger = divmod(self.global_batch, self.micro_batches)
        samples = (self.micro_batches - larger) * -(-smaller // replicas)
        samples += larger * -(-(smaller + 1) // replicas)
        return samples / self.global_batch

    def data_parallel_share(self, replicas: int) -> float:
        """Share of the iteration's samples that the replica with most samples runs.

        With data parallelism, each replica splits its share into micro-batches of its own.
        """
        if self.fractions:
            return 1.0 / replicas
        return -(-self.global_batch // replicas) / self.global_batch

    @cached_property
    def forward_s(self) -> list[float]:
        """Sums over layers of a micro-batch's forward time on one GPU."""
        return _prefix_sums([layer.forward_s * self.scale for layer in self.profile.layers])

    @cached_property
    def backward_s(self) -> list[float]:
        """Sums over layers of a micro-batch's whole backward time on one GPU."""
        return _prefix_sums([layer.backward_s * self.scale for layer in self.profile.layers])

    @cached_property
    def weight_gradient_s(self) -> list[float]:
        """Sums over layers of the part of the backward time that zero-bubble orders delay."""
        share = self.weight_gradient_share
        return _prefix_sums(
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
    def parameter_bytes(self) -> list[float]:
        """Sums over layers of the parameters' bytes."""
        return _prefix_sums([layer.parameter_bytes for layer in self.profile.layers])

    @cached_property
    def stored_bytes(self) -> list[float]:
        """Sums over layers of the bytes that a micro-batch keeps for the backward pass.

        A layer without a measured value counts with its output, which is a lower bound.
        """
        pairs = zip(self.profile.layers, self.profile.output_bytes, strict=True)
        return _prefix_sums(
            [
                self.scale * (layer.stored_bytes if layer.stored_bytes is not None else float(out))
                for layer, out in pairs
            ]
        )

    @cached_property
    def cut_bytes(self) -> list[float]:
        """Bytes of a micro-batch's tensors that cross each cut."""
        return [float(size) * self.scale for size in self.profile.cut_bytes]

    @cached_property
    def gradient_bytes(self) -> list[float]:
        """Bytes of a micro-batch's gradients that are sent back over each cut."""
        return [float(size) * self.scale for size in self.profile.gradient_bytes]

    @cached_property
    def sequential_s(self) -> float:
        """Seconds of an iteration that runs all micro-batches one after another on one GPU."""
        return self.micro_batches * (self.forward_s[-1] + self.backward_s[-1])

    def route(self, source: tuple[int, ...], target: tuple[int, ...]) -> Route:
        """The route from the replicas of one stage to those of the next; results are cached."""
        key = (source, target)
        cached = self._routes.get(key)
        if cached is None:
            cached = self._routes[key] = route(self.cluster, source, target)
        return cached

    def allreduce_s(self, gpus: tuple[int, ...], size: float) -> float:
        """Seconds of an all-reduce of ``size`` bytes of gradients over the replicas of a stage.

        The cluster's time is linear in the size, so its latency and seconds per byte are cached.
        """
        if size <= 0 or len(gpus) < 2:
            return 0.0
        cost = self._allreduce_costs.get(gpus)
        if cost is None:
            one_gb_s = self.cluster.allreduce_s(gpus, 1e9)
            two_gb_s = self.cluster.allreduce_s(gpus, 2e9)
            cost = (2 * one_gb_s - two_gb_s, (two_gb_s - one_gb_s) * 1e-9)
            self._allreduce_costs[gpus] = cost
        latency_s, s_per_byte = cost
        return latency_s + size * s_per_byte

    def allreduce_line(self, gpus: tuple[int, ...]) -> tuple[float, float]:
        """Seconds of an all-reduce over ``gpus`` as (seconds at size 0, seconds per byte)."""
        start_s = self.allreduce_s(gpus, 1e-9)
        return start_s, (self.allreduce_s(gpus, 1e9) - start_s) * 1e-9


def _prefix_sums(values: Sequence[float]) -> list[float]:
    total, sums = 0.0, [0.0]
    for value in values:
        total += value
        sums.append(total)
    return sums
