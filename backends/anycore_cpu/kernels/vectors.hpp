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
#include <immintrin.h>
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

#define INLINE inline __attribute__((always_inline))

namespace anycore {

using bf16 = uint16_t;  // the upper half of a float
constexpr int LANES = VECTOR_BYTES / 4;

typedef float Floats __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t Ints __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t Words __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t Halves __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef int8_t Bytes __attribute__((vector_size(VECTOR_BYTES)));
typedef uint8_t Octets __attribute__((vector_size(VECTOR_BYTES)));

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

// 16 bits each, without sign. GCC 12 makes five instructions of a conversion by __builtin_convertvector.
INLINE Words load_words(const uint16_t* from) {
#if defined(__AVX512F__)
    return reinterpret_cast<Words>(_mm512_maskz_cvtepu16_epi32(0xffff, load_as<__m256i>(from)));
#elif defined(__AVX2__)
    return reinterpret_cast<Words>(_mm256_cvtepu16_epi32(load_as<__m128i>(from)));
#else
    return __builtin_convertvector(load_as<Halves>(from), Words);
#endif
}

INLINE Floats load(const bf16* from) { return reinterpret_cast<Floats>(load_words(from) << 16); }

// Of 16 bits by IEEE 754.
INLINE Floats load_half(const uint16_t* from) {
#if defined(__AVX512F__)
    return reinterpret_cast<Floats>(_mm512_maskz_cvtph_ps(0xffff, load_as<__m256i>(from)));
#elif defined(__F16C__)
    return reinterpret_cast<Floats>(_mm256_cvtph_ps(load_as<__m128i>(from)));
#else
    const Words bits = load_words(from);
    const Words wide = (bits & 0x7fff) << 13 | (bits & 0x8000) << 16;
    return reinterpret_cast<Floats>(wide) * 0x1p112f;
#endif
}

INLINE void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }

INLINE void store(bf16* to, Floats value) {
#if defined(__AVX512BF16__)
    const auto narrow = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(value));
    std::memcpy(to, &narrow, sizeof narrow);
#elif defined(__ARM_FEATURE_BF16)
    const auto narrow = vcvt_bf16_f32(reinterpret_cast<float32x4_t>(value));
    std::memcpy(to, &narrow, sizeof narrow);
#elif defined(__AVX512F__)
    const __m512i bits = reinterpret_cast<__m512i>(value), one = _mm512_set1_epi32(1);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
    const __m512i near = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(reinterpret_cast<__m512>(value), reinterpret_cast<__m512>(value), _CMP_UNORD_Q);
    const __m512i rounded = _mm512_mask_or_epi32(near, nan, bits, _mm512_set1_epi32(64 << 16));
    const __m256i narrow = _mm512_maskz_cvtepi32_epi16(0xffff, _mm512_srli_epi32(rounded, 16));
    std::memcpy(to, &narrow, sizeof narrow);
#else
    const Words bits = reinterpret_cast<Words>(value);
    const Words nan = reinterpret_cast<Words>(value != value);
    const Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const Halves narrow = __builtin_convertvector((nan & (bits >> 16 | 64)) | (~nan & rounded), Halves);
    std::memcpy(to, &narrow, sizeof narrow);
#endif
}

// The nearest whole numbers; of two that are as near, the even one.
INLINE Ints nearest(Floats x) {
#if defined(__AVX512F__)
    return reinterpret_cast<Ints>(_mm512_maskz_cvtps_epi32(0xffff, reinterpret_cast<__m512>(x)));
#elif defined(__AVX2__)
    return reinterpret_cast<Ints>(_mm256_cvtps_epi32(reinterpret_cast<__m256>(x)));
#elif defined(__ARM_FEATURE_DOTPROD)
    return reinterpret_cast<Ints>(vcvtnq_s32_f32(reinterpret_cast<float32x4_t>(x)));
#else
    return reinterpret_cast<Ints>(x + 12582912.0f) - 0x4b400000;  // for numbers well below 2^22
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
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(reinterpret_cast<__m512>(value));
#else
    float total = 0;
    for (int i = 0; i < LANES; i++) total += value[i];
    return total;
#endif
}

INLINE int32_t sum(Ints value) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32(reinterpret_cast<__m512i>(value));
#else
    int32_t total = 0;
    for (int i = 0; i < LANES; i++) total += value[i];
    return total;
#endif
}

INLINE float largest(Floats value) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(reinterpret_cast<__m512>(value));
#else
    float found = value[0];
    for (int i = 1; i < LANES; i++) found = value[i] > found ? value[i] : found;
    return found;
#endif
}

// Whether any lane is not 0.
INLINE bool any(Ints value) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(value), reinterpret_cast<__m512i>(value)) != 0;
#elif defined(__AVX2__)
    return !_mm256_testz_si256(reinterpret_cast<__m256i>(value), reinterpret_cast<__m256i>(value));
#else
    int64_t halves[VECTOR_BYTES / 8];
    std::memcpy(halves, &value, sizeof halves);
    return (halves[0] | halves[1]) != 0;
#endif
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

// The same within 4e-6 of it, for what will be rounded to bf16; below -87 it is e^-87. NaN stays NaN; x is below 88.
INLINE Floats exp_roughly(Floats x) {
    x = x < all(-87.0f) ? all(-87.0f) : x;
    const Floats scaled = x * 1.44269504f;
    const Floats shifted = scaled + 12582912.0f;  // its last bits are the nearest whole number
    const Floats rest = scaled - (shifted - 12582912.0f);
    Floats series = all(0.00956051517f);
    series = series * rest + 0.0559170805f;
    series = series * rest + 0.240249813f;
    series = series * rest + 0.69312197f;
    series = series * rest + 0.999999165f;
    return reinterpret_cast<Floats>(reinterpret_cast<Ints>(series) + (reinterpret_cast<Ints>(shifted) << 23));
}

INLINE Floats tanh(Floats x) { return 1.0f - 2.0f / (exp(x + x) + 1.0f); }

// ---- products of rows and panels -------------------------------------------------------------------------------------

// total[i] + x * column[i].
INLINE Floats add_products(Floats total, const float* x, const float* column) { return total + *x * load(column); }

// total[i] + x[0] * column[2i] + x[1] * column[2i + 1].
INLINE Floats add_products(Floats total, const bf16* x, const bf16* column) {
    uint32_t pair;
    std::memcpy(&pair, x, 4);
#if defined(__AVX512BF16__)
    return reinterpret_cast<Floats>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(total),
                                                     reinterpret_cast<__m512bh>(pair - Words{}),
                                                     load_as<__m512bh>(column)));
#elif defined(__ARM_FEATURE_BF16)
    return reinterpret_cast<Floats>(vbfdotq_f32(reinterpret_cast<float32x4_t>(total),
                                                reinterpret_cast<bfloat16x8_t>(pair - Words{}),
                                                load_as<bfloat16x8_t>(column)));
#else
    const Words both = load_as<Words>(column);
    const Floats even = reinterpret_cast<Floats>(both << 16), odd = reinterpret_cast<Floats>(both & 0xffff0000);
    return total + widen(x[0]) * even + widen(x[1]) * odd;
#endif
}

// Products of bytes are summed by fours: lane i takes bytes 4i to 4i + 3, in exact int32. ARM multiplies signed bytes, x86
// unsigned ones by signed ones.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr int WEIGHT_OFFSET = 128;
#else
constexpr int WEIGHT_OFFSET = 0;
#endif

// What bytes of weights in panels are more than they stand for. Tiles take signed ones.
#if defined(__AMX_INT8__)
constexpr int STORED_OFFSET = 0;
#else
constexpr int STORED_OFFSET = WEIGHT_OFFSET;
#endif

#if defined(__AVX512F__)
using Register = __m512i;
#elif defined(__AVX2__)
using Register = __m256i;
#elif defined(__ARM_FEATURE_DOTPROD)
using Register = int8x16_t;
#else
using Register = Bytes;
#endif

// `a` is unsigned on x86; elsewhere signed, as `b` is.
INLINE Ints add_fours(Ints total, Bytes a, Bytes b) {
    const Register first = reinterpret_cast<Register>(a), second = reinterpret_cast<Register>(b);
#if defined(__AVX512VNNI__)
    return reinterpret_cast<Ints>(_mm512_dpbusd_epi32(reinterpret_cast<Register>(total), first, second));
#elif defined(__AVX512F__)
    return total + reinterpret_cast<Ints>(_mm512_madd_epi16(_mm512_maddubs_epi16(first, second), _mm512_set1_epi16(1)));
#elif defined(__AVXVNNI__)
    return reinterpret_cast<Ints>(_mm256_dpbusd_avx_epi32(reinterpret_cast<Register>(total), first, second));
#elif defined(__AVX2__)
    return total + reinterpret_cast<Ints>(_mm256_madd_epi16(_mm256_maddubs_epi16(first, second), _mm256_set1_epi16(1)));
#elif defined(__ARM_FEATURE_DOTPROD)
    return reinterpret_cast<Ints>(vdotq_s32(reinterpret_cast<int32x4_t>(total), first, second));
#else
    for (int i = 0; i < VECTOR_BYTES; i++) total[i / 4] += first[i] * second[i];
    return total;
#endif
}

INLINE Bytes four_bytes(const int8_t* four) {
    int32_t bytes;
    std::memcpy(&bytes, four, 4);
    return reinterpret_cast<Bytes>(bytes - Ints{});
}

// Weights as they lie in a panel → as `add_byte_products` takes them.
INLINE Bytes ready_weights(Bytes weights) {
    return STORED_OFFSET == WEIGHT_OFFSET ? weights : weights ^ static_cast<int8_t>(-128);
}

// total[i] + the products of four bytes of a row, -127 to 127, and bytes 4i to 4i + 3 of weights, -128 to 127. What is
// summed over a row comes out too high by WEIGHT_OFFSET times the sum of the row.
INLINE Ints add_byte_products(Ints total, Bytes bytes, Bytes weights) {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
    return add_fours(total, weights, bytes);
#elif defined(__AVX2__)
    const Octets minus = reinterpret_cast<Octets>(weights < 0);  // goes to the row: -128 becomes the unsigned 128
    const auto turned = [minus](Bytes x) {
        return reinterpret_cast<Bytes>((reinterpret_cast<Octets>(x) ^ minus) - minus);
    };
    return add_fours(total, turned(weights), turned(bytes));
#else
    return add_fours(total, bytes, weights);
#endif
}

// The same with weights of 0 to 15, and the sum exact: they are the unsigned ones.
INLINE Ints add_nibble_products(Ints total, Bytes bytes, Bytes weights) { return add_fours(total, weights, bytes); }

}  // namespace anycore
