// Linear layers: rows times a packed matrix.
#include <algorithm>

#include "panels.hpp"
#include "scratch.hpp"
#include "threads.hpp"

namespace anycore {
namespace {

constexpr long ROWS = 128;          // of a task: they stay in a core's cache while a panel passes by
constexpr long SERIAL = 1L << 18;   // products that are done before another thread has woken up

template <class Out>
void finish(const float* sums, long rows, long columns, const bf16* bias, Out* out, long stride) {
    for (long r = 0; r < rows; r++, sums += COLUMNS, out += stride) {
        long c = 0;
        for (; c + LANES <= columns; c += LANES) {
            const Floats total = load(sums + c);
            store(out + c, bias ? total + load(bias + c) : total);
        }
        for (; c < columns; c++) store_one(out + c, sums[c] + (bias ? widen(bias[c]) : 0));
    }
}

template <class Out>
void linear(const bf16* x, long rows, long stride, const bf16* packed, long inputs, long outputs, const bf16* bias,
            Out* out) {
    const long padded = padded_inputs<bf16>(inputs);
    static thread_local Scratch scratch;
    if (padded != inputs) {  // the kernel reads whole steps of inputs
        scratch.reserve(static_cast<size_t>(rows * padded) * sizeof(bf16), 1);
        bf16* copy = scratch.take<bf16>(rows * padded);
        for (long r = 0; r < rows; r++) {
            std::copy_n(x + r * stride, inputs, copy + r * padded);
            std::fill_n(copy + r * padded + inputs, padded - inputs, bf16{0});
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

}  // namespace
}  // namespace anycore

extern "C" {

// Numbers that a packed matrix [outputs, inputs] has.
long anycore_packed_size(long outputs, long inputs) {
    using namespace anycore;
    return (outputs + COLUMNS - 1) / COLUMNS * COLUMNS * padded_inputs<bf16>(inputs);
}

// weight [outputs, inputs] with rows `stride` apart → panels.
void anycore_pack(const uint16_t* weight, long stride, long outputs, long inputs, uint16_t* packed) {
    using namespace anycore;
    const long padded = padded_inputs<bf16>(inputs);
    parallel_for((outputs + COLUMNS - 1) / COLUMNS, [&](long panel) {
        bf16* to = packed + panel * COLUMNS * padded;
        for (long k = 0; k < padded; k++)
            for (long c = 0; c < COLUMNS; c++) {
                const long row = panel * COLUMNS + c;
                to[k / 2 * COLUMNS * 2 + c * 2 + k % 2] = row < outputs && k < inputs ? weight[row * stride + k] : 0;
            }
    });
}

// out [rows, outputs] = x [rows, inputs] times the matrix, plus bias if there is one; out is float if `wide`.
void anycore_linear(const uint16_t* x, long rows, long stride, const uint16_t* packed, long inputs, long outputs,
                    const uint16_t* bias, void* out, int wide) {
    using namespace anycore;
    if (wide)
        linear(x, rows, stride, packed, inputs, outputs, bias, static_cast<float*>(out));
    else
        linear(x, rows, stride, packed, inputs, outputs, bias, static_cast<bf16*>(out));
}

}
