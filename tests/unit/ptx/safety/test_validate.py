"""The validator's entry points: structure, names, braces, and what may differ."""

from __future__ import annotations

import pickle
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from nostall.core.errors import BadInput
from nostall.ptx.safety.validate import MAX_FINDINGS, Validator, validate
from tests.corpus.ptx_catalogue import ptx_texts
from tests.unit.ptx.safety.texts import compare, kernel, kinds

_ADDS = "add.s32 %r1, %r2, %r3;\nadd.s32 %r4, %r5, %r6;\n"


def test_a_text_equals_itself() -> None:
    text = ptx_texts()["nvcc-hopper.sm_90a"]
    verdict = Validator(text).check(text)
    assert verdict.accepted and not verdict.differences
    assert verdict.checked > 300


def test_unknown_opcodes_are_counted() -> None:
    body = "new.thing %r1;\n{ new.thing %r2; }\nmul.async.b32 %r1, %r2, %r3;\ncall.uni f, (p);"
    text = kernel(f".param .b32 p;\n{body}", ".extern .func f(.param .b32 x);")
    assert Validator(text).unknown_opcodes == Counter({"new.thing": 2, "mul.async.b32": 1})


def test_a_verdict_tells_what_is_wrong_and_where() -> None:
    original = kernel("mov.b32 %r1, 1;\nadd.s32 %r2, %r1, 1;")
    candidate = kernel("add.s32 %r2, %r1, 1;\nmov.b32 %r1, 1;")
    (finding,) = validate(original, candidate).findings
    line = candidate.split("\n").index("add.s32 %r2, %r1, 1;") + 1
    assert (finding.kind, finding.function, finding.line) == ("operand-value", "k", line)
    assert finding.text == "add.s32 %r2, %r1, 1;"
    assert "%r1" in finding.reason
    assert str(finding).startswith(f"operand-value (k, line {line})")
    assert finding.as_record()["line"] == line


_TWO_BLOCKS = "add.s32 %r1, %r2, %r3;\nret;\nL:\nst.global.b32 [%rd1], %r1;\nbra L;"


@pytest.mark.parametrize(
    "end",
    [
        "add.s32 %r1, %r1, 1;\nret;",
        "M:\nst.global.b32 [%rd2], %r1;",
        '.pragma "new thing";\n',
        '.pragma "new thing";\nst.global.b32 [%rd2], %r1;\n',
    ],
)
def test_code_behind_the_last_block_is_found(end: str) -> None:
    """All blocks of the original are there, unchanged, and others follow them."""
    text = kernel(_TWO_BLOCKS)
    assert text.endswith("\tret;\n}\n")
    longer = f"{text[:-2]}{end}\n}}\n"
    for original, candidate in ((text, longer), (longer, text)):
        verdict = validate(original, candidate)
        assert not verdict.accepted, (original, candidate)
    assert validate(longer, longer).accepted


def test_findings_are_limited() -> None:
    loops = [f"L{n}:\nadd.s32 %r{n}, %r1, {n};\n@%p1 bra L{n};" for n in range(2, 40)]
    changed = [text.replace("%r1,", "%r0,") for text in loops]
    assert len(compare("\n".join(loops), "\n".join(changed)).findings) == MAX_FINDINGS


@pytest.mark.parametrize(
    "body",
    [
        "add.s32 %r1, %r2, %r99;",
        "add.s32 %r1, %tid.x, %unknown;",
        "bra nowhere;",
        "add.s32 %r1, %r2",
        "add.s32 %r1 %r2, %r3;",
        "?;",
        "{ mov.b32 %r1, 1;",
        '.pragma "used_bytes_mask 0xf";\nlabel:\nld.b32 %r1, [%rd1];',
    ],
)
def test_an_original_that_cannot_be_read_is_an_error(body: str) -> None:
    with pytest.raises(BadInput, match=r"line \d+ of the original PTX"):
        Validator(kernel(body))


def test_a_candidate_that_cannot_be_read_is_refused() -> None:
    for body in (
        "add.s32 %r1, %r2, %r99;",
        "add.s32 %r1, %r2",
        "}",
        "/* comment",
        "{" * 2000 + "}" * 2000,
        f"mov.b32 %r{'1' * 5000}, 1;",
        f".reg .b32 %x<{'1' * 5000}>;",
        "(" * 5000 + ";",
    ):
        verdict = compare(_ADDS, body)
        assert kinds(verdict) == {"unreadable"}
        assert verdict.findings[0].line > 1
    assert not validate(kernel(_ADDS), "").accepted


def test_damaged_candidates_never_raise_and_are_accepted_only_if_they_mean_the_same() -> None:
    text = ptx_texts()["lock_and_add.sm_90"]
    validator, rng = Validator(text), random.Random(0)
    accepted = 0
    for _ in range(400):
        at, length = rng.randrange(len(text)), rng.randrange(3)
        inserted = rng.choice(("", " ", ";", "{", "}", ":", '"', "/*", "//", "0", "%", ",", "@"))
        candidate = text[:at] + inserted + text[at + length :]
        verdict = validator.check(candidate)
        if verdict.accepted and not verdict.differences:
            accepted += 1
            code = [re.sub(r"//.*|/\*|\s", "", t) for t in (text, candidate)]
            assert code[0] == code[1].replace("%r0", "%r"), (at, inserted)
    assert 0 < accepted < 200


@pytest.mark.parametrize("wrong", [Path("kernel.ptx"), b"text", None])
def test_arguments_must_be_texts(wrong: object) -> None:
    with pytest.raises(BadInput, match="pass the PTX text itself"):
        validate(wrong, kernel(_ADDS))  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=type(wrong).__name__):
        validate(kernel(_ADDS), wrong)  # type: ignore[arg-type]


def test_a_validator_can_be_sent_to_another_process() -> None:
    text = ptx_texts()["fused_attention.sm_90"]
    copy = pickle.loads(pickle.dumps(Validator(text)))
    assert copy.check(text).accepted
    assert not copy.check(text.replace("ex2.approx", "lg2.approx", 1)).accepted


def test_checks_do_not_influence_each_other() -> None:
    validator = Validator(kernel(_ADDS))
    swapped = kernel("add.s32 %r4, %r5, %r6;\nadd.s32 %r1, %r2, %r3;")
    wrong = kernel("add.s32 %r1, %r2, %r4;\nadd.s32 %r4, %r5, %r6;")
    results = [validator.check(c).accepted for c in (wrong, swapped, wrong, kernel(_ADDS))]
    assert results == [False, True, False, True]


# Names and braces


def test_a_declaration_hides_an_outer_name_from_its_place_on() -> None:
    inside = "{{\n{}.reg .b32 %r1;\n{}mov.b32 %r1, 7;\nst.global.b32 [%rd1], %r1;\n}}"
    original = inside.format("add.s32 %r2, %r1, 1;\n", "")
    candidate = inside.format("", "add.s32 %r2, %r1, 1;\n")
    assert compare(original, original).accepted
    assert not compare(original, candidate).accepted


def test_equal_names_of_two_braces_are_two_registers() -> None:
    first = "{ .reg .b32 tmp; mov.b32 tmp, %r1; add.s32 %r2, tmp, 1; }"
    second = "{ .reg .b32 tmp; mov.b32 tmp, %r3; add.s32 %r4, tmp, 1; }"
    assert compare(f"{first}\n{second}", f"{second}\n{first}").accepted
    crossed = second.replace("%r3", "%r1").replace("%r4", "%r2")
    assert not compare(f"{first}\n{second}", f"{first}\n{crossed}").accepted


def test_names_without_percent_and_without_a_space_are_registers() -> None:
    braces = "{{.reg.b16 hl, hu; .reg.b32 fl; {}{} mov.b32 %r2, fl;}}"
    split, convert = "mov.b32 {hl, hu}, %r1;", "cvt.f32.f16 fl, hl;"
    original = braces.format(split, convert)
    assert compare(original, original).accepted
    assert not compare(original, braces.format(convert, split)).accepted


def test_braces_are_one_instruction_that_others_may_pass() -> None:
    braces = "{ .reg .b32 t; mul.lo.s32 t, %r1, %r2; add.s32 %r3, t, 1; }"
    assert compare(f"{braces}\nadd.s32 %r5, %r6, 1;", f"add.s32 %r5, %r6, 1;\n{braces}").accepted
    assert not compare(
        f"{braces}\nadd.s32 %r5, %r3, 1;", f"add.s32 %r5, %r3, 1;\n{braces}"
    ).accepted
    assert not compare(f"{braces}\nmov.b32 %r1, 1;", f"mov.b32 %r1, 1;\n{braces}").accepted
    assert not compare(f"{braces}\nmov.b32 %r3, 1;", f"mov.b32 %r3, 1;\n{braces}").accepted


def test_the_order_inside_braces_may_change_where_it_is_free() -> None:
    braces = (
        "{{ .reg .b32 t, u; mov.b32 t, %r1; {} st.global.b32 [%rd1], t; st.global.b32 [%rd2], u; }}"
    )
    a, b = "mov.b32 u, %r2;", "add.s32 t, t, 1;"
    assert compare(braces.format(a + b), braces.format(b + a)).accepted
    stores = "st.global.b32 [%rd1], t; st.global.b32 [%rd2], u;"
    crossed = "st.global.b32 [%rd2], u; st.global.b32 [%rd1], t;"
    original = braces.format(a + b)
    assert not compare(original, original.replace(stores, crossed)).accepted
    assert not compare(
        original, original.replace("mov.b32 t, %r1;", "").replace(b, b + "mov.b32 t, %r1;")
    ).accepted


_WAIT = """{
	.reg .pred complete;
	waitLoop:
	mbarrier.try_wait.parity.shared::cta.b64 complete, [%r1], %r2;
	@!complete bra.uni waitLoop;
}"""


def test_a_wait_loop_in_braces_is_passed_by_arithmetic_only() -> None:
    assert compare(f"{_WAIT}\nadd.s32 %r5, %r6, 1;", f"add.s32 %r5, %r6, 1;\n{_WAIT}").accepted
    for other in (
        "ld.shared.b32 %r5, [%r6];",
        "st.global.b32 [%rd1], %r6;",
        "mov.b32 %r2, 1;",
        "shfl.sync.bfly.b32 %r5, %r6, 1, 31, -1;",
        "movmatrix.sync.aligned.m8n8.trans.b16 %r5, %r6;",
        "bar.warp.sync -1;",
        _WAIT.replace("%r1", "%r8"),
    ):
        assert not compare(f"{_WAIT}\n{other}", f"{other}\n{_WAIT}").accepted, other


def test_a_branch_out_of_braces_ends_a_block() -> None:
    braces = "{{ .reg .pred q; setp.lt.s32 q, %r1, %r2; @q bra out; {} }}\n{}\nout:"
    add = "add.s32 %r3, %r3, 1;"
    assert compare(braces.format(add, ""), braces.format("", add)).accepted
    moved = "{ .reg .pred q; add.s32 %r3, %r3, 1; setp.lt.s32 q, %r1, %r2; @q bra out; }\nout:"
    assert not compare(braces.format(add, ""), moved).accepted


# Blocks


def test_a_label_that_nothing_names_is_no_border() -> None:
    body = "{}$L__tmp3:\n\t.loc 1 3 4\n{}"
    one, two = "mov.b32 %r1, 1;\n", "mov.b32 %r2, 2;\n"
    assert compare(body.format(one, two), body.format(two, one)).accepted
    assert compare(body.format(one + two, ""), body.format("", two + one)).accepted
    target = body + "@%p1 bra $L__tmp3;"
    assert not compare(target.format(one, two), target.format(two, one)).accepted


def test_tables_of_targets_count() -> None:
    table = "ts: .branchtargets A, B;\nbrx.idx %r1, ts;\nA:\nmov.b32 %r2, 1;\nB:\nmov.b32 %r3, 2;"
    assert compare(table, table).accepted
    assert not compare(table, table.replace("A, B", "B, A")).accepted
    moved = table.replace("A:\nmov.b32 %r2, 1;\nB:\n", "A:\nB:\nmov.b32 %r2, 1;\n")
    assert not compare(table, moved).accepted


def test_a_prototype_label_is_no_border() -> None:
    call = "{}prototype_0 : .callprototype (.param .b32 _) _ (.param .b32 _);\n{}"
    one, two = "mov.b32 %r1, 1;\n", "mov.b32 %r2, 2;\n"
    assert compare(call.format(one, two), call.format(two, one)).accepted


def test_debugging_directives_keep_their_order_but_hold_nothing() -> None:
    body = "{}.loc 1 3 4\n{}.loc 2 5 6, function_name $L__info, inlined_at 1 3 4\n"
    one, two = "mov.b32 %r1, 1;\n", "mov.b32 %r2, 2;\n"
    assert compare(body.format(one, two), body.format(two, one)).accepted
    changed = body.format(one, two).replace(".loc 1 3 4\n", ".loc 1 9 9\n")
    assert "layout" in kinds(compare(body.format(one, two), changed))


def test_a_pragma_moves_with_its_load() -> None:
    load = '.pragma "used_bytes_mask 0xfff";\nld.shared.v4.b32 {%r1,%r2,%r3,%r4}, [%r5];\n'
    other = "add.s32 %r7, %r8, 1;\n"
    assert compare(load + other, other + load).accepted
    apart = load.replace("ld.", other + "ld.")
    assert not compare(load + other, apart).accepted
    assert not compare(load, load.replace("0xfff", "0xff")).accepted


def test_a_directive_that_is_not_known_is_a_border() -> None:
    body = '{}.pragma "new thing";\n{}'
    one, two = "mov.b32 %r1, 1;\n", "mov.b32 %r2, 2;\n"
    assert not compare(body.format(one, two), body.format(two, one)).accepted
    known = body.replace("new thing", "nounroll")
    assert compare(known.format(one, two), known.format(two, one)).accepted


def test_a_change_in_a_device_function_is_found() -> None:
    function = ".func (.param .b32 r) f(.param .b32 x)\n{{\n.reg .b32 %r<4>;\n{}ret;\n}}"
    loads = "ld.param.b32 %r1, [x];\nadd.s32 %r2, %r1, 1;\nst.param.b32 [r], %r2;\n"
    swapped = "add.s32 %r2, %r1, 1;\nld.param.b32 %r1, [x];\nst.param.b32 [r], %r2;\n"
    original = kernel(_ADDS, function.format(loads))
    assert validate(original, original).accepted
    verdict = validate(original, kernel(_ADDS, function.format(swapped)))
    assert verdict.findings[0].function == "f"


# What may differ outside the order


def test_a_kernel_may_be_renamed() -> None:
    original = kernel("mov.u64 %rd1, k;") + ".global .u64 t[1] = {k};\n"
    renamed = original.replace("entry k(", "entry cutlass_k(").replace("{k}", "{cutlass_k}")
    assert not validate(original, renamed).accepted
    renamed = renamed.replace("%rd1, k;", "%rd1, cutlass_k;")
    verdict = validate(original, renamed)
    assert verdict.accepted
    assert verdict.differences == ("kernel k is named cutlass_k",)
    for name in ("buffer", "ret", "n"):
        assert not validate(original, original.replace("entry k(", f"entry {name}(")).accepted


def test_two_kernels_do_not_exchange_their_names() -> None:
    second = kernel("mov.b32 %r1, 2;").split("\n.visible", 1)[1].replace("entry k(", "entry l(")
    original = kernel("mov.b32 %r1, 1;") + "\n.visible" + second
    assert validate(original, original).accepted
    exchanged = original.replace("entry k(", "entry x(").replace("entry l(", "entry k(")
    assert not validate(original, exchanged.replace("entry x(", "entry l(")).accepted
    merged = original.replace("entry k(", "entry x(").replace("entry l(", "entry x(")
    assert not validate(original, merged).accepted


def test_a_device_function_keeps_its_name() -> None:
    function = ".func f()\n{\nret;\n}"
    assert not validate(kernel("", function), kernel("", function.replace("f()", "g()"))).accepted


def test_a_register_budget_may_differ() -> None:
    original, candidate = kernel(_ADDS), kernel(_ADDS, header=".reqntid 128\n.maxnreg 64")
    verdict = validate(original, candidate)
    assert verdict.accepted
    assert verdict.differences == ("kernel k has .maxnreg 64 instead of no .maxnreg",)
    assert validate(candidate, original).differences == (
        "kernel k has no .maxnreg instead of .maxnreg 64",
    )
    assert not validate(original, kernel(_ADDS, header=".reqntid 256")).accepted
    assert not validate(original, kernel(_ADDS, header=".reqntid 128\n.maxclusterrank 2")).accepted


def test_a_register_budget_stays_where_the_kernel_changes_it() -> None:
    body = "setmaxnreg.inc.sync.aligned.u32 240;"
    verdict = validate(kernel(body), kernel(body, header=".reqntid 128\n.maxnreg 64"))
    assert kinds(verdict) == {"register-budget"}
    function = f".func f()\n{{\n{body}\nret;\n}}"
    changed = kernel("", function, header=".reqntid 128\n.maxnreg 64")
    assert kinds(validate(kernel("", function), changed)) == {"register-budget"}
    other = "\n.visible" + kernel(body).split("\n.visible", 1)[1].replace("entry k(", "entry l(")
    changed = kernel("", header=".reqntid 128\n.maxnreg 64")
    assert validate(kernel("") + other, changed + other).accepted


@pytest.mark.parametrize(
    ("old", "new", "accepted"),
    [
        ("ld.global.b32", "ld.global.L1::evict_last.b32", True),
        ("ld.global.b32", "ld.global.L1::no_allocate.L2::128B.b32", True),
        ("ld.global.nc.b32", "ld.global.nc.L2::256B.b32", True),
        ("ld.global.L1::evict_first.b32", "ld.global.b32", True),
        ("ld.global.b32", "ld.global.cg.b32", False),
        ("ld.global.cg.b32", "ld.global.b32", False),
        ("ld.global.b32", "ld.global.lu.b32", False),
        ("ld.global.b32", "ld.global.nc.b32", False),
        ("ld.global.b32", "ld.volatile.global.b32", False),
        ("ld.b32", "ld.L2::128B.b32", False),
        ("ld.shared.b32", "ld.shared.L1::evict_last.b32", False),
        ("ld.relaxed.gpu.global.b32", "ld.relaxed.gpu.global.L1::evict_last.b32", False),
        ("ld.global.L1::evict_new.b32", "ld.global.b32", False),
    ],
)  # fmt: skip
def test_only_hints_that_change_no_result_may_differ(old: str, new: str, accepted: bool) -> None:
    verdict = compare(f"{old} %r1, [%rd1];", f"{new} %r1, [%rd1];")
    assert verdict.accepted is accepted
    assert bool(verdict.differences) is accepted


def test_the_prefetch_size_of_an_asynchronous_copy_may_differ() -> None:
    copy = "cp.async.cg.shared.global{} [%r1], [%rd1], 16;"
    assert compare(copy.format(""), copy.format(".L2::128B")).accepted
    assert not compare(copy.format(""), copy.format(".L2::cache_hint")).accepted


def test_module_directives_must_be_equal() -> None:
    original = kernel(_ADDS, ".global .align 4 .b32 x[2] = {1, 2};")
    for old, new in (
        ("{1, 2}", "{1, 3}"),
        (".global .align 4 .b32 x[2] = {1, 2};", ""),
        ("sm_100a", "sm_90"),
        (".version 8.6", ".version 8.5"),
    ):
        assert not validate(original, original.replace(old, new)).accepted
    assert not validate(original, original + ".global .b32 y;\n").accepted
    assert validate(original, original.replace("{1, 2}", "{ 1,2 }")).accepted
