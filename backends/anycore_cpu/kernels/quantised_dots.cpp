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
constexpr int SMALLEST = 16;  // inputs of a group: all are multiples of it

constexpr long SLICE = 16L << 10;  // bytes of a panel that stay in the first cache while rows pass by
constexpr long AHEAD = 4096;       // bytes of a panel that comes from memory, asked for before their turn
constexpr int QUARTERS = 4;        // in which a panel is asked for while rows pass another one

// While a group is multiplied, so many quarters of as long a run of bytes are asked for, `ahead` bytes from it on. They
// go into the second cache: the first one has fewer places for what is on its way, and holds what is used now.
template <int ASKED, int BITS>
INLINE void ask(const uint8_t* columns, long ahead) {
    constexpr int LINES = ASKED * SMALLEST * COLUMNS * BITS / 8 / 64 / QUARTERS;
    for (int i = 0; i < LINES; i++) __builtin_prefetch(columns + ahead + i * 64, 0, 2);
}

// dots[ROWS][VECTORS] += a group's products. Four bytes of a row meet all columns at once: they are spread out only once.
template <int ROWS, int ASKED>
INLINE void add_bytes(const int8_t* x, long stride, const uint8_t* columns, long inputs, long ahead,
                      Ints dots[][VECTORS]) {
    for (long k = 0; k < inputs; k += SMALLEST) {
        ask<ASKED, 8>(columns, ahead);
#pragma GCC unroll 4
        for (int i = 0; i < SMALLEST; i += 4, columns += COLUMNS * 4) {
            Bytes weights[VECTORS];
            for (int v = 0; v < VECTORS; v++)
                weights[v] = ready_weights(load_as<Bytes>(columns + v * VECTOR_BYTES));
            for (int r = 0; r < ROWS; r++) {
                const Bytes bytes = four_bytes(x + r * stride + k + i);
                for (int v = 0; v < VECTORS; v++) dots[r][v] = add_byte_products(dots[r][v], bytes, weights[v]);
            }
        }
    }
}

template <int ROWS, int ASKED>
INLINE void add_halves(const int8_t* x, long stride, const uint8_t* columns, long inputs, long ahead,
                       Ints dots[][VECTORS]) {
    constexpr int CHAINS = ROWS <= 2 ? 2 : 1;  // few rows have two chains of sums: one need not wait for the other
    Ints upper[ROWS][VECTORS] = {};
    for (long k = 0; k < inputs; k += 8, columns += COLUMNS * 4) {
        if (k % SMALLEST == 0) ask<ASKED, 4>(columns, ahead);
        Ints both[VECTORS];
        for (int v = 0; v < VECTORS; v++) both[v] = load_as<Ints>(columns + v * VECTOR_BYTES);
        const auto add = [&](int half, Ints sums[][VECTORS]) {
            Bytes weights[VECTORS];
            for (int v = 0; v < VECTORS; v++) weights[v] = reinterpret_cast<Bytes>(both[v] >> 4 * half & 0x0f0f0f0f);
            for (int r = 0; r < ROWS; r++) {
                const Bytes bytes = four_bytes(x + r * stride + k + 4 * half);
                for (int v = 0; v < VECTORS; v++) sums[r][v] = add_nibble_products(sums[r][v], bytes, weights[v]);
            }
        };
        add(0, dots);
        add(1, CHAINS == 2 ? upper : dots);
    }
    if (CHAINS == 2)
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++) dots[r][v] += upper[r][v];
}

// out[ROWS][32] (+)= groups first_group … last_group.
template <int ROWS, int BITS, int ASKED>
void multiply_rows(const Panel& panel, const RoundedRows& rounded, long first, long first_group, long last_group,
                   long ahead, float* out) {
    const long width = rounded.width, stride = rounded.stride;
    const int8_t* x = rounded.numbers + first * width;
    const float *scales = rounded.scales + first, *totals = rounded.totals + first;
    const int32_t* starts = rounded.starts + first;
    for (int column = 0; column < COLUMNS; column += VECTORS * LANES) {
        Floats sums[ROWS][VECTORS];
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++)
                sums[r][v] = first_group ? load(out + r * COLUMNS + column + v * LANES) : Floats{};
        for (long g = first_group; g < last_group; g++) {
            const long begin = g * panel.span, count = std::min(panel.span, panel.inputs - begin), place = g * stride;
            Ints dots[ROWS][VECTORS];
            for (int r = 0; r < ROWS; r++)
                for (int v = 0; v < VECTORS; v++) dots[r][v] = starts[place + r] - Ints{};
            const uint8_t* columns = panel.numbers + begin * COLUMNS * BITS / 8 + column * 4;
            if (BITS == 8)
                add_bytes<ROWS, ASKED>(x + begin, width, columns, count, ahead, dots);
            else
                add_halves<ROWS, ASKED>(x + begin, width, columns, count, ahead, dots);
            for (int v = 0; v < VECTORS; v++) {
                const Floats scale = panel.scale(g, column + v * LANES);
                for (int r = 0; r < ROWS; r++)
                    sums[r][v] = add_group(sums[r][v], dots[r][v], scale, scales[place + r]);
                if (BITS == 4 && panel.minimums) {
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

template <int BITS, int ASKED, int... ROWS>
INLINE void multiply_some(const Panel& panel, const RoundedRows& rounded, long first, long count, long first_group,
                          long last_group, long ahead, float* out, std::integer_sequence<int, ROWS...>) {
    static_cast<void>(((count == ROWS + 1 && (multiply_rows<ROWS + 1, BITS, ASKED>(panel, rounded, first, first_group,
                                                                                  last_group, ahead, out),
                                              true)) ||
                       ...));
}

// Blocks of rows pass a slice of the panel after the other. The first block of all asks for the panel if that is cold;
// the next ones ask for what comes after it.
template <int BITS>
void multiply_all(const Panel& panel, const RoundedRows& rounded, long first, long count, Passing passing,
                  float* sums, const Finish& finish) {
    constexpr auto choices = std::make_integer_sequence<int, MOST_ROWS>();
    constexpr long QUARTER = SMALLEST * COLUMNS * BITS / 8 / QUARTERS;
    const long blocks = (count + MOST_ROWS - 1) / MOST_ROWS;
    const long some = blocks == 1 ? panel.groups : std::max(1L, SLICE * 8 / (BITS * COLUMNS * panel.span));
    for (long group = 0; group < panel.groups; group += some) {
        const long last = std::min(panel.groups, group + some);
        for (long block = 0; block < blocks; block++) {
            const long r = block * MOST_ROWS, rows = std::min<long>(MOST_ROWS, count - r);
            float* out = sums + r * COLUMNS;
            const auto multiply = [&](auto asked, long ahead) {
                multiply_some<BITS, decltype(asked)::value>(panel, rounded, first + r, rows, group, last, ahead, out,
                                                            choices);
            };
            const long asking = block - (passing.cold ? 1 : 0), sharing = blocks - (passing.cold ? 1 : 0);
            const auto ask_next = [&](auto asked, long quarter) { multiply(asked, passing.next + quarter * QUARTER); };
            if (asking < 0)
                multiply(std::integral_constant<int, QUARTERS>(), AHEAD);
            else if (!passing.next || asking >= QUARTERS)
                multiply(std::integral_constant<int, 0>(), 0);
            else if (sharing == 1)
                ask_next(std::integral_constant<int, QUARTERS>(), 0);
            else if (sharing == 2)
                ask_next(std::integral_constant<int, 2>(), 2 * asking);
            else if (sharing == 3 && asking == 0)
                ask_next(std::integral_constant<int, 2>(), 0);
            else
                ask_next(std::integral_constant<int, 1>(), sharing == 3 ? asking + 1 : asking);
            if (last == panel.groups) finish(r, rows);
        }
    }
}

}  // namespace

void multiply_dots(const Panel& panel, const RoundedRows& rounded, long first, long count, Passing passing,
                   float* sums, const Finish& finish) {
    panel.bits == 8 ? multiply_all<8>(panel, rounded, first, count, passing, sums, finish)
                    : multiply_all<4>(panel, rounded, first, count, passing, sums, finish);
}

}  // namespace anycore
