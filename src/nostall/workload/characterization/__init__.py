"""Results of ``nostall characterize``: job tables (modelled), traces and step tables (measured)."""

from nostall.workload.characterization.jobs import JobsCharacterization, characterize_jobs
from nostall.workload.characterization.scaling import ScalingCharacterization, characterize_steps
from nostall.workload.characterization.traces import TracesCharacterization, characterize_traces
from nostall.workload.characterization.what_if import WhatIf, parse_what_if

__all__ = [
    "JobsCharacterization",
    "ScalingCharacterization",
    "TracesCharacterization",
    "WhatIf",
    "characterize_jobs",
    "characterize_steps",
    "characterize_traces",
    "parse_what_if",
]
