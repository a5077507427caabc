"""The assembly game (CuAsmRL, arXiv:2501.08071): play on a schedule, earn the change in speed.

Importing this package makes ``gymnasium.make("nostall/AssemblyGame-v0", ...)`` known.  It needs
the extra ``nostall[rl]``; nothing else in nostall imports it unless it is asked for.
"""

from __future__ import annotations

from nostall.core.errors import MissingPart

try:
    import gymnasium
except ImportError as error:
    raise MissingPart(
        "the assembly game needs gymnasium, which is not installed; the extra has it: "
        "pip install 'nostall[rl]'"
    ) from error

from nostall.sass.game.environment import AssemblyGame
from nostall.sass.game.vector import vectorised

__all__ = ["ID", "AssemblyGame", "vectorised"]

ID = "nostall/AssemblyGame-v0"
"""What ``gymnasium.make`` knows the game as."""

if ID not in gymnasium.registry:
    gymnasium.register(ID, entry_point="nostall.sass.game.environment:AssemblyGame")
