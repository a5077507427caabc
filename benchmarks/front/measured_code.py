"""Which code a committed result was measured with, and whether it has changed since.

``measured_code.json`` has, for each result file of a headline, the file's sha256 and a hash of the
code as of the commit that brought the file. ``python -m benchmarks page readme`` adds what is new.
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from benchmarks.harness.result_file import ROOT
from nostall.core.files.atomic import write_atomically

RECORD = ROOT / "front" / "measured_code.json"
_REPOSITORY = ROOT.parent
_SOURCE = "src/nostall"


def has_changed(files: Iterable[Path], code: Sequence[str]) -> bool:
    """Whether the code of any of the files is another one than the present code."""
    present = _hash_files(_working_files(code))
    entries = recorded()
    return any(entries[_name(file)]["code"] != present for file in files)


def unrecorded(files: Iterable[Path]) -> list[Path]:
    """Files that are new or that have changed since their entry was written."""
    entries = recorded()
    return [file for file in files if entries.get(_name(file), {}).get("sha256") != _sha256(file)]


@cache
def recorded() -> dict[str, dict[str, str]]:
    """The entries by result file."""
    entries: dict[str, dict[str, str]] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return entries


def update(used: Iterable[tuple[Path, Sequence[str]]]) -> None:
    """Write the entries of the files with the folders of their code; needs git."""
    pairs = list(used)
    stale = set(unrecorded(file for file, _ in pairs))
    entries = {
        _name(file): {"sha256": _sha256(file), "code": _hash_at_commit(file, code)}
        if file in stale
        else recorded()[_name(file)]
        for file, code in pairs
    }
    write_atomically(RECORD, (json.dumps(entries, indent=1, sort_keys=True) + "\n").encode())
    recorded.cache_clear()


def _name(file: Path) -> str:
    return str(file.relative_to(ROOT))


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _hash_at_commit(file: Path, code: Sequence[str]) -> str:
    """The code as of the commit that last changed a file; the present code if it is not committed.

    A folder that has another name today is missing there, so the code counts as changed.
    """
    if _git("status", "--porcelain", "--", str(file)).strip():
        return _hash_files(_working_files(code))
    commit = _git("log", "-1", "--format=%H", "--", str(file)).decode().strip()
    found: list[tuple[str, bytes]] = []
    for folder in code:
        if not _git("ls-tree", "-d", commit, f"{_SOURCE}/{folder}"):
            continue
        archive = io.BytesIO(_git("archive", commit, "--", f"{_SOURCE}/{folder}"))
        with tarfile.open(fileobj=archive) as tar:
            for member in tar.getmembers():
                content = tar.extractfile(member)
                if member.name.endswith(".py") and content is not None:
                    found.append((member.name, content.read()))
    return _hash_files(found)


def _working_files(code: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    for folder in code:
        for path in (_REPOSITORY / _SOURCE / folder).rglob("*.py"):
            yield str(path.relative_to(_REPOSITORY)), path.read_bytes()


def _hash_files(files: Iterable[tuple[str, bytes]]) -> str:
    digest = hashlib.sha256()
    for name, content in sorted(files):
        digest.update(name.encode() + b"\0" + hashlib.sha256(content).digest())
    return digest.hexdigest()[:16]


def _git(*words: str) -> bytes:
    command = ["git", "-C", str(_REPOSITORY), *words]
    return subprocess.run(command, check=True, capture_output=True).stdout
