// The product of rounded rows and a panel in registers, by dot products of four bytes.
#include <algorithm>

#include "quantised.hpp"

namespace anycore {
namespace {

#if defined(__AVX512F__)
constexpr int MOST_ROWS = 6;  // 24 of 32 registers hold sums
#else
constexpr int MOST_ROWS = 3;  // 12 of 16
#endif
constexpr int VECTORS = 2;

constexpr long AHEAD = 3072;  // bytes that are asked for before their turn: a quarter faster than the processor's guess

// dots[ROWS][VECTORS] += a group's products. Few rows have two chains of sums, so that one need not wait for the other.
template <int ROWS, bool COLD>
INLINE void add_bytes(const int8_t* x, long stride, const uint8_t* columns, long inputs, Ints dots[][VECTORS]) {
    for (long k = 0; k < inputs; k += 4, columns += COLUMNS * 4)
        for (int v = 0; v < VECTORS; v++) {
            if (COLD) __builtin_prefetch(columns + AHEAD + v * VECTOR_BYTES);
            const Bytes weights = load_as<Bytes>(columns + v * VECTOR_BYTES);
            for (int r = 0; r < ROWS; r++) dots[r][v] = add_byte_products(dots[r][v], x + r * stride + k, weights);
        }
}

template <int ROWS, bool COLD>
INLINE void add_halves(const int8_t* x, long stride, const uint8_t* columns, long inputs, Ints dots[][VECTORS]) {
    constexpr int CHAINS = ROWS <= 2 ? 2 : 1;
    Ints upper[ROWS][VECTORS] = {};
    for (long k = 0; k < inputs; k += 8, columns += COLUMNS * 4)
        for (int v = 0; v < VECTORS; v++) {
            if (COLD) __builtin_prefetch(columns + AHEAD + v * VECTOR_BYTES);
            const Ints both = load_as<Ints>(columns + v * VECTOR_BYTES);
            const Bytes low = reinterpret_cast<Bytes>(both & 0x0f0f0f0f);
            const Bytes high = reinterpret_cast<Bytes>(both >> 4 & 0x0f0f0f0f);
            for (int r = 0; r < ROWS; r++) {
                Ints& other = CHAINS == 2 ? upper[r][v] : dots[r][v];
                dots[r][v] = add_nibble_products(dots[r][v], x + r * stride + k, low);
                other = add_nibble_products(other, x + r * stride + k + 4, high);
            }
        }
    if (CHAINS == 2)
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++) dots[r][v] += upper[r][v];
}

// COLD: the panel comes from memory.
template <int ROWS, int BITS, bool COLD>
void multiply_rows(const Panel& panel, const RoundedRows& rounded, long first, float* out) {
    const long width = rounded.width, stride = rounded.stride;
    const int8_t* x = rounded.numbers + first * width;
    const float *scales = rounded.scales + first, *totals = rounded.totals + first;
    const int32_t* starts = rounded.starts + first;
    for (int column = 0; column < COLUMNS; column += VECTORS * LANES) {
        Floats sums[ROWS][VECTORS] = {};
        for (long g = 0; g < panel.groups; g++) {
            const long begin = g * panel.span, count = std::min(panel.span, panel.inputs - begin), place = g * stride;
            Ints dots[ROWS][VECTORS];
            for (int r = 0; r < ROWS; r++)
                for (int v = 0; v < VECTORS; v++) dots[r][v] = starts[place + r] - Ints{};
            const uint8_t* columns = panel.numbers + begin * COLUMNS * BITS / 8 + column * 4;
            if (BITS == 8)
                add_bytes<ROWS, COLD>(x + begin, width, columns, count, dots);
            else
                add_halves<ROWS, COLD>(x + begin, width, columns, count, dots);
            for (int v = 0; v < VECTORS; v++) {
                const Floats scale = panel.scale(g, column + v * LANES);
                for (int r = 0; r < ROWS; r++)
                    sums[r][v] = add_group(sums[r][v], dots[r][v], scale, scales[place + r]);
                if (panel.minimums) {
                    const Floats minimum = panel.minimum(g, column + v * LANES);
                    for (int r = 0; r < ROWS; r++)
                        sums[r][v] = take_minimum(sums[r][v], minimum, totals[place + r]);
                }
            }
        }
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++) store(out + r * COLUMNS + column + v * LANES, sums[r][v]);
    }
}

template <int BITS, bool COLD, int... ROWS>
INLINE void multiply_some(const Panel& panel, const RoundedRows& rounded, long first, long count, float* out,
                          std::integer_sequence<int, ROWS...>) {
    static_cast<void>(((count == ROWS + 1 && (multiply_rows<ROWS + 1, BITS, COLD>(panel, rounded, first, out), true)) || ...));
}

template <int BITS>
void multiply_all(const Panel& panel, const RoundedRows& rounded, long first, long count, float* sums) {
    constexpr auto choices = std::make_integer_sequence<int, MOST_ROWS>();
    for (long r = 0; r < count; r += MOST_ROWS, sums += MOST_ROWS * COLUMNS) {
        const long some = std::min<long>(MOST_ROWS, count - r);
        r == 0 ? multiply_some<BITS, true>(panel, rounded, first + r, some, sums, choices)
               : multiply_some<BITS, false>(panel, rounded, first + r, some, sums, choices);
    }
}

}  // namespace

void multiply_dots(const Panel& panel, const RoundedRows& rounded, long first, long count, float* sums) {
    panel.bits == 8 ? multiply_all<8>(panel, rounded, first, count, sums)
                    : multiply_all<4>(panel, rounded, first, count, sums);
}

}  // namespace anycore
