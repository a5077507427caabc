"""The assembly game (CuAsmRL, arXiv:2501.08071): a Gymnasium environment over schedules.

An action changes the schedule of a kernel; the reward is the change of its throughput. Importing
this package registers ``nostall/AssemblyGame-v0`` with Gymnasium. It needs the extra
``nostall[rl]``, so the rest of nostall imports it only if a learning strategy is selected.
"""

from __future__ import annotations

from nostall.core.errors import MissingPart

try:
    import gymnasium
except ImportError as error:
    raise MissingPart(
        "the assembly game needs gymnasium, which is not installed; install it with the extra: "
        "pip install 'nostall[rl]'"
    ) from error

from nostall.papers.game.environment import AssemblyGame, make_vector_env

__all__ = ["ID", "AssemblyGame", "make_vector_env"]

ID = "nostall/AssemblyGame-v0"
"""Name of the environment for ``gymnasium.make``."""

if ID not in gymnasium.registry:
    gymnasium.register(ID, entry_point="nostall.papers.game.environment:AssemblyGame")
