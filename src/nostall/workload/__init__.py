"""Jobs and clusters: where training time goes, and what another set-up would change.

Implements the framework of arXiv:1910.05930 ("Characterizing Deep Learning Training Workloads on
Alibaba-PAI"), with readers for what it needs and for profiler traces.
"""

from nostall.workload.hardware import Hardware, load_hardware, presets
from nostall.workload.jobs import Architecture, Job, Resource
from nostall.workload.jobs.table import JobTable, read_jobs
from nostall.workload.model import Breakdown, Population, project, step

__all__ = [
    "Architecture",
    "Breakdown",
    "Hardware",
    "Job",
    "JobTable",
    "Population",
    "Resource",
    "load_hardware",
    "presets",
    "project",
    "read_jobs",
    "step",
]
