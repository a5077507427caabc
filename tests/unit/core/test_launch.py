"""Launch files: valid ones, and errors that name the field."""

import pytest

from nostall.core import BadLaunch, Buffer, Constant, LaunchSpec, Scalar, Tolerance

GOOD = """
grid = [4, 2, 1]
block = [64, 2, 1]
shared = 1024
flops = 1e9
[[args]]
name = "x"
dtype = "f16"
shape = [8, 16]
[[args]]
name = "index"
dtype = "i32"
shape = [8]
bound = 8
[[args]]
name = "n"
dtype = "i32"
value = 16
[[args]]
name = "BLOCK"
constant = 64
[trips]
0 = 12
"""


def read_spec(tmp_path, text):
    path = tmp_path / "spec.toml"
    path.write_text(text)
    return LaunchSpec.from_toml(path)


def test_a_complete_file(tmp_path):
    spec = read_spec(tmp_path, GOOD)
    assert (spec.blocks, spec.threads, spec.flops) == (8, 128, 1e9)
    assert [type(arg) for arg in spec.args] == [Buffer, Buffer, Scalar, Constant]
    assert spec.args[1].bound == 8
    assert spec.trips == {0: 12}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grid = [1, 1", "not TOML"),
        ("gird = [1, 1, 1]", "gird"),
        ("grid = [0, 1, 1]", "grid is"),
        ("block = [2048, 1, 1]", "2048 threads"),
        ("shared = -1", "shared"),
        ("shared = 300000", "shared"),
        ("flops = 0", "flops"),
        ("num_warps = 64", "num_warps"),
        ('[[args]]\nname = "x"\ndtype = "f99"\nshape = [4]', "args"),
        ('[[args]]\nname = "x"\ndtype = "f32"\nshape = [0]', "'x' has shape"),
        ('[[args]]\nname = "x"\ndtype = "f32"\nshape = []', "'x' has shape"),
        ('[[args]]\nname = "i"\ndtype = "i32"\nshape = [4]', "has no bound"),
    ],
)
def test_invalid_files_name_the_field(tmp_path, text, message):
    with pytest.raises(BadLaunch) as caught:
        read_spec(tmp_path, text)
    assert message in str(caught.value)
    assert "spec.toml" in str(caught.value)


def test_unreadable_files(tmp_path):
    with pytest.raises(BadLaunch, match="cannot read"):
        LaunchSpec.from_toml(tmp_path / "none.toml")
    path = tmp_path / "spec.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadLaunch, match="not TOML"):
        LaunchSpec.from_toml(path)


def test_integer_outputs_need_no_bound():
    assert Buffer(name="o", dtype="i32", shape=(4,), role="out").bound is None


SHAPES = """
[[shapes]]
grid = [2, 1, 1]
values = { n = 8 }
buffers = { x = [4, 16] }
"""


def test_launch_variants(tmp_path):
    spec = read_spec(tmp_path, GOOD + SHAPES)
    changed = spec.with_variant(spec.shapes[0])
    assert (changed.grid, changed.block, changed.shapes) == ((2, 1, 1), spec.block, ())
    assert [getattr(a, "shape", None) or getattr(a, "value", None) for a in changed.args] == [
        (4, 16),
        (8,),
        8,
        None,
    ]
    assert LaunchSpec.model_validate(spec.model_dump(mode="json")) == spec


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("values = { m = 8 }", "shapes name 'm', which is not among the scalars of this launch: n"),
        (
            "buffers = { n = [8] }",
            "shapes name 'n', which is not among the buffers of this launch: index, x",
        ),
        ("buffers = { x = [0] }", "'x' has shape"),
        ("grid = [0, 1, 1]", "grid is"),
        ("block = [1, 1, 1]", "block"),
    ],
)
def test_invalid_launch_variants(tmp_path, shape, message):
    with pytest.raises(BadLaunch, match=message):
        read_spec(tmp_path, GOOD + "[[shapes]]\n" + shape)


@pytest.mark.parametrize(
    ("text", "rtol", "atol"), [("1e-3", 1e-3, 0.0), ("0,1e-6", 0.0, 1e-6), ("0.5, 2", 0.5, 2.0)]
)
def test_parse_tolerance(text, rtol, atol):
    assert Tolerance.parse(text) == Tolerance(rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "gird = [1, 1, 1]",
            "gird is an unknown key; allowed are grid, block, cluster, shared, args, num_warps, "
            "num_stages, flops, trips, shapes; did you mean 'grid'?",
        ),
        ("grid = [1, 1]", "grid has 2 entries; more are needed"),
        ("grid = [1, 1, 1, 1]", "grid has 4 entries; allowed are 3"),
        ("grid = 5", "grid is 5; allowed is a list in square brackets"),
        ('grid = ["a", 1, 1]', "grid.0 is 'a'; allowed is a whole number"),
        ("grid = [1.5, 1, 1]", "grid.0 is 1.5; allowed is a whole number"),
        ("args = 3", "args is 3; allowed is a list in square brackets"),
        ("args = [3]", "args.0 is 3; allowed is a table"),
        (
            '[[args]]\nname = "x"\ndtype = "float32"\nshape = [4]',
            "args.0.dtype is 'float32'; allowed are f16, bf16, f32, f64, i8, i16, i32, i64, u8, "
            "u32, u64, f8e4m3, f8e5m2; did you mean 'f32'?",
        ),
        ('[[args]]\nname = "x"\ndtype = "f32"', "args.0.shape is missing"),
        ('[[args]]\nname = "n"\nvalue = 3', "args.0.dtype is missing"),
        (
            '[[args]]\nname = "n"\ndtype = "i32"\nvalue = "many"',
            "args.0.value is 'many'; allowed is a number",
        ),
        (
            '[[args]]\nname = "x"\ndtype = "f32"\nshape = [4]\nrolle = "out"',
            "args.0.rolle is an unknown key; allowed are name, dtype, shape, role, low, high, "
            "bound; did you mean 'role'?",
        ),
        (
            '[[args]]\nname = "x"\ndtype = "f32"\nshape = [4]\nrole = "output"',
            "args.0.role is 'output'; allowed are in, out, inout, scratch; did you mean 'out'?",
        ),
        ("[[shapes]]\nvalue = { n = 1 }", "shapes.0.value is an unknown key; allowed are grid, "),
        ("shared = -1", "shared is -1: input should be greater than or equal to 0"),
        ("block = [2048, 1, 1]", "block (2048, 1, 1) has 2048 threads; at most 1024"),
        ('"\\u001b[2J" = 1', r"\x1b[2J is an unknown key"),
    ],
)
def test_messages_are_in_the_words_of_the_file(tmp_path, text, message):
    with pytest.raises(BadLaunch) as caught:
        read_spec(tmp_path, text)
    said = str(caught.value).partition("spec.toml: ")[2]
    assert said.startswith(message)
    assert str(caught.value).isprintable()
    for term in ("Buffer", "Scalar", "Value error", "Field required", "pydantic", "<buffer>"):
        assert term not in said


def test_a_path_may_be_text(tmp_path):
    (tmp_path / "spec.toml").write_text("grid = [2, 1, 1]")
    assert LaunchSpec.from_toml(str(tmp_path / "spec.toml")).grid == (2, 1, 1)


def test_a_missing_file_names_the_command_that_writes_one(tmp_path):
    with pytest.raises(BadLaunch, match="`nostall init` writes one"):
        LaunchSpec.from_toml(tmp_path / "nope.toml")
