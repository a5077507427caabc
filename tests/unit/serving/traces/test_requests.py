"""Readers of request traces: slices of public traces, and files that are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from nostall.core.errors import BadTrace
from nostall.serving.traces import HASH_BLOCK, load_requests

CORPUS = Path(__file__).resolve().parents[3] / "corpus" / "serving"


def test_azure_traces_have_lengths_and_times() -> None:
    requests = load_requests(CORPUS / "azure_code.csv")
    assert len(requests) == 60
    assert (requests[0].arrival_s, requests[0].prompt, requests[0].output) == (0.0, 4808, 10)
    assert requests[1].arrival_s == pytest.approx(0.052, abs=1e-6)
    assert len(load_requests(CORPUS / "azure_conversation.csv", limit=7)) == 7


BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "{0},ChatGPT,472,18,490,Conversation log\n{1},GPT-4,1087,0,1087,API log\n"
)
BURSTGPT_3 = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "{0},1722ac82,43,GPT-4,472,18,490,Conversation log\n{1},d59,2,ChatGPT,1087,0,1087,API log\n"
)


@pytest.mark.parametrize("text", [BURSTGPT, BURSTGPT_3])
def test_burstgpt_traces_of_both_layouts_are_read(text: str, tmp_path: Path) -> None:
    file = tmp_path / "BurstGPT_1.csv"
    file.write_text(text.format("19440110.0", "19440150.5"))
    first, second = load_requests(file)
    assert (first.arrival_s, first.prompt, first.output) == (0.0, 472, 18)
    assert (second.arrival_s, second.prompt, second.output) == (40.5, 1087, 1)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("2024-05-10 00:00:00.009930+00:00", "2024-05-10 00:00:01.509930+00:00"),
        ("2024-05-10 00:00:00+00:00", "2024-05-10 02:00:01.5+02:00"),
        ("2023-11-16 18:17:03.9799600", "2023-11-16 18:17:05.4799600"),
        ("2024-05-10T00:00:00Z", "2024-05-10T00:00:01.500Z"),
    ],
)
def test_azure_times_of_both_years(first: str, second: str, tmp_path: Path) -> None:
    file = tmp_path / "AzureLLMInferenceTrace_conv_1week.csv"
    file.write_text(f"{HEAD}{first},374,44\n{second},396,109\n")
    assert [r.arrival_s for r in load_requests(file)] == pytest.approx([0, 1.5], abs=1e-6)


def test_compressed_files_and_pointers_are_named(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv.gz"
    file.write_bytes(b"\x1f\x8b\x08")
    with pytest.raises(BadTrace, match="gunzip -k"):
        load_requests(file)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 9\n"
    file.write_text(pointer)
    with pytest.raises(BadTrace, match="git lfs pull"):
        load_requests(file)


def test_mooncake_traces_have_prefix_hashes() -> None:
    requests = load_requests(CORPUS / "mooncake.jsonl")
    assert len(requests) == 40
    assert all(len(r.hashes) == -(-r.prompt // HASH_BLOCK) for r in requests)
    assert requests[0].hashes[0] == requests[1].hashes[0]


def test_requests_are_sorted_and_begin_at_zero(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    rows = ("2023-11-16 23:59:59.5000000,7,0", "2023-11-16 23:59:58.25,5,3")
    file.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    requests = load_requests(file)
    assert [r.arrival_s for r in requests] == [0.0, pytest.approx(1.25)]
    assert [(r.prompt, r.output) for r in requests] == [(5, 3), (7, 1)]
    [first] = load_requests(file, limit=1)
    assert (first.arrival_s, first.prompt) == (0.0, 5)


def test_lines_without_a_time_are_refused_and_empty_lines_are_skipped(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    line = '{"timestamp": %s, "input_length": 600, "output_length": 5}\n'
    file.write_text(line % 7 + "\n" + line % 9 + "\n")
    assert [r.arrival_s for r in load_requests(file)] == [0.0, pytest.approx(2e-3)]
    file.write_text(line % "NaN")
    with pytest.raises(BadTrace, match="line 1: timestamp: Input should be a finite number"):
        load_requests(file)


@pytest.mark.parametrize("before", [b"\xef\xbb\xbf", b"\n", b"  "])
def test_json_lines_may_begin_with_a_mark_or_spaces(before: bytes, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(before + b'{"timestamp": 7, "input_length": 600, "output_length": 5}\n')
    assert [r.prompt for r in load_requests(file)] == [600]


def test_a_limit_reads_no_more_lines_than_it_needs(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    line = '{"timestamp": %s, "input_length": 600, "output_length": 5}\n'
    file.write_text(line % 7 + line % 9 + '{"timest')
    assert len(load_requests(file, limit=2)) == 2
    with pytest.raises(BadTrace, match="line 3"):
        load_requests(file, limit=3)
    file.write_text(line % 7 + line % 9 + line % 8 + line % 6)
    assert [r.arrival_s for r in load_requests(file, limit=2)] == [0.0, pytest.approx(1e-3)]
    file.write_text(line % 9 + line % 7 + '{"timest\n' + line % 6)
    with pytest.raises(BadTrace, match="line 3"):  # requests behind it may be earlier
        load_requests(file, limit=2)


HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Request tokens,Response tokens\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "begins with the columns None; allowed are TIMESTAMP"),
        ("a,b\n1,2\n", "begins with the columns"),
        (HEAD.replace(",", ";"), "the cells are separated by ';': separate them by commas"),
        ("x" * 200_000, "line 1: field larger than field limit"),
        (HEAD, "has no request"),
        (HEAD + "yesterday,1,2\n", "line 2: .*is no request"),
        (HEAD + "2023-11-16 18:17:03,x,2\n", "line 2: .*is no request"),
        (HEAD + "2023-11-16 18:17:03,1\n", "line 2: .*is no request"),
        (HEAD + "2023-11-16 18:17:03,0,2\n", "line 2: 0 prompt and 2 generated tokens"),
        (HEAD + "20231116,7,3\n", "line 2: .*is no request"),
        (HEAD + "2023-11-16,7,3\n", "line 2: .*is no request"),
        (HEAD + "2023-11-16 18:17:03,99999999999,2\n", "up to 16,777,216"),
        (HEAD + '"' + "a" * 200_000 + '",7,3\n', "line 2: field larger than field limit"),
        (BURST + "1700000000000,7,3\n", "line 2: .*allowed are a time in seconds"),
        ('[{"timestamp": 0}]', "is one JSON array"),
        ('{"timestamp": 1e17, "input_length": 7, "output_length": 1}', "line 1: timestamp: "),
        ('{"timestamp": 0}\n', "line 1: input_length: Field required"),
        (
            '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}\n',
            "line 1: 600 prompt tokens and 1 hashes",
        ),
    ],
)
def test_other_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(BadTrace, match=message):
        load_requests(file)
