// Vectors of the level this file is compiled for: 64 bytes with AVX-512, 32 with AVX2, 16 elsewhere. A kernel is written
// once in these few functions.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__)
#include <immintrin.h>
#define VECTOR_BYTES 64
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

#define INLINE inline __attribute__((always_inline))

namespace anycore {

using bf16 = uint16_t;  // the upper half of a float
constexpr int LANES = VECTOR_BYTES / 4;

typedef float Floats __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t Ints __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t Words __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t Halves __attribute__((vector_size(VECTOR_BYTES / 2)));

template <class Vector>
INLINE Vector load_as(const void* from) {
    Vector vector;
    std::memcpy(&vector, from, sizeof vector);
    return vector;
}

INLINE Floats all(float value) { return value - Floats{}; }

// ---- one number ------------------------------------------------------------------------------------------------------

INLINE float widen(float value) { return value; }

INLINE float widen(bf16 value) {
    const uint32_t bits = static_cast<uint32_t>(value) << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}

INLINE void store_one(float* to, float value) { *to = value; }

INLINE void store_one(bf16* to, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const bool nan = value != value;
    *to = static_cast<bf16>(nan ? bits >> 16 | 64 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// ---- LANES numbers ---------------------------------------------------------------------------------------------------

INLINE Floats load(const float* from) { return load_as<Floats>(from); }

INLINE Floats load(const bf16* from) {
    return reinterpret_cast<Floats>(__builtin_convertvector(load_as<Halves>(from), Words) << 16);
}

INLINE void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }

INLINE void store(bf16* to, Floats value) {
#if defined(__AVX512BF16__)
    const auto narrow = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(value));
    std::memcpy(to, &narrow, sizeof narrow);
#else
    const Words bits = reinterpret_cast<Words>(value);
    const Words nan = reinterpret_cast<Words>(value != value);
    const Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const Halves narrow = __builtin_convertvector((nan & (bits >> 16 | 64)) | (~nan & rounded), Halves);
    std::memcpy(to, &narrow, sizeof narrow);
#endif
}

INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }

template <int... I>
INLINE Floats pair_sums(Floats a, Floats b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, (2 * I)...) + __builtin_shufflevector(a, b, (2 * I + 1)...);
}

// Lane i of the result is the sum of vector i.
template <int COUNT = LANES>
INLINE Floats sums(const Floats* vectors) {
    if constexpr (COUNT == 1) {
        return vectors[0];
    } else {
        Floats halved[COUNT / 2];
        for (int i = 0; i < COUNT / 2; i++)
            halved[i] = pair_sums(vectors[2 * i], vectors[2 * i + 1], std::make_integer_sequence<int, LANES>());
        return sums<COUNT / 2>(halved);
    }
}

INLINE float sum(Floats value) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += value[i];
    return total;
}

INLINE float largest(Floats value) {
    float found = value[0];
    for (int i = 1; i < LANES; i++) found = value[i] > found ? value[i] : found;
    return found;
}

// e to the power of x, within 2e-7 of it; below -87 it is e^-87, above 88 it is e^88. NaN stays NaN.
INLINE Floats exp(Floats x) {
    x = x < all(-87.0f) ? all(-87.0f) : x;
    x = x > all(88.0f) ? all(88.0f) : x;
    const Floats scaled = x * 1.44269504f;
    const Ints power = __builtin_convertvector(scaled + (scaled < 0 ? all(-0.5f) : all(0.5f)), Ints);
    const Floats whole = __builtin_convertvector(power, Floats);
    const Floats rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    Floats series = all(1.0f / 720);
    series = series * rest + 1.0f / 120;
    series = series * rest + 1.0f / 24;
    series = series * rest + 1.0f / 6;
    series = series * rest + 0.5f;
    series = series * rest + 1.0f;
    series = series * rest + 1.0f;
    return series * reinterpret_cast<Floats>((power + 127) << 23);
}

INLINE Floats tanh(Floats x) { return 1.0f - 2.0f / (exp(x + x) + 1.0f); }

}  // namespace anycore
