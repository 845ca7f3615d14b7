// The product of rows and a panel: in registers, or in the tiles of AMX.
#include "panels.hpp"

#include <algorithm>

#include "tiles.hpp"

namespace anycore {
namespace {

#if defined(__AVX512F__)
constexpr int PANEL_ROWS = 12, PANEL_VECTORS = 2;  // 24 sums in registers
#elif defined(__ARM_FEATURE_BF16)
constexpr int PANEL_ROWS = 6, PANEL_VECTORS = 4;  // 24 sums in 32 registers
#elif defined(__aarch64__)
constexpr int PANEL_ROWS = 5, PANEL_VECTORS = 4;  // 20 sums in 32 registers: a column of bf16 is widened into two
#else
constexpr int PANEL_ROWS = 4, PANEL_VECTORS = 2;  // 8 sums in 16 registers
#endif

constexpr long AHEAD = 8192;  // bytes of a panel that comes from memory, asked for before their turn

// out[ROWS][32] (+)= x[ROWS][inputs] * panel. COLD: the panel comes from memory.
template <int ROWS, bool COLD, class T>
void multiply_rows(const T* x, long stride, const T* panel, long inputs, float* out, long out_stride, bool add) {
    constexpr int TOGETHER = sizeof(T) == 2 ? 2 : 1;
    for (int first = 0; first < COLUMNS; first += PANEL_VECTORS * LANES) {
        Floats totals[ROWS][PANEL_VECTORS];
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < PANEL_VECTORS; v++)
                totals[r][v] = add ? load(out + r * out_stride + first + v * LANES) : Floats{};
        for (long k = 0; k < inputs; k += TOGETHER) {
            const T* columns = panel + k * COLUMNS + first * TOGETHER;
            for (int v = 0; COLD && v < PANEL_VECTORS; v++)
                __builtin_prefetch(reinterpret_cast<const char*>(columns) + AHEAD + v * VECTOR_BYTES, 0, 2);  // second cache
            for (int r = 0; r < ROWS; r++)
                for (int v = 0; v < PANEL_VECTORS; v++)
                    totals[r][v] = add_products(totals[r][v], x + r * stride + k, columns + v * LANES * TOGETHER);
        }
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < PANEL_VECTORS; v++) store(out + r * out_stride + first + v * LANES, totals[r][v]);
    }
}

template <bool COLD, class T, int... ROWS>
INLINE void multiply_some(long rows, const T* x, long stride, const T* panel, long inputs, float* out, long out_stride,
                          bool add, std::integer_sequence<int, ROWS...>) {
    static_cast<void>(((rows == ROWS + 1 &&
                        (multiply_rows<ROWS + 1, COLD>(x, stride, panel, inputs, out, out_stride, add), true)) ||
                       ...));
}

template <class T>
INLINE void multiply_all(long rows, const T* x, long stride, const T* panel, long inputs, float* out, long out_stride,
                         bool add, bool cold) {
    constexpr auto choices = std::make_integer_sequence<int, PANEL_ROWS>();
    for (long r = 0; r < rows; r += PANEL_ROWS, cold = false) {
        const long some = rows - r < PANEL_ROWS ? rows - r : PANEL_ROWS;
        const T* from = x + r * stride;
        float* to = out + r * out_stride;
        cold ? multiply_some<true>(some, from, stride, panel, inputs, to, out_stride, add, choices)
             : multiply_some<false>(some, from, stride, panel, inputs, to, out_stride, add, choices);
    }
}

#if defined(__AMX_BF16__)

template <bool TWO>
void multiply_tiles(const bf16* x, long stride, const bf16* panel, long inputs, float* out, long out_stride, bool add) {
    constexpr int PANEL_STRIDE = COLUMNS * 4;  // bytes
    const long x_stride = stride * 2, to_stride = out_stride * 4;
    if (add) {
        _tile_loadd(0, out, to_stride);
        _tile_loadd(1, out + 16, to_stride);
        if (TWO) {
            _tile_loadd(2, out + 16 * out_stride, to_stride);
            _tile_loadd(3, out + 16 * out_stride + 16, to_stride);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (long k = 0; k < inputs; k += 32) {
        _tile_loadd(6, panel + k * COLUMNS, PANEL_STRIDE);
        _tile_loadd(7, panel + k * COLUMNS + 32, PANEL_STRIDE);
        _tile_loadd(4, x + k, x_stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (TWO) {
            _tile_loadd(5, x + 16 * stride + k, x_stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, out, to_stride);
    _tile_stored(1, out + 16, to_stride);
    if (TWO) {
        _tile_stored(2, out + 16 * out_stride, to_stride);
        _tile_stored(3, out + 16 * out_stride + 16, to_stride);
    }
}

constexpr long TILES_AHEAD = 8192;  // bytes of panels that are on their way from memory

template <long FROM, int... LINES>
INLINE void prefetch(const void* place, std::integer_sequence<int, LINES...>) {
    (__builtin_prefetch(static_cast<const char*>(place) + FROM + LINES * 64, 0, 2), ...);  // into the second cache
}

// out[upper + lower][32] = the product of rows in tiles and a panel.
template <bool TWO, bool COLD>
void multiply_block(const bf16* x, long upper, long lower, const bf16* panel, long inputs, float* out) {
    constexpr int STRIDE = COLUMNS * 4;  // bytes
    const bf16* below = x + upper * inputs;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long k = 0; k < inputs; k += 32) {
        const bf16* columns = panel + k * COLUMNS;
        _tile_loadd(6, columns, STRIDE);
        _tile_loadd(7, columns + 32, STRIDE);
        _tile_loadd(4, x + k * upper, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (TWO) {
            _tile_loadd(5, below + k * lower, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        if (COLD) prefetch<TILES_AHEAD>(columns, std::make_integer_sequence<int, 32>());
    }
    _tile_stored(0, out, STRIDE);
    _tile_stored(1, out + 16, STRIDE);
    if (TWO) {
        _tile_stored(2, out + 16 * COLUMNS, STRIDE);
        _tile_stored(3, out + 16 * COLUMNS + 16, STRIDE);
    }
}

#endif

template <class T>
void copy_padded(const T* x, long rows, long stride, long inputs, T* out) {
    const long padded = padded_inputs<T>(inputs);
    for (long r = 0; r < rows; r++, x += stride, out += padded) {
        std::copy_n(x, inputs, out);
        std::fill_n(out + inputs, padded - inputs, T{});
    }
}

}  // namespace

void multiply(long rows, const float* x, long stride, const float* panel, long inputs, float* out,
              long out_stride, bool add) {
    multiply_all(rows, x, stride, panel, inputs, out, out_stride, add, false);
}

void multiply(long rows, const bf16* x, long stride, const bf16* panel, long inputs, float* out,
              long out_stride, bool add) {
#if defined(__AMX_BF16__)
    for (long r = 0; r < rows; r += 32) {
        const int upper = static_cast<int>(rows - r < 16 ? rows - r : 16);
        const int lower = static_cast<int>(rows - r < 16 ? 0 : rows - r < 32 ? rows - r - 16 : 16);
        if (r == 0 || upper + lower < 32) shape_tiles(upper, lower);
        const bf16* from = x + r * stride;
        float* to = out + r * out_stride;
        lower > 0 ? multiply_tiles<true>(from, stride, panel, inputs, to, out_stride, add)
                  : multiply_tiles<false>(from, stride, panel, inputs, to, out_stride, add);
    }
    _tile_release();
#else
    multiply_all(rows, x, stride, panel, inputs, out, out_stride, add, false);
#endif
}

void lay_out(const float* x, long rows, long stride, long inputs, float* out) {
    copy_padded(x, rows, stride, inputs, out);
}

void lay_out(const bf16* x, long rows, long stride, long inputs, bf16* out) {
#if defined(__AMX_BF16__)
    for (; rows > 0; rows -= 16, x += 16 * stride) {
        const long height = rows < 16 ? rows : 16;
        for (long k = 0; k < inputs; k += 32)
            for (long r = 0; r < height; r++, out += 32) {
                const auto there = inputs - k < 32 ? _cvtu32_mask32((1U << (inputs - k)) - 1) : ~__mmask32{};
                _mm512_store_si512(out, _mm512_maskz_loadu_epi16(there, x + r * stride + k));
            }
    }
#else
    copy_padded(x, rows, stride, inputs, out);
#endif
}

void Blocks::multiply(long rows, const float* x, long stride, const float* panel, long inputs, float* out, bool cold) {
    multiply_all(rows, x, stride, panel, inputs, out, COLUMNS, false, cold);
}

#if defined(__AMX_BF16__)

void Blocks::multiply(long rows, const bf16* x, long, const bf16* panel, long inputs, float* out, bool cold) {
    const long upper = rows < 16 ? rows : 16, lower = rows - upper;
    if (shaped_ != rows) shape_tiles(static_cast<int>(upper), static_cast<int>(lower));
    shaped_ = rows;
    const auto product = lower > 0 ? cold ? multiply_block<true, true> : multiply_block<true, false>
                         : cold    ? multiply_block<false, true>
                                   : multiply_block<false, false>;
    product(x, upper, lower, panel, inputs, out);
}

Blocks::~Blocks() {
    if (shaped_ > 0) _tile_release();
}

#else

void Blocks::multiply(long rows, const bf16* x, long stride, const bf16* panel, long inputs, float* out, bool cold) {
    multiply_all(rows, x, stride, panel, inputs, out, COLUMNS, false, cold);
}

Blocks::~Blocks() = default;

#endif

}  // namespace anycore
