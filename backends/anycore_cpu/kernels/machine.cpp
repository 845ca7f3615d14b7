// What the kernels need of the system beneath them.
#include <cstdlib>

#include "interface.hpp"

#if defined(__GLIBC__)
#include <malloc.h>
#endif
#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

// 0 if this process may run the kernels of this library.
extern "C" int anycore_prepare() {
#if defined(__GLIBC__)
    // What an operation frees the next one takes again. Given back to the system it would come as pages to be zeroed anew.
    constexpr int LARGEST = 32 << 20, KEPT = 64 << 20;  // bytes; glibc takes no larger ones than LARGEST
    mallopt(M_MMAP_THRESHOLD, LARGEST);
    mallopt(M_TRIM_THRESHOLD, KEPT);
#endif
#if defined(__AMX_BF16__)
    constexpr long ASK_FOR_STATE = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return static_cast<int>(syscall(SYS_arch_prctl, ASK_FOR_STATE, TILE_DATA));
#else
    return 0;
#endif
}

#if defined(__GLIBC__)
// What frees a thread's scratch when the thread ends. C++ runtimes pass it on to the C library: without one we do.
extern "C" int __cxa_thread_atexit_impl(void (*destroy)(void*), void* object, void* library);
extern "C" __attribute__((visibility("hidden"))) int __cxa_thread_atexit(void (*destroy)(void*), void* object,
                                                                         void* library) {
    return __cxa_thread_atexit_impl(destroy, object, library);
}
#endif
