"""What every test can rely on."""

from __future__ import annotations

import os
import signal

from hypothesis import settings

# A shell starts background jobs with Ctrl-C ignored, and children inherit that; tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples on every machine; HYPOTHESIS_PROFILE=random looks for new ones.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("random", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
