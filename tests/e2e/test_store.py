"""Commands `nostall store` and `nostall apply`: listing, export, import, verification, use."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nostall.sass.binary.cubin import Cubin
from nostall.store import Store
from nostall.store.artefacts import content_hash
from tests.e2e.cli import LAUNCH, SMALL, command, environment, error_line
from tests.e2e.cli import nostall_here as nostall

COUNTED = ["--evaluations", 300, "--launch", LAUNCH]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store with one modelled record."""
    folder = tmp_path_factory.mktemp("stored")
    store_home = str(folder / "home")
    done = nostall(
        "tune", SMALL, *COUNTED, "--store", "--out", folder / "run", NOSTALL_HOME=store_home
    )
    assert done.code == 0, done.err
    assert "use it:   nostall apply --modelled -- python your_program.py" in done.out
    return store_home


def test_ls_and_show(home: str) -> None:
    listed = nostall("store", "ls", "--format", "json", NOSTALL_HOME=home).json
    assert [(r["kernel"], r["kind"], r["source"]) for r in listed] == [
        ("transpose", "modelled", "tuned")
    ]
    table = nostall("store", "ls", NOSTALL_HOME=home)
    assert table.code == 0 and "modelled 1." in table.out and listed[0]["record"][:12] in table.out
    shown = nostall(
        "store", "show", listed[0]["record"][:8], "--format", "json", NOSTALL_HOME=home
    ).json
    assert shown["verified"]["safe"] is True
    assert Path(shown["original_path"]).read_bytes() == SMALL.read_bytes()
    assert nostall("verify", shown["original_path"], shown["optimised_path"]).code == 0
    assert "modelled" in nostall("store", "show", listed[0]["record"][:8], NOSTALL_HOME=home).out


def test_export_import_and_rm(home: str, tmp_path: Path) -> None:
    path = tmp_path / "all.nostall"
    line = error_line(nostall("store", "export", path, NOSTALL_HOME=home))
    assert "no measured record; --modelled" in line
    nothing = nostall("store", "export", path, NOSTALL_HOME=str(tmp_path / "none"))
    assert "nothing to export" in error_line(nothing)
    assert nostall("store", "export", path, "--modelled", NOSTALL_HOME=home).code == 0
    elsewhere = str(tmp_path / "elsewhere")
    done = nostall("store", "import", path, "--format", "json", NOSTALL_HOME=elsewhere)
    assert done.code == 0
    (record,) = (r["record"] for r in done.json)
    removed = nostall("store", "rm", record[:10], "--format", "json", NOSTALL_HOME=elsewhere)
    assert [r["record"] for r in removed.json] == [record]
    assert nostall("store", "ls", "--format", "json", NOSTALL_HOME=elsewhere).json == []
    assert "no records" in nostall("store", "ls", NOSTALL_HOME=elsewhere).out
    content = path.read_bytes()
    path.write_bytes(content[:300] + b"?" + content[301:])
    assert "bundle" in error_line(nostall("store", "import", path, NOSTALL_HOME=elsewhere))


def test_store_verify_checks_all_records(home: str, tmp_path: Path) -> None:
    elsewhere = str(shutil.copytree(home, tmp_path / "home"))
    done = nostall("store", "verify", "--format", "json", NOSTALL_HOME=elsewhere)
    assert (done.code, [r["safe"] for r in done.json]) == (0, [True])
    store = Store(Path(elsewhere))
    (row,) = store.rows()
    data = store.artefacts.get(row.optimised, "cubin")
    at = Cubin.parse(data).texts[0].file_offset + 16 * 4
    unsafe = data[:at] + 2 * data[at + 16 : at + 32] + data[at + 32 :]
    provenance = store.provenance(row).model_copy(update={"optimised": content_hash(unsafe)})
    bad = store.record(SMALL.read_bytes(), unsafe, provenance)
    done = nostall("store", "verify", "--remove", NOSTALL_HOME=elsewhere)
    assert done.code == 1 and "2 records, 1 unsafe and removed" in done.out
    assert store.rows() == [row] and bad.id[:12] in done.out
    store.artefacts.path(row.optimised, "cubin").write_bytes(b"x")
    done = nostall("store", "verify", row.id[:9], "--format", "json", NOSTALL_HOME=elsewhere)
    assert done.code == 1 and "was changed" in done.json[0]["reason"]


def test_repair_after_damage_of_the_index(home: str, tmp_path: Path) -> None:
    elsewhere = str(shutil.copytree(home, tmp_path / "home"))
    store = Store(Path(elsewhere))
    (row,) = store.rows()
    store.index.path.write_bytes(b"")
    for args in (["ls"], ["rm", row.id[:12]], ["verify"]):
        line = error_line(nostall("store", *args, NOSTALL_HOME=elsewhere))
        assert "is damaged" in line and "`nostall store repair`" in line
    done = nostall("store", "repair", NOSTALL_HOME=elsewhere)
    assert done.code == 0 and row.id[:12] in done.out and "index.sqlite.damaged-" in done.out
    done = nostall("store", "repair", "--format", "json", NOSTALL_HOME=elsewhere)
    assert done.json == {"records": [row.id], "unusable": [], "damaged_index": None}
    assert nostall("store", "verify", NOSTALL_HOME=elsewhere).code == 0


def test_verify_names_records_that_the_index_lacks(home: str, tmp_path: Path) -> None:
    elsewhere = str(shutil.copytree(home, tmp_path / "home"))
    store = Store(Path(elsewhere))
    store.index.remove(store.rows()[0].id)
    done = nostall("store", "verify", NOSTALL_HOME=elsewhere)
    assert "1 record has files but is not in the index" in done.err
    assert "1 record in the index" in nostall("store", "repair", NOSTALL_HOME=elsewhere).out


def test_missing_records_and_bundles(home: str, tmp_path: Path) -> None:
    for verb in ("show", "rm"):
        assert "has no record 'ffff'" in error_line(
            nostall("store", verb, "ffff", NOSTALL_HOME=home)
        )
    missing = tmp_path / "missing"
    assert "cannot read bundle" in error_line(
        nostall("store", "import", missing, NOSTALL_HOME=home)
    )


def test_apply_runs_a_program_unchanged(home: str) -> None:
    program = (
        "import os, sys, subprocess\n"
        "names = ('TRITON_CACHE_MANAGER', 'TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER')\n"
        "child = 'import os; print(*(os.environ[n] for n in %r))' % (names,)\n"
        "subprocess.run([sys.executable, '-c', child], check=True)\n"
        "print(sys.stdin.read(), sys.argv[1:])\n"
        "sys.exit(7)\n"
    )
    done = subprocess.run(
        command("apply", "--modelled", "--", sys.executable, "-c", program, "--flag", "-x"),
        env=environment(NOSTALL_HOME=home),
        input="from outside",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 7
    assert done.stdout == "nostall_triton_cache:Manager 0\nfrom outside ['--flag', '-x']\n"
    assert done.stderr == ""


def test_apply_warns_if_there_is_no_measured_record(home: str) -> None:
    done = nostall("apply", "--", "no-such-program", NOSTALL_HOME=home)
    assert done.err.count("no record to apply (1 modelled only: --modelled uses them)") == 1


def test_apply_with_a_broken_store_runs_the_program(tmp_path: Path) -> None:
    (tmp_path / "index.sqlite").write_bytes(b"no database" * 1000)
    done = nostall("apply", "--", "no-such-program", NOSTALL_HOME=str(tmp_path))
    assert "runs with its original kernels" in done.err
    assert "cannot run 'no-such-program'" in done.err  # it tried to run it


def test_apply_rejects_a_missing_program_and_another_cache_manager(home: str) -> None:
    missing = nostall("apply", "--modelled", "--", "no-such-program", NOSTALL_HOME=home)
    assert "cannot run 'no-such-program'" in error_line(missing)
    other = {"NOSTALL_HOME": home, "TRITON_CACHE_MANAGER": "mine:Manager"}
    taken = nostall("apply", "--modelled", "--", sys.executable, "-c", "", **other)
    assert "Triton takes one only" in error_line(taken)


def test_measuring_without_a_gpu_is_an_error(tmp_path: Path) -> None:
    done = nostall(
        "tune", SMALL, *COUNTED, "--objective", "gpu", "--out", tmp_path / "run",
        CUDA_VISIBLE_DEVICES="",
    )  # fmt: skip
    assert "no usable GPU" in error_line(done, 3)
    assert not (tmp_path / "run").exists()
