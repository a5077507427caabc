"""SM issue model: the modelled cost of a schedule from issue slots, pipes and memory queues."""

from nostall.sass.model.issue import Reason
from nostall.sass.model.sm_model import Explanation, Issue, SmModel

__all__ = ["Explanation", "Issue", "Reason", "SmModel"]
