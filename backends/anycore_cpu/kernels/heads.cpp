// Before attention: the norms of heads, their rotation, and their way into the cache, in one pass over q, k and v.
#include <algorithm>
#include <cmath>

#include "attention.hpp"
#include "rounded.hpp"
#include "scratch.hpp"
#include "threads.hpp"
#include "vectors.hpp"

namespace anycore {
namespace {

constexpr long ROWS = 4;  // of a task

template <class T>
void widen_head(const T* from, long size, float* to) {
    long d = 0;
    for (; d + LANES <= size; d += LANES) store(to + d, load(from + d));
    for (; d < size; d++) to[d] = widen(from[d]);
}

template <class T>
void narrow_head(const float* from, long size, T* to) {
    long d = 0;
    for (; d + LANES <= size; d += LANES) store(to + d, load(from + d));
    for (; d < size; d++) store_one(to + d, from[d]);
}

void norm(float* head, long size, const float* weight, float eps) {
    Floats squares{};
    float rest = 0;
    long d = 0;
    for (; d + LANES <= size; d += LANES) squares += load(head + d) * load(head + d);
    for (; d < size; d++) rest += head[d] * head[d];
    const float factor = 1 / std::sqrt((sum(squares) + rest) / static_cast<float>(size) + eps);
    for (d = 0; d + LANES <= size; d += LANES) store(head + d, load(head + d) * factor * load(weight + d));
    for (; d < size; d++) head[d] *= factor * weight[d];
}

void rotate(float* head, long size, const float* cos, const float* sin) {
    float *first = head, *second = head + size / 2;
    long d = 0;
    for (; d + LANES <= size / 2; d += LANES) {
        const Floats a = load(first + d), b = load(second + d), c = load(cos + d), s = load(sin + d);
        store(first + d, a * c - b * s);
        store(second + d, b * c + a * s);
    }
    for (; d < size / 2; d++) {
        const float a = first[d], b = second[d];
        first[d] = a * cos[d] - b * sin[d];
        second[d] = b * cos[d] + a * sin[d];
    }
}

}  // namespace

template <class T>
void prepare_heads(const Attention& a) {
    const long dim = a.head_dim, half = dim / 2, block = a.block_size;
    const bool turned = a.cos || a.q_norm || a.k_norm;
    if (!turned && !a.cache) return;
    parallel_for((a.rows + ROWS - 1) / ROWS, [&](long task) {
        static thread_local Scratch scratch;
        scratch.reserve(static_cast<size_t>(dim + LANES) * sizeof(float), 1);
        float* wide = scratch.take<float>(dim + LANES);
        const auto turn = [&](const T* from, const float* weight, long row, T* to) {
            widen_head(from, dim, wide);
            if (weight) norm(wide, dim, weight, a.eps);
            if (a.cos) rotate(wide, dim, a.cos + row * half, a.sin + row * half);
            narrow_head(wide, dim, to);
        };
        const auto keep = [&](const T* head, long place) {
            uint8_t* to = static_cast<uint8_t*>(a.cache) + place * dim;
            widen_head(head, dim, wide);
            a.rounding == INT8 ? round_head<INT8>(wide, dim, to, a.scales + place)
                               : round_head<FP8>(wide, dim, to, a.scales + place);
        };
        for (long row = task * ROWS; row < std::min<long>(a.rows, (task + 1) * ROWS); row++) {
            T* q = static_cast<T*>(a.q) + row * a.q_stride;
            T* k = static_cast<T*>(a.k) + row * a.k_stride;
            const T* v = static_cast<T*>(a.v) + row * a.v_stride;
            for (long h = 0; turned && h < a.heads; h++) turn(q + h * dim, a.q_norm, row, q + h * dim);
            for (long h = 0; h < a.kv_heads; h++) {
                T *head = k + h * dim, *to = head;
                long place = 0;
                if (a.cache) place = (a.slots[row] / block * a.kv_heads + h) * 2 * block + a.slots[row] % block;
                if (a.cache && !a.rounding) {
                    to = static_cast<T*>(a.cache) + place * dim;
                    std::copy_n(v + h * dim, dim, to + block * dim);
                }
                if (turned)
                    turn(head, a.k_norm, row, to);
                else if (to != head)
                    std::copy_n(head, dim, to);
                if (a.rounding) keep(head, place), keep(v + h * dim, place + block);
            }
        }
    });
}

template void prepare_heads<float>(const Attention&);
template void prepare_heads<bf16>(const Attention&);

}  // namespace anycore
