"""Bytes as words of four hold them: a thread reads and multiplies four at a time."""

from __future__ import annotations

import triton
import triton.language as tl

COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)
"""Whether kernels become machine code; the interpreter knows no instructions."""


@triton.jit
def dot4(a, b, total, SIGNED: tl.constexpr):
    """total + the products of the four bytes of a, which have a sign or not, with those of b, which have: in one
    instruction (compute capability 6.1).
    """
    if COMPILED:
        asm: tl.constexpr = "dp4a.s32.s32 $0, $1, $2, $3;" if SIGNED else "dp4a.u32.s32 $0, $1, $2, $3;"
        total = tl.inline_asm_elementwise(asm, "=r,r,r,r", [a, b, total], dtype=tl.int32, is_pure=True, pack=1)
    else:
        for place in tl.static_range(4):
            byte = a << (24 - 8 * place) >> 24 if SIGNED else a >> (8 * place) & 255
            total += byte * (b << (24 - 8 * place) >> 24)
    return total


@triton.jit
def and_or(words, MASK: tl.constexpr, BITS: tl.constexpr):
    """words & MASK | BITS, in one instruction: the compiler would take two, because constants are."""
    mask = tl.full(words.shape, MASK, tl.int32)
    bits = tl.full(words.shape, BITS, tl.int32)
    if COMPILED:
        found = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", [words, mask, bits], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        found = words & mask | bits
    return found


@triton.jit
def e4m3_to_float(bits):
    # Of bytes, whatever the chip: a float16 has the same order of bits, one exponent bit more and seven bits behind.
    wide = bits.to(tl.int16)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def four_e4m3(words):
    """The four e4m3 of words, as floats: by an instruction for two (compute capability 8.9)."""
    if COMPILED:
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high, a, b, c, d;
            .reg .b32 first, second;
            mov.b32 {low, high}, $4;
            cvt.rn.f16x2.e4m3x2 first, low;
            cvt.rn.f16x2.e4m3x2 second, high;
            mov.b32 {a, b}, first;
            mov.b32 {c, d}, second;
            cvt.f32.f16 $0, a;
            cvt.f32.f16 $1, b;
            cvt.f32.f16 $2, c;
            cvt.f32.f16 $3, d;
            }""",
            "=f,=f,=f,=f,r", [words], dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        a, b = e4m3_to_float(words & 255), e4m3_to_float(words >> 8 & 255)
        c, d = e4m3_to_float(words >> 16 & 255), e4m3_to_float(words >> 24 & 255)
    return a, b, c, d
