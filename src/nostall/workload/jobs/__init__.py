"""What a training job is: the typed record, and tables of such records."""

from nostall.workload.jobs.record import Architecture, Job, Resource

__all__ = ["Architecture", "Job", "Resource"]
