"""NumPy array types of schedules and of the compiled (numba) loops over them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
UInt8Array = NDArray[np.uint8]
BoolArray = NDArray[np.bool_]
