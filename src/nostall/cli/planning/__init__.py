"""The commands of plans: ``nostall plan``, ``simulate`` and ``launch``."""
