"""The assembly game on PTX: a Gymnasium environment over the assembler's input.

Importing this package registers ``nostall/PtxGame-v0`` with Gymnasium.  It needs the extra
``nostall[rl]``; the rest of nostall does not import it.
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

from nostall.papers.ptx_game.environment import PtxGame

__all__ = ["ID", "PtxGame"]

ID = "nostall/PtxGame-v0"
"""Name of the environment for ``gymnasium.make``."""

if ID not in gymnasium.registry:
    gymnasium.register(ID, entry_point="nostall.papers.ptx_game.environment:PtxGame")
