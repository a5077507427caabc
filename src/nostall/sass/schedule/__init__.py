"""Schedules of a SASS function: legal moves, their constraints and the search space they span."""

from nostall.sass.schedule.patch import Patcher
from nostall.sass.schedule.space import ScheduleSpace
from nostall.sass.schedule.state import Schedule

__all__ = ["Patcher", "Schedule", "ScheduleSpace"]
