"""What was found, kept for good: optimised cubins beside their originals, with provenance."""

from typing import TYPE_CHECKING

from nostall.core.exports import among

if TYPE_CHECKING:
    from nostall.store.errors import BadBundle, BadStore
    from nostall.store.folder import home
    from nostall.store.index import Row
    from nostall.store.provenance import Compared, Provenance, Verification
    from nostall.store.store import Found, Lookup, Store

__all__ = [
    "BadBundle",
    "BadStore",
    "Compared",
    "Found",
    "Lookup",
    "Provenance",
    "Row",
    "Store",
    "Verification",
    "home",
]

__getattr__ = among(
    __name__,
    __all__,
    "errors",
    "folder",
    "index",
    "provenance",
    "store",
)
