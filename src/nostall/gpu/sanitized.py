"""Launches one kernel once; started under compute-sanitizer by :mod:`nostall.gpu.sanitizer`.

    python -m nostall.gpu.sanitized FILE

Nothing is compared and nothing is timed here: the tools make kernels many times slower.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from nostall.core.errors import NostallError
from nostall.gpu.checking import CHECKS, Checker
from nostall.gpu.device import Kernel, Plan
from nostall.gpu.driver import Cuda
from nostall.gpu.timing import Flush


def main(path: Path) -> int:
    """Exit code 0 when the kernel was launched and ended."""
    kernel: Kernel
    plan: Plan
    kernel, cubin, plan, ordinal = pickle.loads(path.read_bytes())
    try:
        cuda = Cuda(ordinal)
    except NostallError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    loaded = cuda.load(cubin, kernel.name, kernel.launch.shared)
    checker = Checker(cuda, kernel.name, kernel.launch, 1, plan, Flush(cuda))
    checker.buffers.set_number(CHECKS)
    checker.buffers.make(0)
    checker.run(loaded, 0)
    cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
