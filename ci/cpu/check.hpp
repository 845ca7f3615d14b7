// What the checks of the CPU kernels are written with: numbers by chance, memory of exact size, and a word on failure.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "interface.hpp"

namespace check {

class Chance {
public:
    explicit Chance(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15 + 1) {}

    uint64_t bits() {
        state_ ^= state_ << 13, state_ ^= state_ >> 7, state_ ^= state_ << 17;
        return state_;
    }
    long below(long count) { return static_cast<long>(bits() >> 11) % count; }
    long between(long first, long last) { return first + below(last - first + 1); }
    bool coin() { return below(2) == 0; }
    float number() { return static_cast<float>(below(2001) - 1000) / 500; }  // -2 to 2

private:
    uint64_t state_;
};

inline float widen(uint16_t value) {
    const uint32_t bits = static_cast<uint32_t>(value) << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}

inline uint16_t narrow(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Exactly as much memory as is asked for, on the heap, where a sanitizer sees the first byte beside it.
template <class T>
class Memory {
public:
    explicit Memory(long count) : count_(count), data_(static_cast<T*>(std::malloc(static_cast<size_t>(count) * sizeof(T)))) {
        std::memset(data_, 0xff, static_cast<size_t>(count) * sizeof(T));  // NaN, and ids that nothing has
    }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    ~Memory() { std::free(data_); }

    T& operator[](long i) { return data_[i]; }
    operator T*() { return data_; }
    long count() const { return count_; }

private:
    long count_;
    T* data_;
};

// Numbers that are float or bf16, as a flag says.
class Numbers {
public:
    Numbers(long count, bool wide) : wide_(wide), bytes_(count * (wide ? 4 : 2)) {}
    Numbers(long count, bool wide, Chance& chance) : Numbers(count, wide) {
        for (long i = 0; i < count; i++) set(i, chance.number());
    }

    void set(long i, float value) {
        const uint16_t half = narrow(value);
        wide_ ? std::memcpy(bytes_ + 4 * i, &value, 4) : std::memcpy(bytes_ + 2 * i, &half, 2);
    }
    double operator[](long i) {
        if (wide_) {
            float value;
            std::memcpy(&value, bytes_ + 4 * i, 4);
            return static_cast<double>(value);
        }
        uint16_t half;
        std::memcpy(&half, bytes_ + 2 * i, 2);
        return static_cast<double>(widen(half));
    }
    void* data() { return bytes_; }

private:
    bool wide_;
    Memory<char> bytes_;
};

inline long checked = 0;

inline void require(bool right, const char* what) {
    checked++;
    if (right) return;
    std::printf("%s\n", what);
    std::exit(1);
}

// `got` is within `bound` of `wanted`; NaN is near nothing.
inline void near(double got, double wanted, double bound, const char* what) {
    checked++;
    if (std::fabs(got - wanted) <= bound) return;
    std::printf("%s: %g instead of %g, which is not within %g\n", what, got, wanted, bound);
    std::exit(1);
}

// What rounding a result to bf16, or a long sum in float, may do to it.
inline double rounding(double value, bool wide, double terms) {
    return std::fabs(value) * (wide ? 0 : 1.0 / 256) + (terms + 1) * 1e-5;
}

}  // namespace check
