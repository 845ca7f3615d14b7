// Quantised matrices put into panels, and rows taken out of them again.
#include <algorithm>
#include <cmath>

#include "interface.hpp"
#include "quantised.hpp"
#include "replay.hpp"
#include "threads.hpp"

namespace anycore {
namespace {

// Where a panel's number for (input, column) lies; of 4 bits, in which half of the byte.
INLINE long place(const Quantised& matrix, long k, long column) {
    return matrix.bits == 8 ? k / 4 * COLUMNS * 4 + column * 4 + k % 4 : k / 8 * COLUMNS * 4 + column * 4 + k % 4;
}

INLINE bool upper_half(long k) { return k % 8 >= 4; }

void pack_column(const Quantised& matrix, const uint8_t* row, uint8_t* panel, long column) {
    const long padded = matrix.padded();
    const auto number = [&](long k) { return k < matrix.inputs ? row[k] : uint8_t{0}; };
    if (matrix.bits == 8) {
        for (long k = 0; k < padded; k++) panel[place(matrix, k, column)] = number(k) ^ STORED_OFFSET;
    } else {
        for (long k = 0; k < padded; k += 8)
            for (int i = 0; i < 4; i++)
                panel[place(matrix, k + i, column)] =
                    static_cast<uint8_t>((number(k + i) & 15) | number(k + i + 4) << 4);
    }
}

template <class Number>
void pack_groups(const Quantised& matrix, const Number* from, long panel, uint8_t* to) {
    auto* numbers = reinterpret_cast<Number*>(to);
    for (long column = 0; column < COLUMNS; column++) {
        const long row = panel * COLUMNS + column;
        for (long g = 0; g < matrix.groups(); g++)
            numbers[g * COLUMNS + column] = row < matrix.outputs ? from[row * matrix.groups() + g] : Number{0};
    }
}

template <class Out>
void unpack_row(const Quantised& matrix, long row, Out* out) {
    const Panel panel(matrix, row / COLUMNS);
    const long column = row % COLUMNS;
    const int first = static_cast<int>(column / LANES * LANES), lane = static_cast<int>(column % LANES);
    for (long g = 0, k = 0; k < matrix.inputs; g++) {
        const float scale = panel.scale(g, first)[lane] * matrix.factor;
        const float minimum = matrix.minimums ? panel.minimum(g, first)[lane] * matrix.factor : 0;
        for (const long end = std::min<long>(matrix.inputs, k + panel.span); k < end; k++) {
            const uint8_t bits = panel.numbers[place(matrix, k, column)];
            const int number = matrix.bits == 8 ? static_cast<int8_t>(bits ^ STORED_OFFSET) : (upper_half(k) ? bits >> 4 : bits & 15) - 8;
            store_one(out + k, static_cast<float>(number) * scale - minimum);
        }
    }
}

template <class Out>
void unpack_rows(const Quantised& matrix, const int64_t* rows, long count, Out* out) {
    constexpr long SERIAL = 1L << 14;  // numbers
    const auto task = [&](long i) {
        if (rows[i] >= 0 && rows[i] < matrix.outputs)
            unpack_row(matrix, rows[i], out + i * matrix.inputs);
        else
            for (long k = 0; k < matrix.inputs; k++) store_one(out + i * matrix.inputs + k, NAN);
    };
    if (count * matrix.inputs < SERIAL)
        for (long i = 0; i < count; i++) task(i);
    else
        parallel_for(count, task);
}

}  // namespace
}  // namespace anycore

extern "C" {

// Bytes that the matrix takes in panels.
long anycore_quantised_size(const anycore::Quantised* matrix) { return matrix->panels() * matrix->panel(); }

// numbers [outputs, inputs], a byte each; scales and minimums [outputs, groups]: 16 bits, or float where a row of bytes
// has one → `matrix->packed`.
void anycore_quantised_pack(const anycore::Quantised* matrix, const uint8_t* numbers, const void* scales,
                            const void* minimums) {
    using namespace anycore;
    parallel_for(matrix->panels(), [&](long panel) {
        uint8_t* to = const_cast<uint8_t*>(matrix->packed) + panel * matrix->panel();
        const long some = std::min<long>(COLUMNS, matrix->outputs - panel * COLUMNS);
        if (some < COLUMNS) std::fill_n(to, matrix->numbers(), uint8_t{0});
        for (long column = 0; column < some; column++)
            pack_column(*matrix, numbers + (panel * COLUMNS + column) * matrix->inputs, to, column);
        if (matrix->wide_scale())
            pack_groups(*matrix, static_cast<const float*>(scales), panel, to + matrix->numbers());
        else
            pack_groups(*matrix, static_cast<const uint16_t*>(scales), panel, to + matrix->numbers());
        if (matrix->minimums)
            pack_groups(*matrix, static_cast<const uint16_t*>(minimums), panel,
                        to + matrix->numbers() + matrix->scales());
    });
}

// out [count, inputs] = rows of the matrix, NaN where it has no such row; float if `wide`.
void anycore_quantised_rows(const anycore::Quantised* matrix, const int64_t* rows, long count, void* out, int wide) {
    using namespace anycore;
    if (wide)
        unpack_rows(*matrix, rows, count, static_cast<float*>(out));
    else
        unpack_rows(*matrix, rows, count, static_cast<bf16*>(out));
}

}

RECORDED(anycore_quantised_rows)
