// Linear layers: rows times a packed matrix.
#include <algorithm>

#include "interface.hpp"
#include "panels.hpp"
#include "replay.hpp"
#include "scratch.hpp"
#include "threads.hpp"

namespace anycore {
namespace {

constexpr long SERIAL = 1L << 18;          // products that are done before another thread has woken up
constexpr long ROWS_BYTES = 512L << 10;    // of a task: they stay in a core's second cache while panels pass by
constexpr long PANELS_BYTES = 256L << 10;  // of a task: they stay there while blocks of rows pass by
constexpr long TASKS = 32;                 // that there should be before any becomes larger

template <class T, class Out>
void finish(const float* sums, long rows, long columns, const T* bias, Out* out, long stride) {
    if (columns == COLUMNS) {
        constexpr int VECTORS = COLUMNS / LANES;
        Floats added[VECTORS];
        for (int v = 0; v < VECTORS; v++) added[v] = bias ? load(bias + v * LANES) : Floats{};
        for (long r = 0; r < rows; r++, sums += COLUMNS, out += stride)
            for (int v = 0; v < VECTORS; v++) store(out + v * LANES, load(sums + v * LANES) + added[v]);
        return;
    }
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
    if (rows == 0) return;  // a chunk none of whose rows is wanted
    const long padded = padded_inputs<T>(inputs);
    const bool serial = rows * padded * outputs < SERIAL;
    const auto each = [serial](long count, const auto& task) {
        if (!serial) return parallel_for(count, task);
        for (long i = 0; i < count; i++) task(i);
    };
    if (IN_TILES<T> || padded != inputs) {
        static thread_local Scratch scratch;
        scratch.reserve(static_cast<size_t>(rows * padded) * sizeof(T), 1);
        T* copy = scratch.take<T>(rows * padded);
        each((rows + BLOCK - 1) / BLOCK, [=](long block) {
            const long first = block * BLOCK;
            lay_out(x + first * stride, std::min(BLOCK, rows - first), stride, inputs, copy + first * padded);
        });
        x = copy;
        stride = padded;
    }
    const long row_bytes = padded * static_cast<long>(sizeof(T));
    const long panels = (outputs + COLUMNS - 1) / COLUMNS, blocks = (rows + BLOCK - 1) / BLOCK;
    const long most = std::max(1L, ROWS_BYTES / (row_bytes * BLOCK)), parts = (blocks + most - 1) / most;
    const long together = (blocks + parts - 1) / parts * BLOCK, chunks = (rows + together - 1) / together;
    const long run = std::max(1L, std::min(PANELS_BYTES / (row_bytes * COLUMNS), panels * chunks / TASKS));
    const long runs = (panels + run - 1) / run;
    each(runs * chunks, [=](long index) {
        index = runs * chunks - 1 - index;  // they are taken from the last one on
        const long first_row = index / runs * together, first_panel = index % runs * run;
        const long last_row = std::min(rows, first_row + together), last_panel = std::min(panels, first_panel + run);
        alignas(64) float sums[BLOCK * COLUMNS];
        Blocks product;
        for (long row = first_row; row < last_row; row += BLOCK)
            for (long panel = first_panel; panel < last_panel; panel++) {
                const long count = std::min(BLOCK, last_row - row), column = panel * COLUMNS;
                product.multiply(count, x + row * stride, stride, packed + column * padded, padded, sums,
                                 row == first_row);
                finish(sums, count, std::min<long>(COLUMNS, outputs - column), bias ? bias + column : nullptr,
                       out + row * outputs + column, outputs);
            }
    });
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
