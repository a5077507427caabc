"""``nostall characterize`` end to end: job tables, traces, HTML pages, rejected input."""

from __future__ import annotations

import gzip
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.e2e.cli import error_line
from tests.e2e.cli import nostall_here as nostall
from tests.unit.workload.trace_events import event, kernel, launch, trace, write
from tests.unit.workload.traces.chakra.test_reader import METADATA, NODES, stream
from tests.unit.workload.traces.nsight_export import Export

TABLE = """name,architecture,replicas,flops [T],memory_bytes [GB],weight_traffic [GB],gpu_hours
a,allreduce-local,8,1.5,30,0.357,12
b,PS/Worker,16,0.1,1,1.2,80
<b>c</b>,PS/Worker,4,0.3,10,0.2,20
d,1w1g,1,7,20,,3
"""
MATMUL_SHAPES = {
    "Input Dims": [[4096, 4096], [4096, 4096]],
    "Input type": ["c10::Half", "c10::Half"],
}
TRACE = trace(
    event("cpu_op", "aten::mm", 0, 2, **MATMUL_SHAPES, **{"External id": 9}),
    launch(0, 1),
    kernel(f"nvjet_hsh_<script>{'_128x256' * 6}", 10, 400, launch=1, **{"External id": 9}),
    launch(2, 2),
    kernel("ncclDevKernel_AllReduce", 410, 100, launch=2, stream=8),
    launch(560, 3),
    kernel("vectorized_elementwise_kernel", 600, 50, launch=3),
    rank=0,
    world=2,
)


LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
ONE_STEP = trace(
    event("user_annotation", "ProfilerStep#5", 1000, 1000),
    event("user_annotation", LOADER, 1005, 600),
    launch(1620, 1, 5),
    kernel("ampere_sgemm_128x64_nn", 1640, 300, launch=1),
    rank=None,
)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "jobs.csv"
    path.write_text(TABLE)
    return path


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    return write(tmp_path / "rank0.json.gz", TRACE)


def test_json_of_a_job_table(table: Path) -> None:
    questions = ("--what-if", "ethernet=100Gb/s", "--what-if", "to=pearl")
    done = nostall("characterize", table, "--format", "json", *questions)
    assert done.code == 0, done.err
    result = done.json
    assert (result["kind"], result["jobs"], result["hardware"]) == ("modelled", 4, "pai-2018")
    all_jobs = result["groups"][0]
    assert sum(all_jobs["by_gpu"].values()) == pytest.approx(1)
    assert [g["jobs"] for g in result["groups"]] == [4, 1, 2, 1]
    assert sum(g["gpu_time"] for g in result["groups"][1:]) == pytest.approx(1)
    assert next(iter(result["ranking_by_gpu_time"])) == "ethernet"
    assert [p["target"] for p in result["ported_from_ps_worker"]] == [
        "allreduce-local",
        "allreduce-cluster",
        "pearl",
    ]
    jobs = {job["name"]: job for job in result["per_job"]}
    assert len(jobs) == 4
    assert jobs["d"]["seconds"]["weights"] == 0
    assert jobs["d"]["total"] == pytest.approx(sum(jobs["d"]["seconds"].values()))
    faster_ethernet, pearl = result["what_if"]
    assert 1 < faster_ethernet["mean_by_job"] < 4
    assert pearl["jobs"] == 3


def test_json_of_a_trace(profile: Path) -> None:
    args = ("--format", "json", "--hardware", "h200-dgx", "--what-if", "nvlink=x2")
    done = nostall("characterize", profile, *args)
    assert done.code == 0, done.err
    [rank] = done.json["ranks"]
    assert rank["kind"] == "measured"
    assert rank["seconds"] == pytest.approx(640e-6)
    assert rank["parts_seconds"]["idle_launch"] == pytest.approx(90e-6)
    assert rank["what_if"][0]["modelled_speedup"] == pytest.approx(640 / 590)
    product = next(k for k in rank["top_kernels"] if "nvjet" in k["name"])
    assert product["modelled_roofline"]["bound"] == "compute"
    assert product["modelled_roofline"]["reached"] == pytest.approx(2 * 4096**3 / 989e12 / 400e-6)
    remedies = [action["who"] for action in rank["fix_first"]]
    for remedy in ("nostall plan", "nostall tune", "torch.compile(model"):
        assert any(each.startswith(remedy) for each in remedies)
    assert done.json["remarks"] == ["no trace for 1 of 2 ranks (1)"]


def test_one_step_has_the_wait_for_its_data(tmp_path: Path) -> None:
    done = nostall("characterize", write(tmp_path / "t.json", ONE_STEP), "--format", "json")
    assert done.code == 0, done.err
    [rank] = done.json["ranks"]
    assert (rank["steps"], rank["seconds"]) == (1, pytest.approx(1000e-6))
    assert rank["parts_seconds"]["idle_input"] == pytest.approx(600e-6)
    assert sum(rank["parts_seconds"].values()) == pytest.approx(rank["seconds"])
    assert rank["fix_first"][0]["problem"] == "the GPU waits for input"
    assert done.json["remarks"] == []


def test_a_gap_that_occurs_once_is_named_and_has_no_bound(tmp_path: Path) -> None:
    events = [
        one
        for n in range(50)
        for one in (
            launch(101 * n + 1.3e6 * (n > 25), n),
            kernel("vectorized_elementwise_kernel", 101 * n + 10 + 1.3e6 * (n > 25), 100, launch=n),
        )
    ]
    slow = [launch(26 * 101 - 9, 999, 1.29e6), kernel("cudnn_fprop", 1.293e6, 10, launch=999)]
    path = write(tmp_path / "cold.json", trace(*events, *slow, rank=None))
    done = nostall("characterize", path, "--format", "json", "--report", tmp_path / "page.html")
    [rank] = done.json["ranks"]
    longest = rank["gaps_that_occur_once"][0]
    assert longest["host_call"] == "cudaLaunchKernel"
    assert longest["seconds"] > 0.9 * rank["seconds"]
    first = rank["fix_first"][0]
    assert first["problem"].startswith("gaps that occur once")
    assert first["modelled_gain_at_most"] is None
    assert "gaps that occur once" in (tmp_path / "page.html").read_text()
    table = nostall("characterize", path).out
    assert "no step is recorded, so the span is from the first to the last GPU event" in table


def test_an_export_of_nsight_systems(tmp_path: Path) -> None:
    export = Export()
    export.range("step 5", 1000, 1000)
    export.launch(1620, 1)
    export.kernel("ampere_sgemm_128x64_nn", 1640, 300, 1)
    export.write(tmp_path / "t.sqlite")
    for given in (tmp_path / "t.sqlite", tmp_path):
        done = nostall("characterize", given, "--format", "json")
        assert done.code == 0, done.err
        assert done.json["ranks"][0]["parts_seconds"]["compute"] == pytest.approx(300e-6)
    assert "needs traces of torch.profiler" in error_line(
        nostall("characterize", tmp_path / "t.sqlite", "--learn", "c", "--kind", "k")
    )


def test_two_files_have_two_labels_that_can_be_printed(tmp_path: Path) -> None:
    paths = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for name in (b"t.json", b"t\xff.json"):
            paths.append(write(tmp_path / folder / os.fsdecode(name), ONE_STEP))
    done = nostall("characterize", *paths, "--report", tmp_path / "page.html")
    assert done.code == 0, done.err
    page = (tmp_path / "page.html").read_text()
    for label in ("a/t.json, GPU 0", "b/t.json, GPU 0", r"a/t\xff.json, GPU 0"):
        assert f"<h2>{label} " in page
    assert "a/t.json" in done.out and "b/t.json" in done.out


def test_terminal_output(table: Path, profile: Path) -> None:
    done = nostall("characterize", table)
    assert "modelled shares of a step" in done.out
    assert "4 jobs, 0 skipped" in done.out
    done = nostall("characterize", profile.parent / "rank0.json.gz")
    assert "measured time of each GPU" in done.out
    assert "modelled gain" in done.out
    assert "1 trace, 0 skipped" in done.out


STEPS = """model,nodes,gpus,batch,seconds [ms],gradient_bytes [MB]
bert,1,4,8,100,438
bert,2,4,8,190,438
bert,4,4,8,240,438
resnet-with-a-rather-long-name,1,4,32,90,45
resnet-with-a-rather-long-name,2,4,32,110,45
resnet-with-a-rather-long-name,4,4,32,120,45
"""


@pytest.mark.parametrize(
    ("source", "tables"), [("table", 3), ("profile", 4), ("steps", 2), ("host", 2)]
)
def test_tables_fit_80_columns(
    source: str, tables: int, table: Path, profile: Path, tmp_path: Path
) -> None:
    """They are tables: no word of a cell is too long for its column."""
    (tmp_path / "steps.csv").write_text(STEPS)
    host = trace(event("cpu_op", "aten::" + "long_name_" * 9, 0, 9), launch(2, 1))
    inputs = {
        "table": (table, "--what-if", "memory=x2"),
        "profile": (profile, "--hardware", "h200-dgx"),
        "steps": (tmp_path / "steps.csv", "--what-if", "nodes=8"),
        "host": (write(tmp_path / "host.json", host),),
    }
    done = nostall("characterize", *inputs[source], COLUMNS="80")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    rules = [number for number, line in enumerate(lines) if line[:1] == "─"]
    assert len(rules) == tables
    assert max(len(lines[number]) for number in rules) <= 80


def test_bf16_jobs_are_modelled_on_hardware_that_has_bf16(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text("architecture,flops [T],precision\n1w1g,1,fp32\n1w1g,2,BFloat16\n")
    done = nostall("characterize", path)
    assert "hardware: a100-dgx, the oldest preset with the precisions of the jobs" in done.out
    assert "2 jobs, 0 skipped" in done.out
    chosen = nostall("characterize", path, "--hardware", "pai-2018", "--format", "json").json
    assert (chosen["jobs"], chosen["left_out"]) == (1, 1)


def test_json_of_a_step_table(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(STEPS)
    done = nostall("characterize", path, "--what-if", "nodes=8", "--format", "json")
    assert done.code == 0, done.err
    assert [row["nodes"] for row in done.json["slowdown"]] == [2, 4, 2, 4]
    assert done.json["slowdown"][0]["measured_slowdown"] == pytest.approx(1.9)
    answers = done.json["what_if"][0]["answers"]
    assert [a["model"][:4] for a in answers] == ["bert", "resn"]
    assert all(a["modelled_slowdown"] > 1 for a in answers)


def test_a_chakra_trace_beside_a_broken_file(tmp_path: Path) -> None:
    chakra = tmp_path / "t.et"
    chakra.write_bytes(stream(METADATA, *NODES))
    (tmp_path / "broken.json").write_text("{")
    done = nostall("characterize", chakra, tmp_path / "broken.json")
    assert done.code == 0, done.err
    assert "1 trace, 1 skipped" in done.out
    assert "broken.json" in done.err


class _Tags(HTMLParser):
    """Parser that records the elements of a page, and checks that they are closed."""

    void_elements = frozenset(("meta", "br"))

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)
        if tag not in self.void_elements:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("source_fixture", ["table", "profile"])
def test_the_page_is_complete_and_needs_no_network(
    source_fixture: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    source, page = request.getfixturevalue(source_fixture), tmp_path / "page.html"
    done = nostall("characterize", source, "--report", page)
    assert done.code == 0, done.err
    assert f"report: {page}" in done.out
    text = page.read_text()
    assert not re.search(r"https?://|<script|<b>c", text)
    tags = _Tags()
    tags.feed(text)
    assert tags.open == []
    # Without the three distributions, which are drawn from ten jobs on.
    assert tags.seen.count("svg") == 1
    # A bar for all jobs, each architecture and each job; a bar for the GPU.
    assert text.count('class="track"') == (8 if source_fixture == "table" else 1)
    assert "nan%" not in text
    lead = re.search(r'class="lead">([^<]*)<', text)
    assert lead is not None
    begin = r"\w+ bounds \d+%" if source_fixture == "table" else r"Fix first: .* of [\d.]+ ms"
    assert re.match(begin, lead[1])
    assert not re.search(r"\b1 (?:jobs|GPUs|kernels|collectives|steps)\b", text)
    assert "nan" not in re.findall(r'(?:d|points|x|y|width)="([^"]*)"', text)
    assert "modelled" in text


def test_the_page_of_a_host_has_its_operators(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", trace(event("cpu_op", "aten::<b>", 0, 9)))
    done = nostall("characterize", path, "--report", tmp_path / "page.html")
    assert done.code == 0, done.err
    text = (tmp_path / "page.html").read_text()
    assert "aten::&lt;b&gt;" in text
    tags = _Tags()
    tags.feed(text)
    assert tags.open == []


def test_the_traces_of_a_directory_are_read_and_bad_ones_are_counted(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path / f"rank{rank}.json", trace(kernel("k", 0, 9), rank=rank, world=2))
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(json.dumps(TRACE).encode())[:80])
    (tmp_path / "notes.txt").write_text("not a trace")
    done = nostall("characterize", tmp_path, "--processes", 2, "--format", "json")
    assert done.code == 0, done.err
    assert [r["rank"] for r in done.json["ranks"]] == [0, 1]
    assert done.json["left_out"] == 1
    assert "cut.json.gz" in done.json["reasons"][0]


def test_waiting_of_ranks_for_each_other(tmp_path: Path) -> None:
    """The first AllReduce waits 100 us for rank 1, the second waits 150 us for rank 0."""
    paths = []
    for rank, durations in enumerate([(130, 50), (30, 200)]):
        events = [
            kernel("ncclDevKernel_AllReduce", 1000 * i, duration, dtype="Float")
            for i, duration in enumerate(durations)
        ]
        path = tmp_path / f"rank{rank}.json"
        paths.append(write(path, trace(*events, rank=rank, world=2)))
    done = nostall("characterize", *paths, "--format", "json")
    assert done.code == 0, done.err
    summary = done.json["collectives"]
    assert (summary["kind"], summary["collectives"]) == ("measured", 2)
    assert summary["transfer_seconds"] == pytest.approx(80e-6)
    assert [r["rank"] for r in summary["ranks"]] == [0, 1]
    assert [r["collective_seconds"] for r in summary["ranks"]] == pytest.approx([180e-6, 230e-6])
    assert [r["waiting_seconds"] for r in summary["ranks"]] == pytest.approx([100e-6, 150e-6])
    page = tmp_path / "page.html"
    assert "waiting for other" in nostall("characterize", *paths, "--report", page).out
    assert "Waiting of ranks for each other" in page.read_text()


def test_ranks_with_other_collectives_give_a_note(tmp_path: Path) -> None:
    counts = (1, 2)
    paths = [
        write(
            tmp_path / f"rank{rank}.json",
            trace(*(kernel("ncclAllReduce", 100 * i, 9) for i in range(n)), rank=rank, world=2),
        )
        for rank, n in enumerate(counts)
    ]
    done = nostall("characterize", *paths, "--format", "json")
    assert done.code == 0, done.err
    assert "collectives" not in done.json
    assert "its 2 collectives are not the 1 of" in done.json["remarks"][0]


def test_an_unreadable_table_is_skipped_if_another_is_readable(table: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.csv"
    bad.write_text("architecture,flops [TB]\n1w1g,1\n")
    done = nostall("characterize", table, bad, "--format", "json")
    assert (done.code, done.json["jobs"], done.json["unreadable_files"]) == (0, 4, 1)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("absent.csv",), "absent.csv"),
        (("absent.json",), "absent.json"),
        (("absent.et",), "absent.et"),
        (("jobs.csv", "rank0.json.gz"), "in separate calls"),
        (("jobs.csv", "--hardware", "b300"), "pai-2018"),
        (("jobs.csv", "--what-if", "ethernet=100"), "25 Gb/s"),
        (("jobs.csv", "--what-if", "wifi=x2"), "not a valid question"),
        (("jobs.csv", "--what-if", "memory=x0"), "not a valid question"),
        (("jobs.csv", "--what-if", "to=ring"), "allreduce-local"),
        (("jobs.csv", "--what-if", "nodes=4"), "to=allreduce-cluster"),
        (("jobs.csv", "steps.csv"), "in separate calls"),
        (("steps.csv", "--report", "page.html"), "--format json"),
        (("x" * 300,), "x" * 300),
        (("rank0.json.gz", "--what-if", "to=pearl"), "job table"),
        (("rank0.json.gz", "--column", "flops=x"), "--column names columns of tables"),
        (("rank0.json.gz", "--what-if", "nvlink=900GB/s"), "--hardware"),
        (("empty",), "has no traces"),
    ],
)
def test_bad_input_is_rejected_in_one_line(
    table: Path, profile: Path, tmp_path: Path, args: tuple[str, ...], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "steps.csv").write_text(STEPS)
    assert message in error_line(nostall("characterize", *args, cwd=tmp_path))
