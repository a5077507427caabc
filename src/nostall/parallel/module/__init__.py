"""PyTorch modules as sequences of layers that can be profiled and run as separate segments.

Needs PyTorch; only this package and ``nostall.parallel.execute`` do.
"""

from nostall.parallel.module.job import Job, load_job
from nostall.parallel.module.model import Model
from nostall.parallel.module.profiler import profile_job

__all__ = ["Job", "Model", "load_job", "profile_job"]
