"""The commands ``nostall tune`` and ``nostall train``; any strategy is known to them by name."""

import nostall.papers  # noqa: F401  registers the strategies that learn
