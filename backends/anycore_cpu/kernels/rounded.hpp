// Keys and values of one byte a number: how a head is rounded into the cache, and read back. By the rules of
// `contract/rounded.py`, to the last bit.
#pragma once

#include <algorithm>

#include "vectors.hpp"

namespace anycore {

enum Rounding { NOT_ROUNDED, INT8, FP8 };  // of a cache: `ROUNDINGS` of attention.py

typedef int8_t Narrow __attribute__((vector_size(LANES)));

constexpr float largest_level(int rounding) { return rounding == INT8 ? 127.0f : 448.0f; }

// What bytes stand for before they are scaled. None of them is one of the two that are not a number in e4m3.
template <int ROUNDING>
INLINE Floats levels(Narrow bytes) {
    const Ints wide = __builtin_convertvector(bytes, Ints);
    if (ROUNDING == INT8) return __builtin_convertvector(wide, Floats);
    constexpr int SIGN = -0x7fffffff - 1;
    return reinterpret_cast<Floats>((wide & 0x7f) << 20 | (wide & SIGN)) * 0x1p120f;  // exponents differ by 120
}

// The nearest levels, ties to even, of numbers that are not beyond the largest one.
template <int ROUNDING>
INLINE Narrow nearest_levels(Floats x) {
    if (ROUNDING == INT8) return __builtin_convertvector(nearest(x), Narrow);
    const Ints bits = reinterpret_cast<Ints>(x), size = bits & 0x7fffffff;
    const Ints usual = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
    const Ints small = nearest(reinterpret_cast<Floats>(size) * 512.0f);  // below 2^-6 they lie 2^-9 apart
    constexpr int SMALLEST = 121 << 23;                                   // 2^-6
    return __builtin_convertvector((size < SMALLEST ? small : usual) | (bits >> 24 & 0x80), Narrow);
}

// head [size], with room for one more vector behind it → bytes and a scale.
template <int ROUNDING>
void round_head(float* head, long size, uint8_t* to, bf16* scale) {
    constexpr float MOST = largest_level(ROUNDING);
    std::fill_n(head + size, LANES, 0.0f);
    Floats top{}, broken{};
    for (long d = 0; d < size; d += LANES) {
        const Floats value = load(head + d);
        top = larger(value < 0 ? -value : value, top);
        broken += value - value;  // not a number if it is not finite
    }
    store_one(scale, largest(top) / MOST + sum(broken));
    const float unit = widen(*scale);
    for (long d = 0; d < size; d += LANES) {
        Floats level = load(head + d) / unit;
        level = level == level ? level : Floats{};
        level = level > all(MOST) ? all(MOST) : level;
        const Narrow found = nearest_levels<ROUNDING>(level < all(-MOST) ? all(-MOST) : level);
        std::memcpy(to + d, &found, static_cast<size_t>(std::min<long>(LANES, size - d)));
    }
}

template <int ROUNDING, class T>
void open_head(const uint8_t* from, long size, float scale, T* to) {
    long d = 0;
    for (; d + LANES <= size; d += LANES) store(to + d, levels<ROUNDING>(load_as<Narrow>(from + d)) * scale);
    if (d < size) {
        Narrow bytes{};
        std::memcpy(&bytes, from + d, static_cast<size_t>(size - d));
        const Floats last = levels<ROUNDING>(bytes) * scale;
        for (long i = d; i < size; i++) store_one(to + i, last[i - d]);
    }
}

}  // namespace anycore
