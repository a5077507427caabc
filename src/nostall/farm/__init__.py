"""Several GPUs on one or several machines: work goes out to Dask workers, answers come back.

What goes out is a whole search, not a candidate: measured on an H200, the GPU's process was busy
for 17 to 72 % of a search, in the middle 29 % (``spent_s`` against ``search_s`` of ``anneal`` in
benchmarks/results/gpu_suite.json).  The rest is the searching process, so one process that proposes
for several GPUs would leave them idle.
"""

from nostall.farm.device import FarmDevice, Opening, close, opened
from nostall.farm.farm import Farm, Works, local, remote

__all__ = ["Farm", "FarmDevice", "Opening", "Works", "close", "local", "opened", "remote"]
