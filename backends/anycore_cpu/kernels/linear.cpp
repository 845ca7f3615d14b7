// Linear layers: rows times a packed matrix.
#include <algorithm>

#include "interface.hpp"
#include "panels.hpp"
#include "replay.hpp"
#include "scratch.hpp"
#include "threads.hpp"

namespace anycore {
namespace {

constexpr long ROWS = 128;          // of a task: they stay in a core's cache while a panel passes by
constexpr long SERIAL = 1L << 18;   // products that are done before another thread has woken up

template <class T, class Out>
void finish(const float* sums, long rows, long columns, const T* bias, Out* out, long stride) {
    for (long r = 0; r < rows; r++, sums += COLUMNS, out += stride) {
        long c = 0;
        for (; c + LANES <= columns; c += LANES) {
            const Floats total = load(sums + c);
            store(out + c, bias ? total + load(bias + c) : total);
        }
        for (; c < columns; c++) store_one(out + c, sums[c] + (bias ? widen(bias[c]) : 0));
    }
}

template <class T, class Out>
void linear(const T* x, long rows, long stride, const T* packed, long inputs, long outputs, const T* bias, Out* out) {
    const long padded = padded_inputs<T>(inputs);
    static thread_local Scratch scratch;
    if (padded != inputs) {  // the kernel reads whole steps of inputs
        scratch.reserve(static_cast<size_t>(rows * padded) * sizeof(T), 1);
        T* copy = scratch.take<T>(rows * padded);
        for (long r = 0; r < rows; r++) {
            std::copy_n(x + r * stride, inputs, copy + r * padded);
            std::fill_n(copy + r * padded + inputs, padded - inputs, T{});
        }
        x = copy;
        stride = padded;
    }
    const long panels = (outputs + COLUMNS - 1) / COLUMNS;
    const long blocks = (rows + ROWS - 1) / ROWS;
    const auto task = [&](long index) {
        const long panel = index % panels, first = index / panels * ROWS;
        const long count = std::min(ROWS, rows - first), column = panel * COLUMNS;
        alignas(64) float sums[ROWS * COLUMNS];
        multiply(count, x + first * stride, stride, packed + panel * COLUMNS * padded, padded, sums, COLUMNS, false);
        finish(sums, count, std::min<long>(COLUMNS, outputs - column), bias ? bias + column : nullptr,
               out + first * outputs + column, outputs);
    };
    if (rows * padded * outputs < SERIAL)
        for (long i = 0; i < panels * blocks; i++) task(i);
    else
        parallel_for(panels * blocks, task);
}

// weight [outputs, inputs] with rows `stride` apart → panels. Rows are read as they lie, some inputs at a time, so that
// what is written meanwhile stays in the first cache.
template <class T>
void pack(const T* weight, long stride, long outputs, long inputs, T* packed) {
    constexpr long TOGETHER = sizeof(T) == 2 ? 2 : 1, SOME = 256;
    const long padded = padded_inputs<T>(inputs);
    parallel_for((outputs + COLUMNS - 1) / COLUMNS, [&](long panel) {
        T* to = packed + panel * COLUMNS * padded;
        const long columns = std::min<long>(COLUMNS, outputs - panel * COLUMNS), whole = inputs / TOGETHER * TOGETHER;
        if (columns < COLUMNS || whole < padded) std::fill_n(to, COLUMNS * padded, T{});
        for (long first = 0; first < inputs; first += SOME)
            for (long c = 0; c < columns; c++) {
                const T* from = weight + (panel * COLUMNS + c) * stride;
                const long end = std::min(whole, first + SOME);
                for (long k = first; k < end; k += TOGETHER)
                    std::memcpy(to + k * COLUMNS + c * TOGETHER, from + k, TOGETHER * sizeof(T));
                if (whole < inputs && first + SOME >= inputs) to[whole * COLUMNS + c * TOGETHER] = from[whole];
            }
    });
}

}  // namespace
}  // namespace anycore

extern "C" {

// Numbers that a packed matrix [outputs, inputs] has: of float if `wide`, else of bf16.
long anycore_packed_size(long outputs, long inputs, int wide) {
    using namespace anycore;
    return (outputs + COLUMNS - 1) / COLUMNS * COLUMNS * (wide ? padded_inputs<float>(inputs) : padded_inputs<bf16>(inputs));
}

// weight [outputs, inputs] with rows `stride` apart → panels.
void anycore_pack(const void* weight, long stride, long outputs, long inputs, int wide, void* packed) {
    using namespace anycore;
    wide ? pack(static_cast<const float*>(weight), stride, outputs, inputs, static_cast<float*>(packed))
         : pack(static_cast<const bf16*>(weight), stride, outputs, inputs, static_cast<bf16*>(packed));
}

// out [rows, outputs] = x [rows, inputs] times the matrix, plus bias if there is one. `wide`: x, matrix and bias are of
// float, else of bf16; out is of float if either is said to be wide.
void anycore_linear(const void* x, long rows, long stride, const void* packed, long inputs, long outputs,
                    const void* bias, void* out, int wide, int wide_out) {
    using namespace anycore;
    const auto* narrow = static_cast<const bf16*>(x);
    const auto *matrix = static_cast<const bf16*>(packed), *added = static_cast<const bf16*>(bias);
    if (wide)
        linear(static_cast<const float*>(x), rows, stride, static_cast<const float*>(packed), inputs, outputs,
               static_cast<const float*>(bias), static_cast<float*>(out));
    else if (wide_out)
        linear(narrow, rows, stride, matrix, inputs, outputs, added, static_cast<float*>(out));
    else
        linear(narrow, rows, stride, matrix, inputs, outputs, added, static_cast<bf16*>(out));
}

}

RECORDED(anycore_linear)
