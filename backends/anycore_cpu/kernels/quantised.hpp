// Matrices of int8 or int4 with a scale for each group of a row, times rows rounded to int8 by the same groups.
//
// Sums within a group are of whole numbers, so exact, whether dot products or tiles make them; groups are added in order
// by `add_group`. A row's result is the same to the last bit however many rows there are.
//
// A panel is 32 columns (rows of the matrix): its numbers, then the scales [groups][32], then the minimums.
//   8 bits: [inputs / 4][32][4], signed
//   4 bits: [inputs / 8][32][4], 8 more than they stand for; the lower halves are the first four inputs
#pragma once

#include "panels.hpp"

namespace anycore {

struct Quantised {  // `Layout` of quantised.py
    const uint8_t* packed;
    int64_t outputs, inputs, group;
    int32_t bits;      // 8 or 4
    int32_t minimums;  // whether groups have a number that is taken off: number * scale - minimum
    float factor;      // of all scales and minimums, which are 16 bits wide

    bool whole_rows() const { return group >= inputs; }
    // A group that tiles take in one step has up to 64 inputs, larger groups are of several such.
    long step() const { return group < 64 && !whole_rows() ? group : 64; }
    long padded() const { return (inputs + step() - 1) / step() * step(); }
    long span() const { return whole_rows() ? padded() : group; }  // of a group in a panel; the last one may be shorter
    long groups() const { return (padded() + span() - 1) / span(); }
    long numbers() const { return padded() * COLUMNS * bits / 8; }  // bytes of a panel
    // A scale for a whole row of bytes is a float.
    long scales() const { return groups() * COLUMNS * (wide_scale() ? 4 : 2); }
    bool wide_scale() const { return bits == 8 && whole_rows(); }
    long panel() const { return numbers() + scales() + (minimums ? groups() * COLUMNS * 2 : 0); }
    long panels() const { return (outputs + COLUMNS - 1) / COLUMNS; }
};

// A panel of a matrix, its sizes worked out once.
struct Panel {
    Panel(const Quantised& matrix, long index)
        : numbers(matrix.packed + index * matrix.panel()),
          inputs(matrix.padded()),
          span(matrix.span()),
          groups(matrix.groups()),
          step(matrix.step()),
          bits(matrix.bits),
          minimums(matrix.minimums != 0),
          wide_scale(matrix.wide_scale()),
          scales_(numbers + matrix.numbers()),
          minimums_(scales_ + matrix.scales()) {}

    const uint8_t* numbers;
    long inputs, span, groups, step;
    int bits;
    bool minimums, wide_scale;

    INLINE Floats scale(long group, int column) const {
        if (wide_scale) return load(reinterpret_cast<const float*>(scales_) + column);
        return load_half(reinterpret_cast<const uint16_t*>(scales_) + group * COLUMNS + column);
    }
    INLINE Floats minimum(long group, int column) const {
        return load_half(reinterpret_cast<const uint16_t*>(minimums_) + group * COLUMNS + column);
    }

private:
    const uint8_t *scales_, *minimums_;
};

// Rows rounded to int8, and of each group and row its scale, its sum, and what dot products begin with.
struct RoundedRows {
    int8_t* numbers;  // `width` bytes from row to row
    float *scales, *totals;  // [groups][stride]
    int32_t* starts;
    long width, stride;  // stride: rows, rounded up to 16

    // An odd number of cache lines: rows of a tile would else meet in the same few places of a cache.
    static long width_of(const Quantised& matrix) { return ((matrix.padded() + 63) / 64 | 1) * 64; }
};

void round_row(const Quantised& matrix, const bf16* x, long row, const RoundedRows& rounded);

// How panels pass by: whether this one comes from memory, and how many bytes behind it the next one lies; 0: none does.
struct Passing {
    bool cold;
    long next;
};

// What is done to rows first … first + count of a product once their sums are whole: they are then still at hand.
class Finish {
public:
    template <class Work>
    explicit Finish(const Work& work)
        : work_(&work), call_([](const void* it, long first, long count) { (*static_cast<const Work*>(it))(first, count); }) {}

    void operator()(long first, long count) const { call_(work_, first, count); }

private:
    const void* work_;
    void (*call_)(const void*, long, long);
};

// sums[count][32] = rows first … first + count of `rounded` times a panel.
void multiply_dots(const Panel& panel, const RoundedRows& rounded, long first, long count, Passing passing,
                   float* sums, const Finish& finish);

#if defined(__AMX_INT8__)
void multiply_tiles(const Panel& panel, const RoundedRows& rounded, long first, long count, float* sums,
                    const Finish& finish);
#endif

INLINE Floats add_group(Floats sum, Ints dots, Floats scale, float row_scale) {
    return sum + __builtin_convertvector(dots, Floats) * (scale * row_scale);
}

INLINE Floats take_minimum(Floats sum, Floats minimum, float row_total) { return sum - minimum * row_total; }

}  // namespace anycore
