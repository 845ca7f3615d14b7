// Rows at the two ends of a model: of its tables of embeddings, of its angles, and those that a request is pooled from.
#include <algorithm>
#include <cmath>

#include "interface.hpp"
#include "replay.hpp"
#include "threads.hpp"
#include "vectors.hpp"

namespace anycore {
namespace {

constexpr long TASK = 1L << 13;  // numbers a task should have, at least
constexpr int TABLES = 3;

template <class T>
struct Table {
    const T* data;       // [height, width]
    const int64_t* ids;  // [rows]; null: the first row for all
    long height;         // without ids 0: a row of its own for each

    // Null where there is no such row.
    const T* row(long index, long width) const {
        if (!ids && height == 0) return data + index * width;
        const int64_t id = ids ? ids[index] : 0;
        return id < 0 || id >= height ? nullptr : data + id * width;
    }
};

template <class T>
void add_rows(const T* const* from, int count, long width, float scale, T* out) {
    long i = 0;
    for (; i + LANES <= width; i += LANES) {
        Floats total = load(from[0] + i);
        for (int table = 1; table < count; table++) total += load(from[table] + i);
        store(out + i, total * scale);
    }
    for (; i < width; i++) {
        float total = widen(from[0][i]);
        for (int table = 1; table < count; table++) total += widen(from[table][i]);
        store_one(out + i, total * scale);
    }
}

template <class T>
void gather(const Table<T>* tables, int count, long rows, long width, float scale, T* out) {
    const long step = std::max(1L, TASK / width);
    parallel_for((rows + step - 1) / step, [&](long task) {
        for (long row = task * step; row < std::min(rows, (task + 1) * step); row++) {
            const T* from[TABLES];
            bool found = true;
            for (int table = 0; table < count; table++) {
                from[table] = tables[table].row(row, width);
                found = found && from[table];
            }
            T* to = out + row * width;
            if (found)
                add_rows(from, count, width, scale, to);
            else
                for (long i = 0; i < width; i++) store_one(to + i, NAN);
        }
    });
}

template <class T>
void gather(const void* const* data, const int64_t* const* ids, const long* heights, long rows, long width, float scale,
            void* out) {
    Table<T> tables[TABLES];
    int count = 0;
    for (; count < TABLES && data[count]; count++)
        tables[count] = {static_cast<const T*>(data[count]), ids[count], heights[count]};
    gather(tables, count, rows, width, scale, static_cast<T*>(out));
}

// out[width] = the mean of `count` rows, or the largest of each column.
template <class T>
void reduce(const T* from, long count, long width, bool mean, float* out) {
    const float share = 1 / static_cast<float>(count);
    long i = 0;
    for (; i + LANES <= width; i += LANES) {
        Floats found = load(from + i);
        for (long row = 1; row < count; row++) {
            const Floats other = load(from + row * width + i);
            found = mean ? found + other : other > found || other != other ? other : found;
        }
        store(out + i, mean ? found * share : found);
    }
    for (; i < width; i++) {
        float found = widen(from[i]);
        for (long row = 1; row < count; row++) {
            const float other = widen(from[row * width + i]);
            found = mean ? found + other : other > found || other != other ? other : found;
        }
        out[i] = mean ? found * share : found;
    }
}

template <class T>
void pool(const T* x, const int32_t* starts, long requests, long width, bool mean, float* out) {
    parallel_for(requests, [&](long i) {
        reduce(x + starts[i] * width, starts[i + 1] - starts[i], width, mean, out + i * width);
    });
}

}  // namespace
}  // namespace anycore

extern "C" {

// out [rows, width] = scale * the sum of up to three tables' rows, in float32. An id that a table has not gives NaN. A table
// without ids gives its first row to all, or one to each if its height is 0.
void anycore_gather(const void* first, const int64_t* first_ids, long first_height, const void* second,
                    const int64_t* second_ids, long second_height, const void* third, const int64_t* third_ids,
                    long third_height, long rows, long width, float scale, int wide, void* out) {
    using namespace anycore;
    const void* const data[] = {first, second, third};
    const int64_t* const ids[] = {first_ids, second_ids, third_ids};
    const long heights[] = {first_height, second_height, third_height};
    wide ? gather<float>(data, ids, heights, rows, width, scale, out)
         : gather<bf16>(data, ids, heights, rows, width, scale, out);
}

// cos and sin [rows, size] of positions times frequencies [size], times scale.
void anycore_angles(const int64_t* positions, const float* frequencies, float scale, long rows, long size, float* cos,
                    float* sin) {
    constexpr long STEP = 8;  // rows of a task
    anycore::parallel_for((rows + STEP - 1) / STEP, [&](long task) {
        for (long row = task * STEP; row < std::min(rows, (task + 1) * STEP); row++)
            for (long i = 0; i < size; i++) {
                const float angle = static_cast<float>(positions[row]) * frequencies[i];
                cos[row * size + i] = std::cos(angle) * scale;
                sin[row * size + i] = std::sin(angle) * scale;
            }
    });
}

// out [requests, width] in float32: the mean of each request's rows, or the largest. `starts` are [requests + 1].
void anycore_pool(const void* x, const int32_t* starts, long requests, long width, int mean, int wide, float* out) {
    using namespace anycore;
    wide ? pool(static_cast<const float*>(x), starts, requests, width, mean != 0, out)
         : pool(static_cast<const bf16*>(x), starts, requests, width, mean != 0, out);
}

}

RECORDED(anycore_gather)
RECORDED(anycore_angles)
