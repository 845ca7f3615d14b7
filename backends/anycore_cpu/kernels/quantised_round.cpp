// Dense matrices rounded to int8 while a model is loaded: to the last bit what the loader's own operations give.
#include <algorithm>

#include "interface.hpp"
#include "quantised.hpp"
#include "threads.hpp"

namespace anycore {
namespace {

typedef int8_t Narrow __attribute__((vector_size(LANES)));

constexpr long TOGETHER = 32;  // rows

// Up to LANES numbers, the rest zeros.
template <class In>
INLINE Floats load_some(const In* from, long count) {
    if (count >= LANES) return load(from);
    In some[LANES] = {};
    std::copy_n(from, count, some);
    return load(some);
}

// Not a number, where one is not.
template <class In>
INLINE float largest_magnitude(const In* x, long count) {
    Floats most = {};
    for (long k = 0; k < count; k += LANES) {
        const Floats value = load_some(x + k, count - k);
        const Floats size = value < 0.0f ? -value : value;
        most = size <= most ? most : most == most ? size : most;
    }
    float found = most[0];
    for (int i = 1; i < LANES; i++) found = most[i] <= found || found != found ? found : most[i];
    return found;
}

// What numbers of a group are divided by; one, where all are zero. Scales of parts of a row have the bits of a bf16.
INLINE float scale_of(float most, bool exact) {
    float scale = most / 127.0f;
    if (!exact) {
        bf16 near;
        store_one(&near, scale);
        scale = widen(near);
    }
    return scale > 0.0f ? scale : 1.0f;
}

template <class In>
INLINE void round_group(const In* x, long count, float scale, int8_t* to) {
    for (long k = 0; k < count; k += LANES) {
        Floats value = load_some(x + k, count - k) / scale;
        value = value > 127.0f ? all(127.0f) : value;
        value = value < -127.0f ? all(-127.0f) : value;
        const Narrow narrow = __builtin_convertvector(nearest(value), Narrow);
        std::memcpy(to + k, &narrow, static_cast<size_t>(std::min<long>(LANES, count - k)));
    }
}

template <class In>
void round_rows(const In* x, long rows, long columns, long group, bool exact, int8_t* numbers, float* scales) {
    const long groups = (columns + group - 1) / group;
    parallel_for((rows + TOGETHER - 1) / TOGETHER, [&](long part) {
        for (long row = part * TOGETHER; row < std::min(rows, (part + 1) * TOGETHER); row++)
            for (long g = 0; g < groups; g++) {
                const long first = row * columns + g * group, count = std::min(group, columns - g * group);
                const float scale = scale_of(largest_magnitude(x + first, count), exact);
                scales[row * groups + g] = scale;
                round_group(x + first, count, scale, numbers + first);
            }
    });
}

}  // namespace
}  // namespace anycore

extern "C" {

// numbers [rows][columns] and scales [rows][groups] of a matrix of bf16, or float if `wide`; `exact`: scales are floats
// to their last bit.
void anycore_quantised_round(const void* x, long rows, long columns, long group, int wide, int exact, int8_t* numbers,
                             float* scales) {
    using namespace anycore;
    if (wide)
        round_rows(static_cast<const float*>(x), rows, columns, group, exact != 0, numbers, scales);
    else
        round_rows(static_cast<const bf16*>(x), rows, columns, group, exact != 0, numbers, scales);
}

}
