"""SM issue model: the modelled cost of a schedule from issue slots, pipes and memory queues."""

from typing import TYPE_CHECKING

from nostall.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from nostall.sass.model.issue import Reason
    from nostall.sass.model.sm_model import Explanation, Issue, SmModel

__all__ = ["Explanation", "Issue", "Reason", "SmModel"]

__getattr__ = lazy_exports(__name__, __all__, "issue", "sm_model")
