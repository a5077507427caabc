"""Auto-MAP (arXiv:2007.04069): games of partition decisions without prices, played by a DQN."""
