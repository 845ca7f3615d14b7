// Memory of a thread that is kept from call to call.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <type_traits>

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

// As many plain structs as come. The kernels use nothing that a C++ runtime has to bring: no std::vector.
template <class T>
class List {
    static_assert(std::is_trivially_copyable_v<T>);

public:
    void clear() { size_ = 0; }

    void push_back(const T& value) {
        if (size_ == room_) {
            room_ = room_ ? 2 * room_ : 64;
            data_ = static_cast<T*>(std::realloc(data_, static_cast<size_t>(room_) * sizeof(T)));
            if (data_ == nullptr) std::abort();
        }
        data_[size_++] = value;
    }

    T* begin() { return data_; }
    T* end() { return data_ + size_; }
    long size() const { return size_; }

    ~List() { std::free(data_); }

private:
    T* data_ = nullptr;
    long size_ = 0, room_ = 0;
};

}  // namespace anycore
