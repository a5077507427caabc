"""Job records and job tables: units, skipped rows, rejected files."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import pytest

from nostall.core import BadInput, BadJob, MissingPart
from nostall.workload import Architecture, Job, read_jobs
from nostall.workload.jobs.steps import is_step_table, read_steps
from nostall.workload.jobs.table import parse_column_names

TWO_JOBS = """name,architecture,replicas,flops [T],dense_bytes [MB],weight_traffic [GB],gpu_hours
resnet,allreduce-local,8,1.5,204,0.357,12
ctr,PS/Worker,16,0.1,1,,80
"""


def write(tmp_path: Path, text: str, name: str = "jobs.csv") -> Path:
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["jobs.csv", "jobs.csv.gz"])
def test_units_and_spellings_of_architectures(tmp_path: Path, name: str) -> None:
    table = read_jobs(write(tmp_path, TWO_JOBS, name))
    resnet, ctr = table.jobs
    assert resnet.flops == pytest.approx(1.5e12)
    assert resnet.dense_bytes == pytest.approx(204e6)
    assert resnet.weight_traffic == pytest.approx(357e6)
    assert ctr.architecture is Architecture.PS_WORKER
    assert ctr.weight_traffic is None
    assert table.num_skipped == 0


CLUSTER = """user,kind,num_gpus,tflop per step,seconds
alice,allreduce-local,8,1.5,9
bob,PS/Worker,16,0.1,7
"""


def test_a_table_with_other_names(tmp_path: Path) -> None:
    options = ("architecture=kind", "replicas = num_gpus", "flops [T]=tflop per step")
    names = parse_column_names(options)
    table = read_jobs(write(tmp_path, CLUSTER), names)
    assert [(j.architecture.value, j.replicas, j.flops) for j in table.jobs] == [
        ("allreduce-local", 8, 1.5e12),
        ("ps-worker", 16, 0.1e12),
    ]
    steps = write(tmp_path, "n,t,seconds,size\n2,50,1,9\n", "steps.csv")
    names = parse_column_names(("nodes=n", "seconds [ms]=t", "gradient_bytes=size"))
    assert is_step_table(steps, names) and not is_step_table(steps)
    [row] = read_steps(steps, names).steps
    assert (row.nodes, row.seconds, row.gradient_bytes) == (2, 0.05, 9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), r"unknown column 'user'.* required are architecture.* --column FIELD=NAME"),
        (("architecture=sort",), r"column 'sort' is unknown; allowed are user, kind,"),
        (("architecture=kind", "colour=user"), "unknown column 'colour'"),
        (("flops [TB]=tflop per step",), "unit 'TB'"),
        (("flops [T]=tflop per step",), "column 'architecture' is missing"),
    ],
)
def test_names_that_do_not_fit_the_table(
    tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    with pytest.raises(BadJob, match=message):
        read_jobs(write(tmp_path, CLUSTER), parse_column_names(options))


@pytest.mark.parametrize("option", ["flops", "flops=", "=x", "flops[T=x"])
def test_a_column_option_of_another_form(option: str) -> None:
    with pytest.raises(BadInput, match="is not FIELD=NAME"):
        parse_column_names([option])
    with pytest.raises(BadInput, match=r"'t' is the column of 'flops \[T\]'; give each"):
        parse_column_names(["flops [T]=t", "batch=t"])


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs the extra nostall[parquet]")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "jobs.parquet"
    columns = {"architecture": ["1w1g", "ps-worker", None], "flops [G]": [1.0, 2.0, 3.0]}
    parquet.write_table(pyarrow.table({**columns, "replicas": [1, 4, 1]}), path)
    table = read_jobs(path)
    assert [j.flops for j in table.jobs] == [1e9, 2e9]
    assert (table.skipped_rows[0].position, table.num_skipped) == ("row 3", 1)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(BadJob, match=r"jobs\.parquet"):
        read_jobs(path)


def test_the_error_for_missing_pyarrow_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingPart, match=r"nostall\[parquet\]"):
        read_jobs(write(tmp_path, "", "jobs.parquet"))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("x,tree,8,1,1,1,1", "architecture"),
        ("x,ps-worker,0,1,1,1,1", "replicas"),
        ("x,ps-worker,2.5,1,1,1,1", "replicas"),
        ("x,ps-worker,2,-1,1,1,1", "flops"),
        ("x,ps-worker,2,nan,1,1,1", "flops"),
        ("x,ps-worker,2,many,1,1,1", "flops"),
        ("x,ps-worker,2,,1,1,1", "does no work"),
        ("x,1w1g,2,1,1,1,1", "1w1g"),
        ("x,ps-worker,2", "cells"),
        ("x,ps-worker,2,1,1,1,1,9,9", "cells"),
    ],
)
def test_a_bad_row_is_skipped_and_the_others_are_read(
    tmp_path: Path, row: str, reason: str
) -> None:
    table = read_jobs(write(tmp_path, TWO_JOBS + row + "\n"))
    assert len(table.jobs) == 2
    assert table.num_skipped == 1
    assert table.skipped_rows[0].position == "line 4"
    assert reason in table.skipped_rows[0].reason


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "architecture"),
        ("name,flops\nx,1\n", "architecture"),
        ("architecture,flops [TB]\n1w1g,1\n", "unit 'TB'"),
        ("architecture,dense_bytes [Mb]\n1w1g,1\n", "unit 'Mb'"),
        ("architecture,colour\n1w1g,red\n", "'colour'"),
        ("architecture,flops,flops [T]\n1w1g,1,1\n", "twice"),
        ("architecture\tflops\n1w1g\t1\n", "the cells are separated by tabs: separate them"),
        ("architecture,flops\ntree,1\n", "no job in 1 row;"),
        ("architecture,flops\n", "no job in 0 rows; the table has no rows"),
    ],
)
def test_a_table_without_jobs_is_rejected_with_its_name(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(BadJob) as error:
        read_jobs(write(tmp_path, text))
    assert message in str(error.value) and "jobs.csv" in str(error.value)


def test_the_rows_before_the_damage_of_a_truncated_file_are_read(tmp_path: Path) -> None:
    rows = "".join(f"x{n},1w1g,1,{n}.{n * 7919 % 1000},1,1,1\n" for n in range(1, 20_000))
    path = write(tmp_path, TWO_JOBS + rows, "jobs.csv.gz")
    path.write_bytes(path.read_bytes()[:-5000])
    table = read_jobs(path)
    assert 1000 < len(table.jobs) < 20_000
    assert table.num_skipped == 1
    assert "not readable" in table.skipped_rows[0].reason
    assert table.skipped_rows[0].position.startswith("after line ")


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("jobs.csv.gz", b"\x1f\x8bnot gzip at all"),
        ("jobs.csv.gz", b"plain text"),
        ("jobs.csv", b"architecture,flops\n\xff\xfe,1\n"),
        ("jobs.csv", b"architecture,flops\n1w1g,\x001\n"),
    ],
)
def test_the_error_for_a_broken_file_names_it(tmp_path: Path, name: str, data: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(BadJob, match=r"jobs\.csv"):
        read_jobs(path)


def rows(count: int) -> list[str]:
    return [f"x{n},1w1g,1,{n}.5,1,1,1" for n in range(1, count + 1)]


@pytest.mark.parametrize("byte", [b'"', b"\xff", b"\0", b",", b"\n", b"\r", b"x"])
def test_a_damaged_byte_costs_at_most_two_rows(tmp_path: Path, byte: bytes) -> None:
    """A line end that is damaged joins two rows."""
    header, *_ = TWO_JOBS.splitlines()
    text = "\n".join((header, *rows(8))).encode()
    path = tmp_path / "jobs.csv"
    begin = text.index(b"\n") + 1
    for position in range(begin, len(text)):
        path.write_bytes(text[:position] + byte + text[position + 1 :])
        table = read_jobs(path)
        is_joined = text[position : position + 1] == b"\n"
        assert len(table.jobs) >= 8 - 1 - is_joined, position


def test_text_that_is_not_utf8_is_noted_and_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    path.write_bytes(TWO_JOBS.encode().replace(b"resnet", b"res\xffet"))
    table = read_jobs(path)
    assert (len(table.jobs), table.num_skipped) == (2, 0)
    assert "1 row with bytes that are not UTF-8" in table.notes[0]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"])
def test_byte_order_marks_and_line_ends(tmp_path: Path, encoding: str, ends: str) -> None:
    path = tmp_path / "jobs.csv"
    path.write_bytes(TWO_JOBS.replace("\n", ends).encode(encoding))
    assert [job.name for job in read_jobs(path).jobs] == ["resnet", "ctr"]


def test_quoted_cells_may_contain_commas_quotes_and_line_ends(tmp_path: Path) -> None:
    text = 'name,architecture,flops\n"a, ""b""\nc",1w1g,1\n"d,1w1g,1\ne,1w1g,1\n'
    table = read_jobs(write(tmp_path, text))
    assert [job.name for job in table.jobs] == ['a, "b"\ufffdc', "e"]
    assert [row.position for row in table.skipped_rows] == ["line 4"]


def test_damage_of_a_parquet_file_costs_the_row_or_the_row_group(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs the extra nostall[parquet]")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "jobs.parquet"
    names = [f"name-{n:03}-padding-padding" for n in range(40)]
    columns = {"architecture": ["1w1g"] * 40, "flops": [1.0 + n for n in range(40)], "name": names}
    options = {"compression": "none", "use_dictionary": False, "row_group_size": 10}
    parquet.write_table(pyarrow.table(columns), path, **options)
    sound = path.read_bytes()
    position = sound.index(b"name-013")
    path.write_bytes(sound[:position] + b"\xff" + sound[position + 1 :])
    table = read_jobs(path)
    assert (len(table.jobs), table.skipped_rows[0].position) == (39, "row 14")
    path.write_bytes(sound[: position - 9] + b"\xff" * 9 + sound[position:])
    table = read_jobs(path)
    assert len(table.jobs) >= 30
    assert "damaged" in table.skipped_rows[0].reason


@pytest.mark.parametrize(
    ("spelling", "precision"),
    [
        ("BF16", "bf16"),
        ("bfloat16", "bf16"),
        ("torch.bfloat16", "bf16"),
        ("half", "fp16"),
        ("f16", "fp16"),
        ("Float", "fp32"),
        ("float8_e4m3fn", "fp8"),
        ("f8e4m3", "fp8"),
        ("double", "fp64"),
        ("tf32", "tf32"),
        ("posit16", "posit16"),
    ],
)
def test_spellings_of_precisions(tmp_path: Path, spelling: str, precision: str) -> None:
    text = f"architecture,flops,precision\n1w1g,1,{spelling}\n"
    assert read_jobs(write(tmp_path, text)).jobs[0].precision == precision


@pytest.mark.parametrize(
    "changes",
    [
        {"flops": math.inf},
        {"flops": 1e31},
        {"batch": 0},
        {"batch": 1e300},
        {"replicas": 0},
        {"replicas": 10_000_001},
        {"replicas": 10**30},
        {"weight_traffic": -1.0},
    ],
)
def test_impossible_jobs_are_rejected(changes: dict[str, float]) -> None:
    with pytest.raises(BadJob, match=next(iter(changes))):
        Job("x", Architecture.PS_WORKER, **{"flops": 1.0, **changes})  # type: ignore[arg-type]
