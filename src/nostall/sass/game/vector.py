"""Several games side by side: copies of one kernel, or several kernels in shapes that fit all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from operator import or_
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from nostall.core import BadInput
from nostall.sass.game.environment import AssemblyGame, Observation


def vectorised(
    games: Sequence[Mapping[str, Any]],
    copies: int = 1,
    mode: AutoresetMode = AutoresetMode.NEXT_STEP,
) -> SyncVectorEnv:
    """``copies`` of each game; ``games`` are the arguments of :class:`AssemblyGame`.

    Observations and actions get the sizes of the largest kernel.  Legal actions are in
    ``infos["action_mask"]`` and, by :meth:`SyncVectorEnv.call`, in ``action_masks``.
    """
    if not games or copies < 1:
        raise BadInput(
            f"a vector of games got {len(games)} games and copies={copies}; allowed is at least "
            "one of each"
        )
    sizes = reduce(or_, (AssemblyGame(**game).sizes for game in games))
    one: list[Callable[[], gymnasium.Env[Observation, np.int64]]] = [
        partial(AssemblyGame, **{**game, "sizes": sizes}) for game in games for _ in range(copies)
    ]
    return SyncVectorEnv(one, autoreset_mode=mode)
