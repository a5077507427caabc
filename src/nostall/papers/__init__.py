"""Published methods that nostall is compared with; importing this registers their searches.

``game`` has the assembly game with CuAsmRL's agent and a policy over graphs, ``ptx_game`` the same
game on PTX, ``automap`` the explorers of Auto-MAP, ``multiview`` a classifier of several views.
"""

from nostall.tuning.strategies import LEARNING_STRATEGIES

LEARNING_STRATEGIES["cuasmrl"] = ("nostall.papers.game.cuasmrl.search", "Cuasmrl")
LEARNING_STRATEGIES["ppo"] = ("nostall.papers.game.ppo.search", "PpoSearch")
