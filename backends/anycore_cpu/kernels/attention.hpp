// What attention is asked for, as Python fills it in (`attention.py`).
#pragma once

#include <cstdint>

namespace anycore {

struct Attention {
    void* q;  // [rows, heads, head_dim] and [rows, kv_heads, head_dim]: float or bf16; rows lie a stride apart
    void* k;
    void* v;
    void* out;    // [rows, heads, head_dim]
    void* cache;  // [blocks, kv_heads, K and V, block_size, head_dim]; null: a request's rows are all its tokens
    uint16_t* scales;        // [blocks, kv_heads, K and V, block_size] bf16: of a rounded cache
    const int64_t* slots;    // [rows]: where in the cache a row is stored
    const int32_t* tables;   // [requests, table_stride]
    const int32_t* starts;   // [requests + 1]: first rows
    const int32_t* lengths;  // [requests]: tokens, those of this step included
    const float* q_norm;     // [head_dim] or null
    const float* k_norm;
    const float* cos;  // [rows, head_dim / 2] or null
    const float* sin;
    int64_t q_stride, k_stride, v_stride, table_stride;
    int64_t rows, requests, heads, kv_heads, head_dim, block_size;
    int64_t window;  // 0: none
    float scale, softcap, eps;  // softcap 0: none
    int32_t causal, wide;       // wide: float, else bf16
    int32_t rounding;           // of the cache: `Rounding` of rounded.hpp
};

template <class T>
void prepare_heads(const Attention& a);  // norms and rotates heads in place, stores them in the cache

}  // namespace anycore
