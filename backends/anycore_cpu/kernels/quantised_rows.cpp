// Rows rounded to int8, each group of inputs by its own largest one.
#include <algorithm>

#include "quantised.hpp"
#include "scratch.hpp"

namespace anycore {
namespace {

typedef int8_t Narrow __attribute__((vector_size(LANES)));

constexpr float TINY = 1e-30f;  // below it a group is all zeros: its inverse would be infinite

INLINE Floats magnitude(Floats x) { return reinterpret_cast<Floats>(reinterpret_cast<Ints>(x) & 0x7fffffff); }

}  // namespace

void round_row(const Quantised& matrix, const bf16* x, long row, const RoundedRows& rounded) {
    static thread_local Scratch scratch;
    const long padded = matrix.padded(), group = matrix.span();
    scratch.reserve(static_cast<size_t>(padded) * sizeof(bf16), 1);
    if (padded != matrix.inputs) {
        bf16* copy = scratch.take<bf16>(padded);
        std::copy_n(x, matrix.inputs, copy);
        std::fill_n(copy + matrix.inputs, padded - matrix.inputs, bf16{0});
        x = copy;
    }
    const int offset = matrix.bits == 4 ? 8 : WEIGHT_OFFSET;
    int8_t* numbers = rounded.numbers + row * rounded.width;
    for (long g = 0, groups = matrix.groups(); g < groups; g++) {
        const long begin = g * group, end = std::min(padded, begin + group);
        Floats top = {}, broken = {};
        for (long k = begin; k < end; k += LANES) {
            const Floats value = load(x + k);
            top = larger(top, magnitude(value));
            broken += value - value;  // not a number if it is not finite
        }
        const float most = largest(top);
        const float inverse = most > TINY ? 127.0f / most : 0;
        Ints total = {};
        for (long k = begin; k < end; k += LANES) {
            const Ints near = nearest(load(x + k) * inverse);
            const Narrow narrow = __builtin_convertvector(near, Narrow);
            std::memcpy(numbers + k, &narrow, sizeof narrow);
            total += near;
        }
        const float scale = most / 127.0f + sum(broken);
        int32_t whole = 0;
        for (int i = 0; i < LANES; i++) whole += total[i];
        const long place = g * rounded.stride + row;
        rounded.scales[place] = scale;
        rounded.totals[place] = scale * static_cast<float>(whole);
        rounded.starts[place] = -offset * whole;
    }
}

}  // namespace anycore
