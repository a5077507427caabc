"""Recording files: packed bytes, damaged files, and the recordings of the examples."""

from __future__ import annotations

import base64
import gzip
import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nostall.core import BadInput, Comparison, LaunchSpec, Run
from nostall.tuning.assembler.recipes import recording as module
from nostall.tuning.assembler.recipes.recording import Recording, pack, record_run, unpack
from nostall.tuning.assembler.recipes.replay import Replay
from nostall.tuning.assembler.recipes.reverify import verify_recipe
from nostall.tuning.assembler.shortlist import launch_toml
from nostall.tuning.sources.source import load_cubin

EXAMPLES = Path(__file__).parents[5] / "examples"
RECORDINGS = sorted((EXAMPLES / "recordings").glob("*.json"))


@given(st.binary(max_size=2000))
def test_packed_bytes_come_back(data: bytes) -> None:
    assert unpack(pack(data)) == data


def test_damaged_or_huge_packed_bytes_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack(b"x" * 1000)
    for text in (packed[:-8], "not base64!", base64.b64encode(b"plain").decode(), ""):
        with pytest.raises(ValueError, match="packed bytes"):
            unpack(text)
    monkeypatch.setattr(module, "MAX_UNPACKED_BYTES", 1 << 16)
    bomb = base64.b64encode(gzip.compress(bytes(1 << 20))).decode()
    with pytest.raises(ValueError, match="more than 65536"):
        unpack(bomb)


def test_a_run_that_was_not_measured_cannot_be_recorded(tmp_path: Path) -> None:
    source = load_cubin(EXAMPLES / "nvcc" / "transpose.sm_90.cubin", launch=LaunchSpec())
    with (
        Run.create(tmp_path / "run", "nostall tune", {}) as run,
        pytest.raises(BadInput, match="only a run of --strategy assembler"),
    ):
        record_run(run, source)


@pytest.mark.parametrize("name", ["transpose", "dot_product"])
def test_a_launch_is_written_as_a_launch_file(name: str, tmp_path: Path) -> None:
    launch = LaunchSpec.from_toml(EXAMPLES / "nvcc" / f"{name}.toml")
    launch = launch.model_copy(update={"trips": {0: 8, 2: 1}, "flops": 1.5e9})
    path = tmp_path / "launch.toml"
    path.write_text(launch_toml(launch))
    assert LaunchSpec.from_toml(path) == launch


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_a_recording_of_an_example_is_of_its_file_and_is_safe(path: Path) -> None:
    recording = Recording.read(path)
    file = EXAMPLES / recording.origin.partition(":")[0]
    assert recording.source == hashlib.sha256(file.read_bytes()).hexdigest(), "record it again"
    assert recording.recipe is not None and recording.winner is not None
    verdict = verify_recipe(recording.recipe, recording.ptx_text, unpack(recording.winner))
    assert verdict.safe, verdict.objection
    assert recording.comparison is not None
    assert recording.comparison.compare(0).verdict == "faster"


@pytest.mark.parametrize(
    ("low", "high", "null_high", "improved"),
    [(1.2, 1.4, 1.01, True), (1.2, 1.4, 1.3, False), (0.9, 1.4, 1.01, False), (0.5, 0.6, 1, False)],
)
def test_a_replay_improves_only_beyond_the_noise(
    low: float, high: float, null_high: float, improved: bool
) -> None:
    comparison = Comparison((low + high) / 2, low, high, 0.99, null_high, "measured")
    replayed = Replay(Recording.read(RECORDINGS[0]), comparison, None, ())
    assert replayed.improved is improved
    assert replayed.ratio == (comparison.ratio if improved else 1.0)
