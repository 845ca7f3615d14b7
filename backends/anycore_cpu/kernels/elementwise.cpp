// What stands between the products: norms with their residuals, gates, activations. All of it in float32, row by row.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "interface.hpp"
#include "replay.hpp"
#include "threads.hpp"
#include "vectors.hpp"

namespace anycore {
namespace {

constexpr long TASK = 1L << 13;  // numbers a task should have, at least

// work(row) for all rows of `width` numbers.
template <class Work>
void for_rows(long rows, long width, const Work& work) {
    const long step = std::max(1L, TASK / std::max(width, 1L));
    parallel_for((rows + step - 1) / step, [&](long task) {
        for (long row = task * step; row < std::min(rows, (task + 1) * step); row++) work(row);
    });
}

// ---- norms -----------------------------------------------------------------------------------------------------------

template <class T>
void add_row(const T* a, const T* b, long width, T* out) {
    long i = 0;
    for (; i + LANES <= width; i += LANES) store(out + i, load(a + i) + load(b + i));
    for (; i < width; i++) store_one(out + i, widen(a[i]) + widen(b[i]));
}

// The sum of (x - mean) squared, or of x itself: in some chains, so that none of them waits for the sum before.
template <bool SQUARED, class T>
float total(const T* x, long width, float mean) {
    constexpr int CHAINS = 4;
    Floats sums[CHAINS] = {};
    float rest = 0;
    long i = 0;
    const auto add = [&](Floats& sum) {
        const Floats value = load(x + i) - mean;
        sum += SQUARED ? value * value : value;
        i += LANES;
    };
    while (i + CHAINS * LANES <= width)
        for (Floats& sum : sums) add(sum);
    while (i + LANES <= width) add(sums[0]);
    for (; i < width; i++) rest += SQUARED ? (widen(x[i]) - mean) * (widen(x[i]) - mean) : widen(x[i]) - mean;
    return sum((sums[0] + sums[1]) + (sums[2] + sums[3])) + rest;
}

template <class T>
void scale_row(const T* x, long width, float mean, float factor, const float* weight, const float* bias, T* out) {
    long i = 0;
    for (; i + LANES <= width; i += LANES) {
        const Floats value = (load(x + i) - mean) * factor * load(weight + i);
        store(out + i, bias ? value + load(bias + i) : value);
    }
    for (; i < width; i++) store_one(out + i, (widen(x[i]) - mean) * factor * weight[i] + (bias ? bias[i] : 0));
}

template <class T>
void norm(const T* x, const T* residual, const float* weight, const float* bias, float eps, long rows, long width,
          bool centred, T* sums, T* out) {
    for_rows(rows, width, [&](long row) {
        const T* from = x + row * width;
        if (residual) {
            add_row(from, residual + row * width, width, sums + row * width);
            from = sums + row * width;
        }
        const float size = static_cast<float>(width);
        const float mean = centred ? total<false>(from, width, 0) / size : 0;
        const float factor = 1 / std::sqrt(total<true>(from, width, mean) / size + eps);
        scale_row(from, width, mean, factor, weight, bias, out + row * width);
    });
}

// ---- activations -----------------------------------------------------------------------------------------------------

enum Kind { SILU, GELU, GELU_TANH, RELU };

// The normal distribution up to x, within 1e-7: Abramowitz and Stegun, 7.1.26.
INLINE Floats normal_below(Floats x) {
    const Floats size = (x < 0 ? -x : x) * 0.70710678f;
    const Floats t = 1.0f / (1.0f + 0.3275911f * size);
    Floats series = all(1.061405429f);
    series = series * t - 1.453152027f;
    series = series * t + 1.421413741f;
    series = series * t - 0.284496736f;
    series = series * t + 0.254829592f;
    const Floats beyond = 0.5f * series * t * exp(-size * size);
    return x < 0 ? beyond : 1.0f - beyond;
}

// x times normal_below(x) within 2e-6 for |x| < 16, for what will be rounded to bf16. A polynomial in x * x, which
// is brought to -1 ... 1; beyond 5 it goes on as a line.
INLINE Floats gelu_roughly(Floats x) {
    // From the highest power on. Neighbours are joined first, then pairs of them: a fourth of the steps that wait.
    constexpr float SERIES[] = {0.000492892636f, -0.00151408708f, 0.00200204318f, -0.00291582593f, 0.00616527209f,
                                -0.0109731061f,  0.0164977182f,   -0.0233367756f, 0.0314262211f,   -0.0404329449f,
                                0.0515214205f,   -0.0702966526f,  0.141363785f};
    const Floats above = x < all(-5.0f) ? all(-5.0f) : x;
    const Floats near = above > all(5.0f) ? all(5.0f) : above;
    const Floats square = near * near * 0.08f - 1.0f, fourth = square * square, eighth = fourth * fourth;
    const auto pair = [&](int i) { return SERIES[i] * square + SERIES[i + 1]; };
    const Floats low = (pair(9) * fourth + pair(11));
    const Floats middle = (pair(5) * fourth + pair(7));
    const Floats high = (SERIES[0] * fourth + pair(1)) * fourth + pair(3);
    const Floats series = (high * eighth + middle) * eighth + low;
    return above * (near * series + 0.5f);
}

template <int KIND, class T>
INLINE Floats activate(Floats x) {
    if (KIND == SILU) return x / (1.0f + exp(-x));
    if (KIND == GELU) return sizeof(T) == 2 ? gelu_roughly(x) : x * normal_below(x);
    if (KIND == GELU_TANH) return x / (1.0f + exp(-1.59576912f * (x + 0.044715f * x * x * x)));
    return x < 0 ? Floats{} : x;
}

// out[width] = activate(x) [* up].
template <int KIND, class T>
void activate_row(const T* x, const T* up, long width, T* out) {
    long i = 0;
    for (; i + LANES <= width; i += LANES) {
        const Floats value = activate<KIND, T>(load(x + i));
        store(out + i, up ? value * load(up + i) : value);
    }
    if (i < width) {
        Floats last{};
        for (long j = i; j < width; j++) last[j - i] = widen(x[j]);
        last = activate<KIND, T>(last);
        for (long j = i; j < width; j++) store_one(out + j, last[j - i] * (up ? widen(up[j]) : 1));
    }
}

template <class T>
void activation(const T* x, long rows, long width, int kind, bool gated, T* out) {
    const long stride = gated ? 2 * width : width;
    for_rows(rows, width, [&](long row) {
        const T* from = x + row * stride;
        const T* up = gated ? from + width : nullptr;
        T* to = out + row * width;
        switch (kind) {
            case SILU: return activate_row<SILU>(from, up, width, to);
            case GELU: return activate_row<GELU>(from, up, width, to);
            case GELU_TANH: return activate_row<GELU_TANH>(from, up, width, to);
            default: return activate_row<RELU>(from, up, width, to);
        }
    });
}

}  // namespace
}  // namespace anycore

extern "C" {

// out = norm(x + residual), sums = x + residual: rows of `width` numbers, bf16 or float if `wide`. `centred`: the mean
// is taken off first (LayerNorm), else it is the root mean square alone. Null: no residual, no bias.
void anycore_norm(const void* x, const void* residual, const float* weight, const float* bias, float eps, long rows,
                  long width, int centred, int wide, void* sums, void* out) {
    using namespace anycore;
    if (wide)
        norm(static_cast<const float*>(x), static_cast<const float*>(residual), weight, bias, eps, rows, width,
             centred != 0, static_cast<float*>(sums), static_cast<float*>(out));
    else
        norm(static_cast<const bf16*>(x), static_cast<const bf16*>(residual), weight, bias, eps, rows, width,
             centred != 0, static_cast<bf16*>(sums), static_cast<bf16*>(out));
}

// out [rows, width] = activation(x), times the second half of x's rows, which are then twice as long, if `gated`.
void anycore_activation(const void* x, long rows, long width, int kind, int gated, int wide, void* out) {
    using namespace anycore;
    if (wide)
        activation(static_cast<const float*>(x), rows, width, kind, gated != 0, static_cast<float*>(out));
    else
        activation(static_cast<const bf16*>(x), rows, width, kind, gated != 0, static_cast<bf16*>(out));
}

// Rows of so many bytes into longer ones, whose beginnings are `stride` bytes apart.
void anycore_place(const void* x, long rows, long bytes, long stride, void* out) {
    const char* from = static_cast<const char*>(x);
    char* to = static_cast<char*>(out);
    for (long row = 0; row < rows; row++)
        std::memcpy(to + row * stride, from + row * bytes, static_cast<size_t>(bytes));
}

}

RECORDED(anycore_norm)
RECORDED(anycore_activation)
RECORDED(anycore_place)
