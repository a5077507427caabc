"""Sentences about the events of a trace that are not used."""

from __future__ import annotations

from collections import Counter

from nostall.core.text.plurals import pluralize

NO_LANE = "none, on lane"
NO_PHASE = "without a valid phase"
NO_TIME = "without a valid start or duration"
OUT_OF_TIME = "with a time far outside the trace"
NOT_AN_EVENT = "with other JSON than an event"


def event_remarks(unusable: Counter[str], unknown_categories: Counter[str]) -> list[str]:
    """Skipped events, by reason, and events of unknown categories, a sentence each."""
    remarks = [
        f"{pluralize(count, 'event')} {reason} {'is' if count == 1 else 'are'} skipped"
        for reason, count in unusable.items()
    ]
    if unknown_categories:
        names = ", ".join(repr(name[:40]) for name in unknown_categories)
        count = sum(unknown_categories.values())
        remarks.append(
            f"{pluralize(count, 'event')} of unknown categories ({names}) "
            f"{'is' if count == 1 else 'are'} not counted as GPU work"
        )
    return remarks
