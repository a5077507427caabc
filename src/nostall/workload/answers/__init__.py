"""Whole answers: what `nostall characterize` says of job tables, and of traces."""

from nostall.workload.answers.jobs import JobsAnswer, answer_jobs
from nostall.workload.answers.timelines import TracesAnswer, answer_traces
from nostall.workload.answers.whatif import WhatIf, parse_what_if

__all__ = [
    "JobsAnswer",
    "TracesAnswer",
    "WhatIf",
    "answer_jobs",
    "answer_traces",
    "parse_what_if",
]
