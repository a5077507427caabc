"""Module named in ``TRITON_CACHE_MANAGER`` under ``nostall apply``.

Its folder is on PYTHONPATH of the whole process tree.  A Python without nostall, or with one that
cannot be imported, must run its program with Triton's own cache manager.
"""

import sys

from triton.runtime.cache import FileCacheManager

try:
    from nostall.attach.triton_cache import StoreCacheManager as Manager
except Exception as error:  # any error of nostall's import: the program must run
    print(f"nostall: not usable in {sys.executable} ({error}); originals run", file=sys.stderr)

    class Manager(FileCacheManager):  # type: ignore[no-redef,misc]
        """Triton's own cache manager."""
