// Rows rounded to int8, each group of inputs by its own largest one.
#include <algorithm>

#include "quantised.hpp"
#include "scratch.hpp"

namespace anycore {
namespace {

typedef int8_t Narrow __attribute__((vector_size(LANES)));

constexpr float TINY = 1e-30f;       // below it a group is all zeros: its inverse would be infinite
constexpr int INFINITE = 0x7f800000;  // what is not finite has at least these bits

// Of numbers below 2^15.
INLINE uint16_t largest(Halves values) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
    const __m256i wide = reinterpret_cast<__m256i>(values);
    const __m128i half = _mm_max_epu16(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
#else
    const __m128i half = reinterpret_cast<__m128i>(values);
#endif
    return static_cast<uint16_t>(~_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(half, _mm_set1_epi16(-1))), 0));
#else
    uint16_t found = values[0];
    for (int i = 1; i < LANES; i++) found = std::max<uint16_t>(found, values[i]);
    return found;
#endif
}

// Without its sign the bits of a bf16 are in order as whole numbers.
INLINE float largest_magnitude(const bf16* x, long count) {
    Halves top = {};
    for (long k = 0; k < count; k += LANES) {
        const Halves size = load_as<Halves>(x + k) & 0x7fff;
        top = size > top ? size : top;
    }
    return widen(largest(top));
}

// to[count] = x * inverse as the nearest whole numbers; returns their sum.
INLINE int32_t round_group(const bf16* x, long count, float inverse, int8_t* to) {
    Ints total = {};
    for (long k = 0; k < count; k += LANES) {
        const Ints near = nearest(load(x + k) * inverse);
        const Narrow narrow = __builtin_convertvector(near, Narrow);
        std::memcpy(to + k, &narrow, sizeof narrow);
        total += near;
    }
    return sum(total);
}

}  // namespace

void round_row(const Quantised& matrix, const bf16* x, long row, const RoundedRows& rounded) {
    static thread_local Scratch scratch;
    const long padded = matrix.padded(), group = matrix.span(), groups = matrix.groups();
    const long lined = (groups + LANES - 1) / LANES * LANES;
    scratch.reserve(static_cast<size_t>(padded) * sizeof(bf16) + static_cast<size_t>(lined) * 2 * sizeof(float), 3);
    float *scales = scratch.take<float>(lined), *inverses = scratch.take<float>(lined);
    if (padded != matrix.inputs) {
        bf16* copy = scratch.take<bf16>(padded);
        std::copy_n(x, matrix.inputs, copy);
        std::fill_n(copy + matrix.inputs, padded - matrix.inputs, bf16{0});
        x = copy;
    }
    for (long g = 0; g < groups; g++)
        scales[g] = largest_magnitude(x + g * group, std::min(group, padded - g * group));
    std::fill(scales + groups, scales + lined, 0.0f);
    for (long g = 0; g < lined; g += LANES) {
        const Floats most = load(scales + g);
        const Floats broken = reinterpret_cast<Floats>((reinterpret_cast<Ints>(most) >= INFINITE) & 0x7fc00000);
        store(inverses + g, most > TINY ? 127.0f / most : Floats{});
        store(scales + g, most / 127.0f + broken);
    }
    const int offset = matrix.bits == 4 ? 8 : WEIGHT_OFFSET;
    int8_t* numbers = rounded.numbers + row * rounded.width;
    for (long g = 0; g < groups; g++) {
        const long begin = g * group, place = g * rounded.stride + row;
        const int32_t whole =
            round_group(x + begin, std::min(group, padded - begin), inverses[g], numbers + begin);
        rounded.scales[place] = scales[g];
        rounded.totals[place] = scales[g] * static_cast<float>(whole);
        rounded.starts[place] = -offset * whole;
    }
}

}  // namespace anycore
