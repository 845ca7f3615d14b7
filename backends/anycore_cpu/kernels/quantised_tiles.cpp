// The product of many rounded rows and a panel in the tiles of AMX, where the processor has them.
#include "quantised.hpp"

#if defined(__AMX_INT8__)

#include <algorithm>

#include "scratch.hpp"
#include "tiles.hpp"

namespace anycore {
namespace {

// Four bits a number → the signed bytes that tiles take, laid out like a panel of 8 bits.
const uint8_t* unpacked(const Panel& panel) {
    static thread_local Scratch scratch;
    scratch.reserve(static_cast<size_t>(panel.inputs * COLUMNS), 1);
    uint8_t* bytes = scratch.take<uint8_t>(panel.inputs * COLUMNS);
    constexpr int RUN = COLUMNS * 4;
    for (long k = 0; k < panel.inputs; k += 8)
        for (int i = 0; i < RUN; i += VECTOR_BYTES) {
            const Ints both = load_as<Ints>(panel.numbers + k * COLUMNS / 2 + i);
            const Bytes low = reinterpret_cast<Bytes>(both & 0x0f0f0f0f) - 8;
            const Bytes high = reinterpret_cast<Bytes>(both >> 4 & 0x0f0f0f0f) - 8;
            std::memcpy(bytes + k * COLUMNS + i, &low, sizeof low);
            std::memcpy(bytes + k * COLUMNS + RUN + i, &high, sizeof high);
        }
    return bytes;
}

// dots[32][32] = up to 32 rows times inputs `begin` to `end` of a panel, in whole numbers.
template <bool TWO>
INLINE void multiply_group(const int8_t* x, long width, const uint8_t* bytes, long begin, long end, long step,
                           int32_t* dots) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long k = begin; k < end; k += step) {
        _tile_loadd(6, bytes + k * COLUMNS, COLUMNS * 4);
        _tile_loadd(7, bytes + k * COLUMNS + 64, COLUMNS * 4);
        _tile_loadd(4, x + k, width);
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        if (TWO) {
            _tile_loadd(5, x + 16 * width + k, width);
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
        }
    }
    _tile_stored(0, dots, COLUMNS * 4);
    _tile_stored(1, dots + 16, COLUMNS * 4);
    if (TWO) {
        _tile_stored(2, dots + 16 * COLUMNS, COLUMNS * 4);
        _tile_stored(3, dots + 16 * COLUMNS + 16, COLUMNS * 4);
    }
}

// Groups whose products are all made before the first is scaled: what tiles store takes a while to be there for vectors.
constexpr long TOGETHER = 4;

struct Products {
    alignas(64) int32_t numbers[TOGETHER][32 * COLUMNS];
};

// Adds groups `first` to `last` to the sums of up to 16 rows and 16 columns, which stay in registers meanwhile.
template <bool MINIMUMS>
void add_groups(const Panel& panel, const Products& products, const RoundedRows& rounded, long row, long first,
                long last, int from, int column, float* out, int count) {
    Floats sums[16];
    for (int r = 0; r < 16; r++) sums[r] = first > 0 && r < count ? load(out + r * COLUMNS + column) : Floats{};
    const float *scales = rounded.scales + row, *totals = rounded.totals + row;
    for (long g = first; g < last; g++) {
        const int32_t* dots = products.numbers[g - first] + from * COLUMNS + column;
        const Floats scale = panel.scale(g, column);
        const long place = g * rounded.stride;
        for (int r = 0; r < 16; r++)
            sums[r] = add_group(sums[r], load_as<Ints>(dots + r * COLUMNS), scale, scales[place + r]);
        if (MINIMUMS) {
            const Floats minimum = panel.minimum(g, column);
            for (int r = 0; r < 16; r++) sums[r] = take_minimum(sums[r], minimum, totals[place + r]);
        }
    }
    for (int r = 0; r < 16; r++)
        if (r < count) store(out + r * COLUMNS + column, sums[r]);
}

// Up to 32 rows; of tiles that have fewer rows, what an earlier tile left is added up and not read.
void multiply_block(const Panel& panel, const uint8_t* bytes, const RoundedRows& rounded, long row, int count,
                    float* out) {
    static thread_local Products products;
    const int8_t* x = rounded.numbers + row * rounded.width;
    for (long first = 0; first < panel.groups; first += TOGETHER) {
        const long last = std::min(panel.groups, first + TOGETHER);
        for (long g = first; g < last; g++) {
            const long begin = g * panel.span, end = std::min(panel.inputs, begin + panel.span);
            int32_t* dots = products.numbers[g - first];
            count > 16 ? multiply_group<true>(x, rounded.width, bytes, begin, end, panel.step, dots)
                       : multiply_group<false>(x, rounded.width, bytes, begin, end, panel.step, dots);
        }
        for (int from = 0; from < count; from += 16)
            for (int column = 0; column < COLUMNS; column += LANES) {
                float* to = out + from * COLUMNS;
                const auto add = panel.minimums ? add_groups<true> : add_groups<false>;
                add(panel, products, rounded, row + from, first, last, from, column, to, count - from);
            }
    }
}

}  // namespace

void multiply_tiles(const Panel& panel, const RoundedRows& rounded, long first, long count, float* sums,
                    const Finish& finish) {
    const uint8_t* bytes = panel.bits == 8 ? panel.numbers : unpacked(panel);
    for (long r = 0; r < count; r += 32) {
        const int some = static_cast<int>(std::min(32L, count - r));
        if (r == 0 || some < 32) shape_tiles(std::min(16, some), some - 16, static_cast<int>(panel.step));
        multiply_block(panel, bytes, rounded, first + r, some, sums + r * COLUMNS);
        finish(r, some);
    }
    _tile_release();
}

}  // namespace anycore

#endif
