"""What was found, kept for good: optimised cubins beside their originals, with provenance."""

from nostall.store.errors import BadBundle, BadStore
from nostall.store.index import Row
from nostall.store.provenance import Compared, Provenance, Verification
from nostall.store.store import Found, Lookup, Store, home

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
