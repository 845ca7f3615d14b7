// What the operating system must allow before kernels of this level may run.
#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

// 0 if this process may run the kernels of this library.
extern "C" int anycore_prepare() {
#if defined(__AMX_BF16__)
    constexpr long ASK_FOR_STATE = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return static_cast<int>(syscall(SYS_arch_prctl, ASK_FOR_STATE, TILE_DATA));
#else
    return 0;
#endif
}
