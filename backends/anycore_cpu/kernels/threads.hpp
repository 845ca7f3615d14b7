// One pool of threads for all kernels, made on first use.
#pragma once

namespace anycore {

// Calls work(i) once for each i below count, on all threads, and returns when all calls have returned. Any thread takes
// whatever index is left, so one that the system has set aside holds nothing up but the index it is at. Called from two
// threads at once, or within a call, the later one does all the work itself.
void parallel_for(long count, void (*work)(void* context, long index), void* context);

// How many threads it would be shared by.
long thread_count();

template <class Work>
void parallel_for(long count, const Work& work) {
    parallel_for(
        count, [](void* context, long index) { (*static_cast<const Work*>(context))(index); },
        const_cast<Work*>(&work));
}

}  // namespace anycore
