// Where a task of attention finds the keys and values of a tile: as they lie, or opened beside it if the cache is rounded.
#pragma once

#include <algorithm>

#include "attention.hpp"
#include "rounded.hpp"
#include "vectors.hpp"

namespace anycore {

constexpr long TILE = 128;  // keys

struct Task {
    long request, head;        // a KV head
    long first_row, rows;      // of the batch
    long first_key, last_key;  // tokens of the request that some of the rows see
    long part;                 // where its sums go; -1: it is the whole row
};

template <class T>
struct Places {
    const T* keys[TILE];
    const T* values[TILE];

    // Numbers that `find` wants room for.
    static long room(const Attention& a) { return a.rounding ? 2 * TILE * static_cast<long>(a.head_dim) : 0; }

    void find(const Attention& a, const Task& task, long first, long count, T* opened) {
        if (!a.cache) return find_rows(a, task, first, count);
        if (a.rounding == INT8) return open<INT8>(a, task, first, count, opened);
        if (a.rounding == FP8) return open<FP8>(a, task, first, count, opened);
        const long dim = a.head_dim, block = a.block_size;
        each_run(a, task, first, count, [&](long j, long run, long place) {
            const T* key = static_cast<const T*>(a.cache) + place * dim;
            for (long end = j + run; j < end; j++, key += dim) keys[j] = key, values[j] = key + block * dim;
        });
    }

private:
    void find_rows(const Attention& a, const Task& task, long first, long count) {
        const long dim = a.head_dim, row = a.starts[task.request] + first;
        const T* k = static_cast<const T*>(a.k) + row * a.k_stride + task.head * dim;
        const T* v = static_cast<const T*>(a.v) + row * a.v_stride + task.head * dim;
        for (long j = 0; j < count; j++) keys[j] = k + j * a.k_stride, values[j] = v + j * a.v_stride;
    }

    template <int ROUNDING>
    void open(const Attention& a, const Task& task, long first, long count, T* opened) {
        const long dim = a.head_dim, block = a.block_size;
        each_run(a, task, first, count, [&](long j, long run, long place) {
            const uint8_t* bytes = static_cast<const uint8_t*>(a.cache);
            for (long end = j + run; j < end; j++, place++) {
                T *key = opened + j * dim, *value = opened + (TILE + j) * dim;
                open_head<ROUNDING>(bytes + place * dim, dim, widen(a.scales[place]), key);
                open_head<ROUNDING>(bytes + (place + block) * dim, dim, widen(a.scales[place + block]), value);
                keys[j] = key, values[j] = value;
            }
        });
    }

    // Calls work(first of the tile, count, place of its key in the cache) for keys that lie side by side in a block.
    template <class Work>
    static void each_run(const Attention& a, const Task& task, long first, long count, const Work& work) {
        const long block = a.block_size;
        const int32_t* table = a.tables + task.request * a.table_stride;
        for (long j = 0, run; j < count; j += run) {
            const long offset = (first + j) % block;
            run = std::min(count - j, block - offset);
            work(j, run, (table[(first + j) / block] * a.kv_heads + task.head) * 2 * block + offset);
        }
    }
};

}  // namespace anycore
