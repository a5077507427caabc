"""What an instruction order would cost: a model of one SM's issue slots, pipes and memory."""

from nostall.sass.model.issue import Reason
from nostall.sass.model.sm_model import Explanation, Issue, SmModel

__all__ = ["Explanation", "Issue", "Reason", "SmModel"]
