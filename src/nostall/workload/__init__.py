"""Workload characterisation: where the time of training jobs and of GPUs goes, and what-if models.

Job tables are modelled with the analytical framework of arXiv:1910.05930 ("Characterizing Deep
Learning Training Workloads on Alibaba-PAI").  Profiler traces are measured.
"""

from nostall.workload.hardware.description import Hardware
from nostall.workload.hardware.file import load_hardware, presets
from nostall.workload.jobs.record import Architecture, Job, Resource
from nostall.workload.jobs.table import JobTable, read_jobs
from nostall.workload.model.breakdown import StepBreakdown, model_step
from nostall.workload.model.population import Population, project_job

__all__ = [
    "Architecture",
    "Hardware",
    "Job",
    "JobTable",
    "Population",
    "Resource",
    "StepBreakdown",
    "load_hardware",
    "model_step",
    "presets",
    "project_job",
    "read_jobs",
]
