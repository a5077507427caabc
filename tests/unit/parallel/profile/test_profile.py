"""Profiles: reading, what crosses a cut, and what is refused."""

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


def test_graph_text_is_read_with_its_traps() -> None:
    found = parse_graph(GRAPH, "graph", 4)
    assert [layer.name.split("(")[0] for layer in found.layers] == [
        "Conv2d",
        "mask",
        "Linear",
        "Add",
    ]
    assert found.batch == 4
    assert found.layers[0].forward_s == pytest.approx(6e-3)  # with the input's 5 ms
    assert found.layers[0].parameter_bytes == 100
    assert found.layers[2].backward_s == pytest.approx(4e-3)


def test_every_crossing_tensor_is_charged_at_every_cut() -> None:
    found = parse_graph(GRAPH, "graph")
    # Conv2d's outputs skip to Add; the mask joins; Linear's output is last.
    assert found.cut_bytes.tolist() == [0, 12.5, 19.5, 49.5, 0]


def test_no_gradient_comes_back_for_what_depends_on_no_parameter() -> None:
    found = parse_graph(GRAPH, "graph")
    assert (found.cut_bytes - found.gradient_bytes).tolist() == [0, 0, 7, 7, 0]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("forward_compute_time=3,", "", "line 4: 'node4"),
        ("backward_compute_time=4,", "", "backward_compute_time is missing"),
        ("forward_compute_time=3,", "forward_compute_time=-3,", "forward_compute_time=-3"),
        ("forward_compute_time=3,", "forward_compute_time=nan,", "forward_compute_time=nan"),
        ("forward_compute_time=3,", "forward_compute_time=x,", "is not a number"),
        ("\tnode4 -- node5", "\tnode4 -- node2", "cycle"),
        ("\tnode4 -- node5", "\tnode4 -- node9", "node9, which has no line"),
        ("node3 -- mask", "node2 -- mask", "is there twice"),
        ("\tnode4 -- node5", "some words", "neither a node"),
    ],
)
def test_bad_text_is_refused_by_name(old: str, new: str, said: str) -> None:
    assert old in GRAPH
    with pytest.raises(BadProfile, match=said):
        parse_graph(GRAPH.replace(old, new), "graph")


def test_profiles_without_layers_or_time_are_refused() -> None:
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


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    layers = (Layer("a", 0.1, 0.2, 3.0, 4.0, 0.05), Layer("b", 0.3, 0.4))
    profile = Profile("mine", layers, (Tensor(0, 1, 8.0, False),), 16)
    save_profile(profile, tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == profile
    assert not profile.memory_measured


def test_the_batch_is_taken_from_the_file_name(tmp_path: Path) -> None:
    path = tmp_path / "model-pbs-32.txt"
    path.write_text(GRAPH)
    assert load_profile(path).batch == 32
    other = tmp_path / "model.txt"
    other.write_text(GRAPH)
    assert load_profile(other).batch is None


@pytest.mark.parametrize("text", ['{"nostall_profile": 1}', "{", '{"nostall_profile": 2}'])
def test_bad_json_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(BadProfile, match="nostall_profile"):
        load_profile(path)
