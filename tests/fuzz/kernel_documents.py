"""Sound inputs of the readers of launch files, policies, bundles and fatbins, for fuzzing."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from nostall.sass.binary.cubin import Cubin
from nostall.store import Provenance, Store, bundle
from tests.fuzz.command_line import Original
from tests.unit.store.records import modelled

ROOT = Path(__file__).parents[2]
NVCC = ROOT / "tests" / "corpus" / "nvcc"
CUBIN, LAUNCH = "kernels.cubin", "launch.toml"
"""Names of the files that accompany launch files and policies."""
KERNEL = "spin_lock"
"""The smallest kernel of :data:`CUBIN`."""
_BUNDLED = ("block_scaled.sm_120a.cubin", "tensor.sm_75.cubin")
_SPIN_LOCK = """\
# Threads add to one sum, one after the other.
grid = [4, 1, 1]
block = [64, 1, 1]
flops = 256.0
trips = { 0 = 32 }

[[args]]
name = "lock"
dtype = "i32"
shape = [1]
role = "inout"
bound = 1

[[args]]
name = "sum"
dtype = "f32"
shape = [1]
role = "out"

[[args]]
name = "x"
dtype = "f32"
shape = [256]
low = 0.0
high = 1.0

[[shapes]]
grid = [2, 1, 1]
buffers = { x = [128] }
"""


def _spin_lock() -> dict[str, bytes]:
    return {
        CUBIN: (NVCC / "atomics.sm_80.cubin").read_bytes(),
        LAUNCH: _SPIN_LOCK.encode(),
    }


def launch_files() -> Sequence[Original]:
    """Launch files of the examples and of a small kernel, each with the cubin beside it."""
    files = {"spin_lock.toml": (_SPIN_LOCK.encode(), _spin_lock()[CUBIN])}
    for name in ("transpose", "dot_product"):
        folder = ROOT / "examples" / "nvcc"
        cubin = (folder / f"{name}.sm_90.cubin").read_bytes()
        files[f"{name}.toml"] = (folder / f"{name}.toml").read_bytes(), cubin
    return tuple(Original(name, launch, {CUBIN: cubin}) for name, (launch, cubin) in files.items())


def policies() -> Sequence[Original]:
    """Policy files of two sizes without training, each with a kernel beside it."""
    import torch

    from nostall.papers.game.ppo.policy import GraphPolicy, save_policy

    originals = []
    with tempfile.TemporaryDirectory() as folder:
        for width, rounds in ((4, 1), (8, 2)):
            torch.manual_seed(0)
            path = Path(folder) / f"{width}.safetensors"
            save_policy(GraphPolicy(width, rounds), path, {"corpus": ["spin_lock"]})
            originals.append(Original(path.name, path.read_bytes(), _spin_lock()))
    return originals


def bundles() -> Sequence[Original]:
    """Bundles of one record and of two, whose kernels the verifier finds safe."""
    originals = []
    with tempfile.TemporaryDirectory() as folder:
        for name, cubins in (("one", _BUNDLED[:1]), ("two", _BUNDLED)):
            store = Store(Path(folder) / name)
            for cubin in cubins:
                original = (NVCC / cubin).read_bytes()
                optimised = _wait_longer(original)
                store.record(original, optimised, _record_of(original, optimised))
            path = Path(folder) / f"{name}.nostall"
            bundle.write(store, store.rows(), path)
            originals.append(Original(path.name, path.read_bytes()))
    return originals


def _record_of(original: bytes, optimised: bytes) -> Provenance:
    """A modelled record of the first kernel of a cubin."""
    cubin = Cubin.parse(original)
    changes = {"kernel": cubin.texts[0].name, "architecture": f"sm_{cubin.sm}"}
    return modelled(original, optimised).model_copy(update=changes)


def _wait_longer(cubin: bytes) -> bytes:
    """The cubin with one more cycle between the first two instructions of its first kernel."""
    data = bytearray(cubin)
    data[Cubin.parse(cubin).texts[0].file_offset + 13] += 2  # bits 105 to 108 are the stall count
    return bytes(data)


def fatbins() -> Sequence[Original]:
    """Fatbins with cubins, compressed and plain, and with PTX."""
    paths = [*sorted(NVCC.glob("*.fatbin")), ROOT / "tests/unit/sass/binary/ptx.fatbin"]
    return tuple(Original(path.name, path.read_bytes()) for path in paths)
