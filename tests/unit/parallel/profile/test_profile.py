"""Profiles: reading of files, bytes that cross a cut, and rejected input."""

from __future__ import annotations

from pathlib import Path

import pytest

from nostall.parallel.errors import BadProfile
from nostall.parallel.profile import Layer, Profile, Tensor, load_profile, parse_graph, save_profile

TIMES = (
    "forward_compute_time={f}, backward_compute_time={b}, activation_size={a}, parameter_size={p}"
)


def node(name: str, title: str, f: object, b: object, a: object, p: object) -> str:
    return f"{name} -- {title} -- {TIMES.format(f=f, b=b, a=a, p=p)}"


GRAPH = "\n".join(
    [
        node("node1", "Input0", 5.0, 0.0, 1000, 0),
        node("node2", "Conv2d(3, 64, kernel_size=(3, 3))", 1, 2, "[10; 2.5]", 100),
        node("node3", "mask", 0, 0, 7, 0),
        node("node4", "Linear", 3, 4, 30, 200),
        node("node5", "Add", 0.5, 0.5, 1, 0),
        " \tnode1 -- node2",
        "\tnode2 -- node4",
        "  node2 -- node5",
        "\tnode3 -- node5",
        "\tnode4 -- node5",
    ]
)


def test_graph_text_is_read() -> None:
    """Also inputs, lists of sizes, parentheses in names, and edges with any indentation."""
    profile = parse_graph(GRAPH, "graph", 4)
    assert [layer.name.split("(")[0] for layer in profile.layers] == [
        "Conv2d",
        "mask",
        "Linear",
        "Add",
    ]
    assert profile.batch == 4
    assert profile.layers[0].forward_s == pytest.approx(6e-3)  # with the input's 5 ms
    assert profile.layers[0].parameter_bytes == 100
    assert profile.layers[2].backward_s == pytest.approx(4e-3)


def test_tensors_are_charged_at_every_cut_they_cross() -> None:
    profile = parse_graph(GRAPH, "graph")
    # Conv2d's outputs (12.5) are needed until Add, the mask (7) and Linear's output (30), too.
    assert profile.cut_bytes.tolist() == [0, 12.5, 19.5, 49.5, 0]


def test_tensors_that_depend_on_no_parameter_have_no_gradient() -> None:
    profile = parse_graph(GRAPH, "graph")
    assert (profile.cut_bytes - profile.gradient_bytes).tolist() == [0, 0, 7, 7, 0]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("forward_compute_time=3,", "", "line 4: 'node4"),
        ("backward_compute_time=4,", "", "backward_compute_time is missing"),
        ("forward_compute_time=3,", "forward_compute_time=-3,", "forward_compute_time=-3"),
        ("forward_compute_time=3,", "forward_compute_time=nan,", "forward_compute_time=nan"),
        ("forward_compute_time=3,", "forward_compute_time=1e300,", "numbers from 0 to .e.18"),
        ("forward_compute_time=3,", "forward_compute_time=x,", "is not a number"),
        ("\tnode4 -- node5", "\tnode4 -- node2", "cycle"),
        ("\tnode4 -- node5", "\tnode4 -- node9", "node9, which has no line"),
        ("node3 -- mask", "node2 -- mask", "is defined twice"),
        ("\tnode4 -- node5", "some words", "neither a node"),
    ],
)
def test_invalid_text_is_rejected(old: str, new: str, message: str) -> None:
    assert old in GRAPH
    with pytest.raises(BadProfile, match=message):
        parse_graph(GRAPH.replace(old, new), "graph")


def test_invalid_profiles_are_rejected() -> None:
    with pytest.raises(BadProfile, match="no node besides inputs"):
        parse_graph(node("node1", "Input", 1, 1, 1, 0), "graph")
    with pytest.raises(BadProfile, match="no layer that takes time"):
        Profile("still", (Layer("a", 0.0, 0.0),), ())
    with pytest.raises(BadProfile, match="no layers"):
        Profile("none", (), ())
    with pytest.raises(BadProfile, match="from layer 1 to layer 0"):
        Profile("back", (Layer("a", 1.0, 1.0),) * 2, (Tensor(1, 0, 1.0),))
    with pytest.raises(BadProfile, match="weight_gradient_s"):
        Layer("a", 1.0, 1.0, weight_gradient_s=2.0)


def test_a_saved_profile_is_loaded_unchanged(tmp_path: Path) -> None:
    layers = (Layer("a", 0.1, 0.2, 3.0, 4.0, 0.05), Layer("b", 0.3, 0.4))
    profile = Profile("mine", layers, (Tensor(0, 1, 8.0, False),), 16)
    save_profile(profile, tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == profile
    assert not profile.memory_measured


def test_the_text_of_a_saved_profile(tmp_path: Path) -> None:
    profile = Profile("mine", (Layer("a", 1, 2, 3), Layer("b", 0.5, 1)), (Tensor(0, 1, 8),), 16)
    save_profile(profile, tmp_path / "p.json")
    assert (
        (tmp_path / "p.json").read_text()
        == """{
 "nostall_profile": 1,
 "name": "mine",
 "batch": 16,
 "layers": [
  {
   "name": "a",
   "forward_s": 1.0,
   "backward_s": 2.0,
   "parameter_bytes": 3.0,
   "stored_bytes": null,
   "weight_gradient_s": null
  },
  {
   "name": "b",
   "forward_s": 0.5,
   "backward_s": 1.0,
   "parameter_bytes": 0.0,
   "stored_bytes": null,
   "weight_gradient_s": null
  }
 ],
 "tensors": [
  {
   "producer": 0,
   "last_consumer": 1,
   "bytes": 8.0,
   "gradient": true
  }
 ],
 "passes": null,
 "spread": null
}
"""
    )


def test_the_batch_size_is_read_from_the_file_name(tmp_path: Path) -> None:
    path = tmp_path / "model-pbs-32.txt"
    path.write_text(GRAPH)
    assert load_profile(path).batch == 32
    without_batch = tmp_path / "model.txt"
    without_batch.write_text(GRAPH)
    assert load_profile(without_batch).batch is None


@pytest.mark.parametrize("text", ['{"nostall_profile": 1}', "{", '{"nostall_profile": 2}'])
def test_invalid_json_is_rejected(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(BadProfile, match="nostall_profile"):
        load_profile(path)
