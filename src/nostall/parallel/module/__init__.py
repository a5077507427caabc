"""A PyTorch module as layers that can be cut apart, measured and run in pieces.

Needs PyTorch; nothing outside this package and ``nostall.parallel.execute`` does.
"""

from nostall.parallel.module.job import Job, load_job
from nostall.parallel.module.measure import profile_job
from nostall.parallel.module.model import Model

__all__ = ["Job", "Model", "load_job", "profile_job"]
