// The product of many rounded rows and a panel in the tiles of AMX, where the processor has them.
#include "quantised.hpp"

#if defined(__AMX_INT8__)

#include <algorithm>

#include "scratch.hpp"
#include "tiles.hpp"

namespace anycore {
namespace {

// Four bits a number → the signed bytes that tiles take, laid out like a panel of 8 bits.
const uint8_t* unpacked(const Quantised& matrix, const uint8_t* panel) {
    static thread_local Scratch scratch;
    const long padded = matrix.padded();
    scratch.reserve(static_cast<size_t>(padded * COLUMNS), 1);
    uint8_t* bytes = scratch.take<uint8_t>(padded * COLUMNS);
    constexpr int RUN = COLUMNS * 4;
    for (long k = 0; k < padded; k += 8)
        for (int i = 0; i < RUN; i += VECTOR_BYTES) {
            const Ints both = load_as<Ints>(panel + k * COLUMNS / 2 + i);
            const Bytes low = reinterpret_cast<Bytes>(both & 0x0f0f0f0f) - 8;
            const Bytes high = reinterpret_cast<Bytes>(both >> 4 & 0x0f0f0f0f) - 8;
            std::memcpy(bytes + k * COLUMNS + i, &low, sizeof low);
            std::memcpy(bytes + k * COLUMNS + RUN + i, &high, sizeof high);
        }
    return bytes;
}

// One group of inputs: tiles are emptied into `out` [rows][32] when all of it is summed, so the sums must fit 32 bits.
template <bool TWO>
INLINE void multiply_whole(const int8_t* x, long stride, const uint8_t* bytes, long inputs, int32_t* out) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long k = 0; k < inputs; k += 64) {
        _tile_loadd(6, bytes + k * COLUMNS, COLUMNS * 4);
        _tile_loadd(7, bytes + k * COLUMNS + 64, COLUMNS * 4);
        _tile_loadd(4, x + k, stride);
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        if (TWO) {
            _tile_loadd(5, x + 16 * stride + k, stride);
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
        }
    }
    _tile_stored(0, out, COLUMNS * 4);
    _tile_stored(1, out + 16, COLUMNS * 4);
    if (TWO) {
        _tile_stored(2, out + 16 * COLUMNS, COLUMNS * 4);
        _tile_stored(3, out + 16 * COLUMNS + 16, COLUMNS * 4);
    }
}

void whole_rows(const Quantised& matrix, const uint8_t* panel, const uint8_t* bytes, const RoundedRows& rounded,
                long first, long count, float* sums) {
    const long padded = matrix.padded();
    alignas(64) int32_t dots[32 * COLUMNS];
    for (long r = 0; r < count; r += 32) {
        const int upper = static_cast<int>(std::min(16L, count - r));
        const int lower = static_cast<int>(std::min(16L, count - r - upper));
        if (r == 0 || upper + lower < 32) shape_tiles(upper, lower, 64);
        const int8_t* x = rounded.numbers + (first + r) * padded;
        lower > 0 ? multiply_whole<true>(x, padded, bytes, padded, dots)
                  : multiply_whole<false>(x, padded, bytes, padded, dots);
        for (int i = 0; i < upper + lower; i++)
            for (int column = 0; column < COLUMNS; column += LANES)
                store(sums + (r + i) * COLUMNS + column,
                      add_group(Floats{}, load_as<Ints>(dots + i * COLUMNS + column), matrix.scale(panel, 0, column),
                                rounded.scales[first + r + i]));
    }
}

// 16 rows and 16 columns, whose sums stay in registers while group after group passes through two tiles by turns.
template <bool MINIMUMS>
void sixteen(const Quantised& matrix, const uint8_t* panel, const uint8_t* bytes, const RoundedRows& rounded,
             long first, int column, float* out, int count) {
    const long padded = matrix.padded(), group = matrix.span(), step = matrix.step();
    const int8_t* x = rounded.numbers + first * padded;
    alignas(64) int32_t dots[16 * LANES] = {};
    Floats sums[16] = {};
    for (long g = 0; g < matrix.groups(); g++) {
        _tile_zero(0);
        for (long k = g * group; k < std::min(padded, (g + 1) * group); k += step) {
            _tile_loadd(4, x + k, padded);
            _tile_loadd(6, bytes + k * COLUMNS + column * 4, COLUMNS * 4);
            _tile_dpbssd(0, 4, 6);
        }
        _tile_stored(0, dots, 64);
        const Floats scale = matrix.scale(panel, g, column);
        const long place = g * rounded.stride + first;
        for (int r = 0; r < 16; r++)
            sums[r] = add_group(sums[r], load_as<Ints>(dots + r * LANES), scale, rounded.scales[place + r]);
        if (MINIMUMS) {
            const Floats minimum = matrix.minimum(panel, g, column);
            for (int r = 0; r < 16; r++) sums[r] = take_minimum(sums[r], minimum, rounded.totals[place + r]);
        }
    }
    for (int r = 0; r < 16; r++)
        if (r < count) store(out + r * COLUMNS + column, sums[r]);
}

}  // namespace

void multiply_tiles(const Quantised& matrix, const uint8_t* panel, const RoundedRows& rounded, long first, long count,
                    float* sums) {
    const uint8_t* bytes = matrix.bits == 8 ? panel : unpacked(matrix, panel);
    if (matrix.wide_scale()) {
        whole_rows(matrix, panel, bytes, rounded, first, count, sums);
    } else {
        for (long r = 0; r < count; r += 16) {
            const int some = static_cast<int>(std::min(16L, count - r));
            if (r == 0 || some < 16) shape_tiles(some, 0, static_cast<int>(matrix.step()));
            for (int column = 0; column < COLUMNS; column += LANES) {
                float* out = sums + r * COLUMNS;
                matrix.minimums ? sixteen<true>(matrix, panel, bytes, rounded, first + r, column, out, some)
                                : sixteen<false>(matrix, panel, bytes, rounded, first + r, column, out, some);
            }
        }
    }
    _tile_release();
}

}  // namespace anycore

#endif
