"""Several GPUs on one or several machines: work goes out to Dask workers, answers come back.

What goes out is a whole search, not a candidate: proposing takes a good part of the time
(docs/measuring.md has the figures), so one process that proposes for several GPUs would leave them
idle.
"""

from nostall.farm.device import FarmDevice, Opening, close, opened, wanted
from nostall.farm.farm import Farm, Works, local, remote

__all__ = ["Farm", "FarmDevice", "Opening", "Works", "close", "local", "opened", "remote", "wanted"]
