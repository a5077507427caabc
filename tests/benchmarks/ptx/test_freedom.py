"""Counts of free pairs, and the text of conversions through f32."""

from __future__ import annotations

from benchmarks.ptx.changes.conversions import through_f32
from benchmarks.ptx.changes.freedom import count, summary

from nostall.ptx.program.module import parse
from tests.corpus.ptx_catalogue import ptx_texts


def test_leaving_a_resource_out_frees_pairs() -> None:
    text = ptx_texts()["fused_attention.sm_90"]
    row = count(text, parse(text).kernels[0].name)
    assert row is not None and row["kind"] == "wgmma"
    assert 0 < row["free"] < row["registers"] <= row["pairs"]
    assert row["asynchronous products"] > 0
    shares = summary([row, row])["wgmma"]
    assert shares["kernels"] == 2 and 0 < shares["free"] < shares["registers"] < 1


def test_conversions_keep_their_operands_and_guarded_ones_stay() -> None:
    text = "\tcvt.rn.f16.s32 \t%rs1, %r2;\n\t@%p1 cvt.rn.f16.u32 %rs2, %r3;\n"
    changed, number = through_f32(text)
    assert number == 1 and "@%p1 cvt.rn.f16.u32 %rs2, %r3;" in changed
    assert "cvt.rn.f32.s32 %via, %r2; cvt.rn.f16.f32 %rs1, %via; }" in changed
