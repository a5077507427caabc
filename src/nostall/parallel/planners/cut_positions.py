"""Positions of cuts between stages: balanced ones, and candidates for models with many layers."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

import numpy as np

from nostall.parallel.plan import Stage, Workload


def candidate_cuts(workload: Workload, max_cuts: int) -> list[int]:
    """At most ``max_cuts`` positions 0 = c_0 < c_1 < ... at which a stage may begin.

    These are all positions if there are few enough.  Otherwise the layers are merged into windows
    of about equal time, and each window keeps the position that the fewest bytes cross.
    """
    layers = len(workload.profile)
    if layers <= max_cuts:
        return list(range(layers))
    time = np.array(workload.forward_s) + np.array(workload.backward_s)
    # The term with the layer's number breaks ties between layers that take no time.
    position = (time[:-1] / time[-1] + np.arange(layers) / layers * 1e-6) * (max_cuts - 1)
    window = np.minimum(position.astype(int), max_cuts - 2)
    cuts = [0]
    for w in range(max_cuts - 1):
        inside = np.flatnonzero(window == w)
        inside = inside[inside > 0]
        if len(inside):
            cuts.append(int(inside[np.argmin(np.array(workload.cut_bytes)[inside])]))
    return cuts


def balanced_cuts(workload: Workload, stages: int) -> list[int]:
    """Cuts 0 = c_0 < ... < c_stages = layers such that all stages take about equal time."""
    time = [f + b for f, b in zip(workload.forward_s, workload.backward_s, strict=True)]
    layers = len(workload.profile)
    cuts = [0]
    for i in range(1, stages):
        ideal = time[-1] * i / stages
        cut = bisect.bisect_left(time, ideal)
        if cut > 0 and ideal - time[cut - 1] < time[cut] - ideal:
            cut -= 1
        cuts.append(max(cuts[-1] + 1, min(cut, layers - (stages - i))))
    return [*cuts, layers]


def straight_stages(cuts: Sequence[int]) -> tuple[Stage, ...]:
    """Stages between consecutive cuts, stage i on GPU i."""
    return tuple(Stage(a, b, (g,)) for g, (a, b) in enumerate(itertools.pairwise(cuts)))
