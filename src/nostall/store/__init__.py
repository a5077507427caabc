"""Store of optimised cubins: each beside its original, with a provenance record."""

from typing import TYPE_CHECKING

from nostall.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from nostall.store.errors import BadBundle, BadStore
    from nostall.store.folder import home
    from nostall.store.provenance import ComparisonRecord, Provenance, Verification
    from nostall.store.row import Row
    from nostall.store.store import Store, StoredCubin

__all__ = [
    "BadBundle",
    "BadStore",
    "ComparisonRecord",
    "Provenance",
    "Row",
    "Store",
    "StoredCubin",
    "Verification",
    "home",
]

__getattr__ = lazy_exports(
    __name__,
    __all__,
    "errors",
    "folder",
    "row",
    "provenance",
    "store",
)
