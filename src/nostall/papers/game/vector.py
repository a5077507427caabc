"""Vector environments: copies of one kernel's game, or several kernels padded to common sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from operator import or_
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from nostall.core import BadInput
from nostall.papers.game.environment import AssemblyGame, Observation


def make_vector_env(
    games: Sequence[Mapping[str, Any]],
    copies: int = 1,
    mode: AutoresetMode = AutoresetMode.NEXT_STEP,
) -> SyncVectorEnv:
    """A vector environment of ``copies`` of each game.

    ``games`` are arguments of :class:`AssemblyGame`. Observations and actions have the sizes of the
    largest kernel. ``infos["action_mask"]`` holds the masks of legal actions;
    ``SyncVectorEnv.call("action_masks")`` returns them, too.
    """
    if not games or copies < 1:
        raise BadInput(
            f"a vector of games got {len(games)} games and copies={copies}; allowed is at least "
            "one of each"
        )
    sizes = reduce(or_, (AssemblyGame(**game).sizes for game in games))
    makers: list[Callable[[], gymnasium.Env[Observation, np.int64]]] = [
        partial(AssemblyGame, **{**game, "sizes": sizes}) for game in games for _ in range(copies)
    ]
    return SyncVectorEnv(makers, autoreset_mode=mode)
