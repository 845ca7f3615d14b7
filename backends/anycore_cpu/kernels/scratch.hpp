// Memory of a thread that is kept from call to call.
#pragma once

#include <cstddef>
#include <cstdlib>

namespace anycore {

class Scratch {
public:
    // Room for `count` numbers on a cache line of its own, until the next `reserve`.
    template <class T>
    T* take(long count) {
        T* place = reinterpret_cast<T*>(memory_ + used_);
        used_ += rounded(static_cast<size_t>(count) * sizeof(T));
        return place;
    }

    void reserve(size_t bytes, int parts) {
        bytes += static_cast<size_t>(parts) * 64;
        if (bytes > size_) {
            std::free(memory_);
            size_ = rounded(bytes);
            memory_ = static_cast<char*>(std::aligned_alloc(64, size_));
            if (memory_ == nullptr) std::abort();
        }
        used_ = 0;
    }

    ~Scratch() { std::free(memory_); }

private:
    static size_t rounded(size_t bytes) { return (bytes + 63) / 64 * 64; }

    char* memory_ = nullptr;
    size_t size_ = 0, used_ = 0;
};

}  // namespace anycore
