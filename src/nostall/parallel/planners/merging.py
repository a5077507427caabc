"""Where to look for cuts in models with many layers."""

from __future__ import annotations

import numpy as np

from nostall.parallel.plan import Workload


def candidate_cuts(work: Workload, most: int) -> list[int]:
    """Positions 0 = c_0 < c_1 < ... at which a stage may begin, at most ``most``.

    All of them when there are few enough.  Otherwise the layers are merged into windows of about
    equal time, and in each window the position that the fewest bytes cross is kept.
    """
    layers = len(work.profile)
    if layers <= most:
        return list(range(layers))
    time = np.array(work.forward) + np.array(work.backward)
    # A layer's number breaks ties where layers take no time.
    window = (time[:-1] / time[-1] + np.arange(layers) / layers * 1e-6) * (most - 1)
    cuts = [0]
    of = np.minimum(window.astype(int), most - 2)
    for w in range(most - 1):
        inside = np.flatnonzero(of == w)
        inside = inside[inside > 0]
        if len(inside):
            cuts.append(int(inside[np.argmin(np.array(work.cut)[inside])]))
    return cuts
