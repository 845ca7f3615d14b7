// The functions that Python calls (`library.py`), so that definitions and the checks in C++ are held to one signature.
// What they mean stands where they are defined. Types of numbers that a flag decides about are void.
#pragma once

#include <cstdint>

namespace anycore {
struct Attention;
struct Quantised;
}  // namespace anycore

extern "C" {

int anycore_prepare();
void anycore_threads(int count);

long anycore_packed_size(long outputs, long inputs, int wide);
void anycore_pack(const void* weight, long stride, long outputs, long inputs, int wide, void* packed);
void anycore_linear(const void* x, long rows, long stride, const void* packed, long inputs, long outputs,
                    const void* bias, void* out, int wide, int wide_out);

long anycore_quantised_size(const anycore::Quantised* matrix);
void anycore_quantised_pack(const anycore::Quantised* matrix, const uint8_t* numbers, const void* scales,
                            const void* minimums);
void anycore_quantised_linear(const anycore::Quantised* matrix, const uint16_t* x, long rows, long stride,
                              const uint16_t* bias, void* out, int wide);
void anycore_quantised_round(const void* x, long rows, long columns, long group, int wide, int exact, int8_t* numbers,
                             float* scales);
void anycore_quantised_rows(const anycore::Quantised* matrix, const int64_t* rows, long count, void* out, int wide);

void anycore_attention(const anycore::Attention* what);

void anycore_norm(const void* x, const void* residual, const float* weight, const float* bias, float eps, long rows,
                  long width, int centred, int wide, void* sums, void* out);
void anycore_activation(const void* x, long rows, long width, int kind, int gated, int wide, void* out);

void anycore_gather(const void* first, const int64_t* first_ids, long first_height, const void* second,
                    const int64_t* second_ids, long second_height, const void* third, const int64_t* third_ids,
                    long third_height, long rows, long width, float scale, int wide, void* out);
void anycore_angles(const int64_t* positions, const float* frequencies, float scale, long rows, long size, float* cos,
                    float* sin);
void anycore_pool(const void* x, const int32_t* starts, long requests, long width, int mean, int wide, float* out);
void anycore_mask(float* logits, long count, const int64_t* rows, const uint32_t* words, long masked);
void anycore_penalise(float* logits, long rows, long count, const int64_t* which, const int32_t* counts, long height,
                      const int64_t* places, const float* repetition, const float* presence, const float* frequency,
                      long penalised);
void anycore_add(float* logits, long rows, long count, const int64_t* which, const int64_t* ids, const float* values,
                 long number);
void anycore_ban(float* logits, long rows, long count, const int64_t* which, const int64_t* ids, long number);
void anycore_report(const float* logits, long count, const int64_t* which, long reported, const int64_t* ids, long named,
                    long top, float* logprobs, int64_t* ranks, int64_t* top_ids, float* top_logprobs);
void anycore_sample(const float* logits, long rows, long count, const float* temperature, const double* uniforms,
                    const int64_t* top_k, const float* top_p, const float* min_p, int greedy, int64_t* ids,
                    bool* finite);

}
