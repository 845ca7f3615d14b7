// Calls of kernels that are written down, to be made again later, all in one go.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

namespace anycore {

using Word = uint64_t;  // an argument: its bytes come first

template <class T>
T argument(const Word& word) {
    static_assert(sizeof(T) <= sizeof(Word));
    T value;
    std::memcpy(&value, &word, sizeof value);
    return value;
}

template <class... Arguments, std::size_t... I>
void call(void (*kernel)(Arguments...), const Word* words, std::index_sequence<I...>) {
    kernel(argument<Arguments>(words[I])...);
}

template <class... Arguments>
void call(void (*kernel)(Arguments...), const Word* words) {
    call(kernel, words, std::index_sequence_for<Arguments...>());
}

}  // namespace anycore

// Beside the kernel itself: the same with its arguments in words. A kernel without it cannot be part of a recorded step.
#define RECORDED(kernel) \
    extern "C" void kernel##_recorded(const anycore::Word* words) { anycore::call(kernel, words); }
