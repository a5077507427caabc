"""Program that compute-sanitizer runs: launches one kernel once.

    python -m nostall.gpu.sanitizer_target FILE

:mod:`nostall.gpu.sanitizer` writes FILE and starts this program.  It neither compares outputs nor
measures times, because the sanitizer makes kernels many times slower.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from nostall.core.errors import NostallError
from nostall.gpu.device import Kernel, MeasurementPlan
from nostall.gpu.driver import Cuda
from nostall.gpu.evaluator.checking import CHECK_START, Checker
from nostall.gpu.timing import L2Flush


def main(path: Path) -> int:
    """Launch the kernel of a pickle file; returns exit code 0 if it ran to the end."""
    kernel: Kernel
    plan: MeasurementPlan
    kernel, cubin, plan, ordinal = pickle.loads(path.read_bytes())
    try:
        cuda = Cuda(ordinal)
    except NostallError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    loaded = cuda.load(cubin, kernel.name, kernel.launch.shared)
    checker = Checker(cuda, kernel.name, kernel.launch, 1, plan, L2Flush(cuda))
    checker.buffers.set_sample(CHECK_START)
    checker.buffers.generate_inputs(0)
    checker.run(loaded, 0)
    cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
