"""The record of a training job, and readers for tables of such records."""

from nostall.workload.jobs.record import Architecture, Job, Resource

__all__ = ["Architecture", "Job", "Resource"]
