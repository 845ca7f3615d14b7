// Linear layers whose matrix is quantised: rows are rounded, then multiplied by panel after panel.
#include <algorithm>
#include <climits>

#include "interface.hpp"
#include "quantised.hpp"
#include "replay.hpp"
#include "scratch.hpp"
#include "threads.hpp"

namespace anycore {
namespace {

constexpr long ROWS = 256;              // of a task: they stay in a core's second cache while panels pass by
constexpr long RUN = 8;                 // panels of a task at most
constexpr long TASKS = 4;               // of each thread, before any has more than one panel
constexpr long ROUNDED = 512;           // rows at a time, so that they take little memory
constexpr long SERIAL = 1L << 17;       // products that are done before another thread has woken up
constexpr long SERIAL_ROWS = 1L << 15;  // numbers that are rounded before another thread has
constexpr long TOGETHER = 16;           // rows whose scales share a cache line: threads would take it from each other
[[maybe_unused]] constexpr long TILE_ROWS = 8;  // fewer are multiplied sooner by dot products: the results are equal

void multiply_panel(const Panel& panel, const RoundedRows& rounded, long first, long count, Passing passing,
                    float* sums, const Finish& finish) {
#if defined(__AMX_INT8__)
    if (count >= TILE_ROWS) return multiply_tiles(panel, rounded, first, count, sums, finish);
#endif
    multiply_dots(panel, rounded, first, count, passing, sums, finish);
}

template <class Out>
void finish(const float* sums, long rows, long columns, float factor, const bf16* bias, Out* out, long stride) {
    if (columns == COLUMNS) {
        constexpr int VECTORS = COLUMNS / LANES;
        Floats added[VECTORS];
        for (int v = 0; v < VECTORS; v++) added[v] = bias ? load(bias + v * LANES) : all(-0.0f);
        for (long r = 0; r < rows; r++, sums += COLUMNS, out += stride)
            for (int v = 0; v < VECTORS; v++) store(out + v * LANES, load(sums + v * LANES) * factor + added[v]);
        return;
    }
    for (long r = 0; r < rows; r++, sums += COLUMNS, out += stride) {
        long c = 0;
        for (; c + LANES <= columns; c += LANES) {
            const Floats total = load(sums + c) * factor;
            store(out + c, bias ? total + load(bias + c) : total);
        }
        for (; c < columns; c++) {
            const float total = sums[c] * factor;
            store_one(out + c, bias ? total + widen(bias[c]) : total);
        }
    }
}

// Panels of a task: as many as may be, or up to half as many if threads that are equally fast then end sooner.
long run_of(long panels, long blocks, long threads) {
    const long most = std::max(1L, std::min(RUN, panels * blocks / (TASKS * threads)));
    long best = most, least = LONG_MAX;
    for (long run = most; run > 0 && 2 * run >= most; run--) {
        const long tasks = (panels + run - 1) / run * blocks, last = (tasks + threads - 1) / threads * run;
        if (last < least) best = run, least = last;
    }
    return best;
}

template <class Out>
void some_rows(const Quantised& matrix, const bf16* x, long rows, long stride, const bf16* bias, Out* out) {
    static thread_local Scratch scratch;
    const long width = RoundedRows::width_of(matrix), groups = matrix.groups(), lined = (rows + 15) / 16 * 16;
    scratch.reserve(static_cast<size_t>(rows * width + groups * lined * 12), 4);
    const RoundedRows rounded = {scratch.take<int8_t>(rows * width), scratch.take<float>(groups * lined),
                                 scratch.take<float>(groups * lined), scratch.take<int32_t>(groups * lined), width,
                                 lined};
    const auto round = [&](long task) {
        for (long r = task * TOGETHER; r < std::min(rows, (task + 1) * TOGETHER); r++)
            round_row(matrix, x + r * stride, r, rounded);
    };
    const long rounds = (rows + TOGETHER - 1) / TOGETHER;
    if (rows * width < SERIAL_ROWS)
        for (long i = 0; i < rounds; i++) round(i);
    else
        parallel_for(rounds, round);
    for (long g = 0; g < groups; g++)
        for (long r = rows; r < lined; r++) rounded.scales[g * lined + r] = rounded.totals[g * lined + r] = 0;

    const long panels = matrix.panels(), blocks = (rows + ROWS - 1) / ROWS;
    const bool serial = rows * width * matrix.outputs < SERIAL;
    const long run = serial ? std::min(RUN, panels) : run_of(panels, blocks, thread_count());
    const long runs = (panels + run - 1) / run;
    const long others = serial ? 0 : thread_count() - 1;  // have most likely taken the runs behind this one
    const auto task = [&](long index) {
        index = runs * blocks - 1 - index;  // they are taken from the last one on
        const long first = index / runs * ROWS, begin = index % runs * run, end = std::min(panels, begin + run);
        const long count = std::min(ROWS, rows - first);
        alignas(64) float sums[ROWS * COLUMNS];
        for (long panel = begin; panel < end; panel++) {
            const long column = panel * COLUMNS, columns = std::min<long>(COLUMNS, matrix.outputs - column);
            const auto done = [&](long row, long some) {
                finish(sums + row * COLUMNS, some, columns, matrix.factor, bias ? bias + column : nullptr,
                       out + (first + row) * matrix.outputs + column, matrix.outputs);
            };
            const long next = panel + 1 < end ? panel + 1 : panel + 1 + others * run;
            const Passing passing = {panel == begin, next < panels ? (next - panel) * matrix.panel() : 0};
            multiply_panel(Panel(matrix, panel), rounded, first, count, passing, sums, Finish(done));
        }
    };
    if (serial)
        for (long i = 0; i < runs * blocks; i++) task(i);
    else
        parallel_for(runs * blocks, task);
}

template <class Out>
void linear(const Quantised& matrix, const bf16* x, long rows, long stride, const bf16* bias, Out* out) {
    for (long r = 0; r < rows; r += ROUNDED)
        some_rows(matrix, x + r * stride, std::min(ROUNDED, rows - r), stride, bias, out + r * matrix.outputs);
}

}  // namespace
}  // namespace anycore

// out [rows, outputs] = x [rows, inputs] times the matrix, plus bias if there is one; out is float if `wide`.
extern "C" void anycore_quantised_linear(const anycore::Quantised* matrix, const uint16_t* x, long rows, long stride,
                                         const uint16_t* bias, void* out, int wide) {
    using namespace anycore;
    if (wide)
        linear(*matrix, x, rows, stride, bias, static_cast<float*>(out));
    else
        linear(*matrix, x, rows, stride, bias, static_cast<bf16*>(out));
}

RECORDED(anycore_quantised_linear)
