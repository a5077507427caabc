"""What ``TRITON_CACHE_MANAGER`` names under ``nostall apply``.

This file stands alone on PYTHONPATH: a Python in the process tree that lacks nostall, or has one
that does not work, must run its program as before.
"""

import sys

from triton.runtime.cache import FileCacheManager

try:
    from nostall.attach.triton_cache import StoreCacheManager as Manager
except Exception as error:  # whatever is wrong with nostall here, the program must run
    print(f"nostall: not usable in {sys.executable} ({error}); originals run", file=sys.stderr)

    class Manager(FileCacheManager):  # type: ignore[no-redef,misc]
        """Triton's own."""
