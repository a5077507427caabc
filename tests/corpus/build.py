"""Compile the Triton part of the corpus with one Triton version.

    python tests/corpus/build.py --triton current --out .cache/corpus
    python tests/corpus/build.py --triton .cache/triton-3.6.0 --out .cache/corpus

A folder given to ``--triton`` comes from ``pip install --no-deps --target FOLDER triton==...``.
Cubins that are up to date are not compiled again.  The exit code is 1 if a kernel does not compile
and ``triton_kernels.SKIPPED`` gives no reason for it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.corpus.catalogue import ROOT, folder, index, stale, stamp, triton_entries
from tests.corpus.triton_kernels import Entry


def _compile(entry: Entry, capability: int, name: str, cubins: Path) -> dict[str, Any]:
    """Compile one cubin into folder ``cubins``; returns its index entry, or {"error": message}."""
    from nostall.core import NostallError
    from nostall.tuning.sources.triton_source import compile_triton

    start = time.monotonic()
    try:
        source = compile_triton(
            ROOT / entry.path, entry.launch, None, f"sm_{capability}", options=entry.options
        )
    except NostallError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    _write(cubins / f"{name}.cubin", source.cubin)
    assert source.launch is not None
    return {
        "kernel": source.kernel,
        "source": f"{entry.path}:{entry.launch}",
        "arch": f"sm_{capability}",
        "sha256": hashlib.sha256(source.cubin).hexdigest(),
        "provenance": dict(source.provenance),
        "launch": source.launch.model_dump(mode="json"),
        "seconds": round(time.monotonic() - start, 2),
    }


def _write(path: Path, data: bytes) -> None:
    """Write a file so that other processes never see a part of it."""
    temporary = path.with_suffix(f".tmp{os.getpid()}")
    temporary.write_bytes(data)
    temporary.replace(path)


def build(out: Path, jobs: int, step: int, capability: int | None = None) -> int:
    """Compile the cubins of the importable Triton that are out of date; returns the failures.

    ``capability``: compile only those for this one.
    """
    import triton

    version = str(triton.__version__)
    cubins = folder(version, out)
    cubins.mkdir(parents=True, exist_ok=True)
    names = {name for _, _, name in triton_entries(version)}
    known = {name: item for name, item in index(version, out).items() if name in names}
    for cubin in cubins.glob("*.cubin"):
        if cubin.stem not in names:
            cubin.unlink()
    todo = [item for item in stale(version, out, step) if capability in (None, item[1])]
    failures = 0
    start = time.monotonic()
    with ProcessPoolExecutor(jobs) as pool:
        # The architectures of an entry are neighbours, so that a worker reuses compiled helpers.
        running = {pool.submit(_compile, *item, cubins): item for item in todo}
        for future in as_completed(running):
            entry, capability, name = running[future]
            result = future.result()
            if "error" in result:
                failures += 1
                print(f"FAILED {name}: {result['error']}", flush=True)
                known.pop(name, None)
            else:
                known[name] = {"stamp": stamp(entry, capability, version), **result}
    text = json.dumps(dict(sorted(known.items())), indent=1)
    _write(cubins / "index.json", text.encode())
    print(
        f"triton {version}: {len(todo) - failures} compiled, {failures} failed, "
        f"{len(known)} in {cubins}, {time.monotonic() - start:.0f} s"
    )
    return failures


def main() -> int:
    """Build with this Triton, or with another one in a child process; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--triton", default="current", help="'current', or a folder of pip --target"
    )
    parser.add_argument("--out", type=Path, default=ROOT / ".cache" / "corpus")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--every", type=int, default=1, help="compile only every N-th cubin")
    parser.add_argument("--capability", type=int, help="only for this one, such as 90")
    options = parser.parse_args()
    if options.triton != "current":
        target = Path(options.triton).resolve()
        if not (target / "triton" / "__init__.py").is_file():
            parser.error(f"{target} has no triton; fill it with pip install --target")
        command = [sys.executable, __file__, "--triton", "current", "--out", str(options.out)]
        command += ["--jobs", str(options.jobs), "--every", str(options.every)]
        if options.capability is not None:
            command += ["--capability", str(options.capability)]
        paths = [str(target), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        return subprocess.run(command, env=environment, check=False).returncode
    return 1 if build(options.out, options.jobs, options.every, options.capability) else 0


if __name__ == "__main__":
    sys.exit(main())
