// Keys and values of a tile as panels, for attention over several rows.
#pragma once

#include <cstring>

#include "panels.hpp"
#include "vectors.hpp"

namespace anycore {

// What several rows are multiplied in: bf16 where products take it as it is, else float, widened once and not at each step.
#if defined(__AMX_BF16__) || defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16)
template <class T>
using Factor = T;
#else
template <class T>
using Factor = float;
#endif

template <int STEP, int... I>
INLINE void exchange(Floats& a, Floats& b, std::integer_sequence<int, I...>) {
    const Floats first = a;
    a = __builtin_shufflevector(first, b, (I & STEP ? I - STEP + LANES : I)...);
    b = __builtin_shufflevector(first, b, (I & STEP ? I + LANES : I + STEP)...);
}

// Lane j of row i goes to lane i of row j.
template <int STEP = LANES / 2>
INLINE void transpose(Floats* rows) {
    for (int i = 0; i < LANES; i++)
        if (!(i & STEP)) exchange<STEP>(rows[i], rows[i + STEP], std::make_integer_sequence<int, LANES>());
    if constexpr (STEP > 1) transpose<STEP / 2>(rows);
}

// 32 keys, fewer at the end of a tile, as columns: what is missing is 0.
template <class T>
void pack_keys(const T* const* keys, long count, long dim, long, float* panel) {
    const long whole = dim / LANES * LANES;
    for (long c = 0; c < COLUMNS; c += LANES)
        for (long d = 0; d < whole; d += LANES) {
            Floats rows[LANES];
            for (int i = 0; i < LANES; i++) rows[i] = c + i < count ? load(keys[c + i] + d) : Floats{};
            transpose(rows);
            for (int i = 0; i < LANES; i++) store(panel + (d + i) * COLUMNS + c, rows[i]);
        }
    for (long d = whole; d < dim; d++)
        for (long c = 0; c < COLUMNS; c++) panel[d * COLUMNS + c] = c < count ? widen(keys[c][d]) : 0;
}

inline void pack_keys(const bf16* const* keys, long count, long dim, long padded, bf16* panel) {
    auto* pairs = reinterpret_cast<uint32_t*>(panel);
    for (long c = 0; c < COLUMNS; c++) {
        long d = 0;
        for (; c < count && d + 2 <= dim; d += 2) std::memcpy(pairs + d / 2 * COLUMNS + c, keys[c] + d, 4);
        for (; d < padded; d += 2) pairs[d / 2 * COLUMNS + c] = c < count && d < dim ? keys[c][d] : 0;
    }
}

// 32 columns of the values of a tile, of which `columns` there are.
template <class T>
void pack_values(const T* const* values, long count, long, long from, long columns, float* panel) {
    for (long j = 0; j < count; j++, panel += COLUMNS) {
        long c = 0;
        for (; c + LANES <= columns; c += LANES) store(panel + c, load(values[j] + from + c));
        for (; c < COLUMNS; c++) panel[c] = c < columns ? widen(values[j][from + c]) : 0;
    }
}

inline void pack_values(const bf16* const* values, long count, long padded, long from, long columns, bf16* panel) {
    static const bf16 nothing[COLUMNS] = {};
    for (long j = 0; j < padded; j += 2) {
        const bf16* even = j < count ? values[j] + from : nothing;
        const bf16* odd = j + 1 < count ? values[j + 1] + from : nothing;
        bf16* to = panel + j * COLUMNS;
        if (columns == COLUMNS)
            for (long c = 0; c < COLUMNS; c++) to[2 * c] = even[c], to[2 * c + 1] = odd[c];
        else
            for (long c = 0; c < COLUMNS; c++)
                to[2 * c] = c < columns ? even[c] : 0, to[2 * c + 1] = c < columns ? odd[c] : 0;
    }
}

}  // namespace anycore
