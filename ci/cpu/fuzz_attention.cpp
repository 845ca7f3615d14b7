// A fuzzing target: any bytes are a shape of attention within the contract. Built with -fsanitize=fuzzer it belongs to
// libFuzzer; else it changes bytes by chance itself:
//
//     fuzz_attention SECONDS SEED
#include <algorithm>
#include <ctime>
#include <vector>

#include "attention_case.hpp"
#include "check.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    const auto byte = [&](long from, long to) {  // the next byte, brought into a range
        if (size == 0) return from;
        size--;
        return from + *data++ % (to - from + 1);
    };
    check::AttentionCase shape{};
    const long flags = byte(0, 255);
    shape.wide = flags & 1, shape.norms = flags & 2, shape.angles = flags & 4;
    shape.kv_heads = byte(1, 4), shape.group = byte(1, 12);
    shape.dim = 2 * byte(1, 128);
    shape.block_size = flags & 8 ? byte(1, 40) : 0;
    shape.causal = flags & 16 || shape.block_size;
    shape.window = flags & 32 ? byte(1, 200) : 0;
    shape.softcap = flags & 64 ? static_cast<float>(byte(1, 50)) : 0;
    shape.padding = byte(0, 9);
    shape.requests = byte(1, 8);
    long work = 300000 / (shape.dim * shape.kv_heads * shape.group);  // rows times tokens: what a moment allows
    for (long i = 0; i < shape.requests; i++) {
        const long tokens = byte(0, 255) * byte(1, 5);
        shape.lengths[i] = std::max(1L, std::min(byte(1, 160), work / (tokens + 1)));
        shape.contexts[i] = shape.block_size ? std::min(tokens, work / shape.lengths[i]) : 0;
        work -= std::min(work, shape.lengths[i] * (shape.lengths[i] + shape.contexts[i]));
    }
    shape.rounding = flags & 128 && shape.block_size ? static_cast<int>(byte(1, 2)) : 0;
    while (size > 0) shape.seed = shape.seed * 31 + static_cast<uint64_t>(byte(0, 255));
    check::check_attention(shape);
    return 0;
}

#if !defined(LIBFUZZER)
int main(int count, char** words) {
    const long seconds = count > 1 ? std::atol(words[1]) : 20;
    check::Chance chance(count > 2 ? static_cast<uint64_t>(std::atol(words[2])) : 0);
    anycore_threads(2);
    if (anycore_prepare() != 0) return std::puts("the system does not let this process use the kernels"), 2;
    std::vector<uint8_t> bytes(40);
    long inputs = 0;
    for (const std::time_t end = std::time(nullptr) + seconds; std::time(nullptr) < end; inputs++) {
        // Mostly a few bytes differ from the last input; at times all of them do.
        for (long changes = chance.below(8) ? chance.between(1, 4) : 40; changes > 0; changes--)
            bytes[static_cast<size_t>(chance.below(40))] = static_cast<uint8_t>(chance.bits() >> 20);
        LLVMFuzzerTestOneInput(bytes.data(), static_cast<size_t>(chance.between(20, 40)));
    }
    std::printf("%ld inputs, %ld numbers are right\n", inputs, check::checked);
}
#endif
