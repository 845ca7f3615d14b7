// Attention of any shape, against the definition in double: what both the checks and the fuzzer call.
#pragma once

#include <cstdint>

namespace check {

struct AttentionCase {
    long kv_heads, group, dim, block_size;  // block_size 0: no cache
    long requests, lengths[8], contexts[8];  // rows of this step, and tokens before them
    long padding;                            // between rows of q, k and v
    long window;
    float softcap;
    bool causal, wide, norms, angles;
    int rounding;  // of the cache; 0: it is not
    uint64_t seed;
};

void check_attention(const AttentionCase& shape);  // ends the process where the kernel is wrong

}  // namespace check
