/* A stand-in for the CANN runtime (libascendcl.so) in host memory: an unmodified torch_npu wheel loads over it and owns
 * an "npu" device on a machine that has neither CANN nor an NPU. Device memory is host memory, streams are synchronous,
 * events are done once recorded. It runs no kernel: the references in Python do (install.py).
 *
 * Compiled against the headers that the wheel carries, so that a wrong prototype is a compile error.
 *
 *   STANDIN_DEVICES   how many NPUs there are           (default 1)
 *   STANDIN_SOC       what the chip calls itself        (default Ascend910B3)
 *   STANDIN_HBM_MIB   memory of one NPU in MiB          (default 512)
 *   STANDIN_CANN      version of every CANN package     (default 9.1.0)
 *   STANDIN_TRACE     1: print calls that only have a do-nothing stub
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "acl/acl.h"
#include "acl/acl_op_compiler.h"

#define UNUSED(x) ((void)(x))

static const char *env_text(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value && *value ? value : otherwise;
}
static long env_number(const char *name, const char *otherwise) { return strtol(env_text(name, otherwise), NULL, 10); }

/* What the generated stubs (build.py) call. */
int standin_stub(const char *name) {
    if (env_number("STANDIN_TRACE", "0")) fprintf(stderr, "[stand-in] %s does nothing\n", name);
    return 0;
}

/* ---- the chip ------------------------------------------------------------------------------------------------- */

#define MAX_DEVICES 16
static __thread int32_t current = -1; /* no device set in this thread */

static uint32_t device_count(void) {
    long count = env_number("STANDIN_DEVICES", "1");
    return count < 0 ? 0 : count > MAX_DEVICES ? MAX_DEVICES : (uint32_t)count;
}
static int here(void) { return current < 0 ? 0 : current; }

aclError aclInit(const char *path) { UNUSED(path); return ACL_SUCCESS; }
aclError aclFinalize(void) { return ACL_SUCCESS; }
aclError aclrtGetDeviceCount(uint32_t *count) { *count = device_count(); return ACL_SUCCESS; }
aclError aclrtSetDevice(int32_t device) {
    if (device < 0 || (uint32_t)device >= device_count()) return ACL_ERROR_RT_INVALID_DEVICEID;
    current = device;
    return ACL_SUCCESS;
}
aclError aclrtGetDevice(int32_t *device) {
    if (current < 0) return ACL_ERROR_RT_CONTEXT_NULL;
    *device = current;
    return ACL_SUCCESS;
}
aclError aclrtResetDevice(int32_t device) { UNUSED(device); return ACL_SUCCESS; }
aclError aclrtGetCurrentContext(aclrtContext *context) {
    *context = (aclrtContext)(uintptr_t)(here() + 1);
    return ACL_SUCCESS;
}
aclError aclrtSetCurrentContext(aclrtContext context) {
    current = (int32_t)(uintptr_t)context - 1;
    return ACL_SUCCESS;
}
aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active) {
    UNUSED(device);
    if (flags) *flags = 0;
    *active = 1;
    return ACL_SUCCESS;
}
const char *aclrtGetSocName(void) { return env_text("STANDIN_SOC", "Ascend910B3"); }
aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer) {
    UNUSED(device);
    UNUSED(peer);
    *can = 1;
    return ACL_SUCCESS;
}
aclError aclrtDeviceGetBareTgid(int32_t *pid) { *pid = 1; return ACL_SUCCESS; }
aclError aclGetDeviceCapability(uint32_t device, aclDeviceInfo info, int64_t *value) {
    UNUSED(device);
    UNUSED(info);
    *value = 24; /* cores */
    return ACL_SUCCESS;
}
aclError aclGetCannAttribute(aclCannAttr attribute, int32_t *value) { UNUSED(attribute); *value = 1; return ACL_SUCCESS; }
aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode mode) { UNUSED(mode); return ACL_SUCCESS; }
aclError aclrtSetOpExecuteTimeOut(uint32_t seconds) { UNUSED(seconds); return ACL_SUCCESS; }
aclError aclrtSetOpWaitTimeout(uint32_t seconds) { UNUSED(seconds); return ACL_SUCCESS; }
const char *aclGetRecentErrMsg(void) { return "the stand-in for CANN refused this call"; }
aclError aclrtPeekAtLastError(aclrtLastErrLevel level) { UNUSED(level); return ACL_SUCCESS; }
aclError aclrtGetLastError(aclrtLastErrLevel level) { UNUSED(level); return ACL_SUCCESS; }

aclError aclsysGetCANNVersion(aclCANNPackageName name, aclCANNPackageVersion *version) {
    UNUSED(name);
    memset(version, 0, sizeof *version);
    strncpy(version->version, env_text("STANDIN_CANN", "9.1.0"), sizeof version->version - 1);
    return ACL_SUCCESS;
}
aclError aclsysGetVersionStr(char *package, char *version) {
    UNUSED(package);
    strcpy(version, env_text("STANDIN_CANN", "9.1.0"));
    return ACL_SUCCESS;
}

/* Options of the operator compiler, which does not exist here. */
aclError aclSetCompileopt(aclCompileOpt option, const char *value) { UNUSED(option); UNUSED(value); return ACL_SUCCESS; }
size_t aclGetCompileoptSize(aclCompileOpt option) { UNUSED(option); return 2; }
aclError aclGetCompileopt(aclCompileOpt option, char *value, size_t length) {
    UNUSED(option);
    if (length) value[0] = 0;
    return ACL_SUCCESS;
}
aclError aclopSetCompileFlag(aclOpCompileFlag flag) { UNUSED(flag); return ACL_SUCCESS; }

static int64_t parameters[64];
aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t *value) { *value = parameters[option & 63]; return ACL_SUCCESS; }
aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) { parameters[option & 63] = value; return ACL_SUCCESS; }
aclError aclrtCtxGetSysParamOpt(aclSysParamOpt option, int64_t *value) { return aclrtGetSysParamOpt(option, value); }
aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) { return aclrtSetSysParamOpt(option, value); }

/* ---- memory: a page before each allocation keeps its size and its device ------------------------------------------ */

#define PAGE 4096u
#define MAGIC 0xACEDu
struct head {
    size_t size;
    int32_t device; /* -1: pinned host memory */
    uint32_t magic;
};

static size_t used[MAX_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static size_t capacity(void) { return (size_t)env_number("STANDIN_HBM_MIB", "512") << 20; }

static int reserve(int device, size_t size) {
    pthread_mutex_lock(&lock);
    int fits = used[device] + size <= capacity();
    if (fits) used[device] += size;
    pthread_mutex_unlock(&lock);
    return fits;
}
static aclError take(void **out, size_t size, int32_t device) {
    if (device >= 0 && !reserve(device, size)) return ACL_ERROR_RT_MEMORY_ALLOCATION;
    char *raw = aligned_alloc(PAGE, PAGE + (size + PAGE - 1) / PAGE * PAGE);
    if (!raw) return ACL_ERROR_RT_MEMORY_ALLOCATION;
    *(struct head *)raw = (struct head){size, device, MAGIC};
    if (device >= 0) memset(raw + PAGE, 0xFF, size); /* new device memory holds NaN in every float type, not zero */
    *out = raw + PAGE;
    return ACL_SUCCESS;
}
static aclError give(void *pointer) {
    if (!pointer) return ACL_SUCCESS;
    struct head *head = (struct head *)((char *)pointer - PAGE);
    if (head->magic != MAGIC) return ACL_ERROR_INVALID_PARAM;
    if (head->device >= 0) {
        pthread_mutex_lock(&lock);
        used[head->device] -= head->size;
        pthread_mutex_unlock(&lock);
    }
    head->magic = 0;
    free(head);
    return ACL_SUCCESS;
}
aclError aclrtMalloc(void **out, size_t size, aclrtMemMallocPolicy policy) { UNUSED(policy); return take(out, size, here()); }
aclError aclrtMallocAlign32(void **out, size_t size, aclrtMemMallocPolicy policy) { return aclrtMalloc(out, size, policy); }
aclError aclrtFree(void *pointer) { return give(pointer); }
aclError aclrtMallocHost(void **out, size_t size) { return take(out, size, -1); }
aclError aclrtFreeHost(void *pointer) { return give(pointer); }
aclError aclrtGetMemInfo(aclrtMemAttr attribute, size_t *free_bytes, size_t *total) {
    UNUSED(attribute);
    *total = capacity();
    *free_bytes = capacity() - used[here()];
    return ACL_SUCCESS;
}
aclError aclrtMemcpy(void *to, size_t room, const void *from, size_t count, aclrtMemcpyKind kind) {
    UNUSED(kind);
    if (count > room) return ACL_ERROR_INVALID_PARAM;
    memmove(to, from, count);
    return ACL_SUCCESS;
}
aclError aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t count, aclrtMemcpyKind kind, aclrtStream s) {
    UNUSED(s);
    return aclrtMemcpy(to, room, from, count, kind);
}
aclError aclrtMemset(void *to, size_t room, int32_t value, size_t count) {
    if (count > room) return ACL_ERROR_INVALID_PARAM;
    memset(to, value, count);
    return ACL_SUCCESS;
}
aclError aclrtMemsetAsync(void *to, size_t room, int32_t value, size_t count, aclrtStream stream) {
    UNUSED(stream);
    return aclrtMemset(to, room, value, count);
}

/* ---- streams and events ------------------------------------------------------------------------------------------- */

static void *new_handle(void) {
    static uintptr_t serial = 0x1000;
    return (void *)__atomic_add_fetch(&serial, 16, __ATOMIC_SEQ_CST);
}
static int is_captured(aclrtStream stream);

aclError aclrtCreateStream(aclrtStream *stream) { *stream = new_handle(); return ACL_SUCCESS; }
aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t priority, uint32_t flag) {
    UNUSED(priority);
    UNUSED(flag);
    return aclrtCreateStream(stream);
}
aclError aclrtDestroyStream(aclrtStream stream) { UNUSED(stream); return ACL_SUCCESS; }
aclError aclrtDestroyStreamForce(aclrtStream stream) { UNUSED(stream); return ACL_SUCCESS; }
aclError aclrtSynchronizeStream(aclrtStream stream) {
    return is_captured(stream) ? ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT : ACL_SUCCESS;
}
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t time) {
    UNUSED(time);
    return aclrtSynchronizeStream(stream);
}
aclError aclrtSynchronizeDevice(void) { return ACL_SUCCESS; }
aclError aclrtSynchronizeDeviceWithTimeout(int32_t time) { UNUSED(time); return ACL_SUCCESS; }
aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus *status) {
    UNUSED(stream);
    *status = ACL_STREAM_STATUS_COMPLETE;
    return ACL_SUCCESS;
}
aclError aclrtStreamGetId(aclrtStream stream, int32_t *id) { *id = (int32_t)(uintptr_t)stream; return ACL_SUCCESS; }
aclError aclrtSetStreamFailureMode(aclrtStream stream, uint64_t mode) { UNUSED(stream); UNUSED(mode); return ACL_SUCCESS; }
aclError aclrtSetStreamAttribute(aclrtStream stream, aclrtStreamAttr attribute, aclrtStreamAttrValue *value) {
    UNUSED(stream);
    UNUSED(attribute);
    UNUSED(value);
    return ACL_SUCCESS;
}
aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) { UNUSED(stream); UNUSED(event); return ACL_SUCCESS; }

/* An event is the time at which it was recorded. */
aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t flag) {
    UNUSED(flag);
    *event = calloc(1, sizeof(double));
    return ACL_SUCCESS;
}
aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t flag) { return aclrtCreateEventExWithFlag(event, flag); }
aclError aclrtDestroyEvent(aclrtEvent event) { free(event); return ACL_SUCCESS; }
aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
    struct timespec now;
    UNUSED(stream);
    clock_gettime(CLOCK_MONOTONIC, &now);
    *(double *)event = now.tv_sec * 1e3 + now.tv_nsec / 1e6;
    return ACL_SUCCESS;
}
aclError aclrtResetEvent(aclrtEvent event, aclrtStream stream) { UNUSED(event); UNUSED(stream); return ACL_SUCCESS; }
aclError aclrtSynchronizeEvent(aclrtEvent event) { UNUSED(event); return ACL_SUCCESS; }
aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status) {
    UNUSED(event);
    *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
    return ACL_SUCCESS;
}
aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus *status) {
    UNUSED(event);
    *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
    return ACL_SUCCESS;
}
aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent start, aclrtEvent end) {
    *milliseconds = (float)(*(double *)end - *(double *)start);
    return ACL_SUCCESS;
}

/* ---- graphs: Python records what is launched (capture.py), and is told here what torch_npu asks for --------------- */

enum moment { BEGIN, END, EXECUTE, DESTROY, GROUP_BEGIN, GROUP_END, UPDATE_BEGIN, UPDATE_END };
typedef int (*listener_t)(int moment, uintptr_t handle);
static listener_t listener;
static aclrtStream captured; /* NULL: no capture under way */
static aclmdlRI captured_graph;

void standin_listen(listener_t function) { listener = function; }

static int is_captured(aclrtStream stream) { return captured && stream == captured; }
static aclError tell(enum moment moment, void *handle) {
    if (!listener) {
        fprintf(stderr, "[stand-in] graphs need the reference kernels\n");
        return ACL_ERROR_FEATURE_UNSUPPORTED;
    }
    return listener(moment, (uintptr_t)handle);
}
aclError aclmdlRICaptureBegin(aclrtStream stream, aclmdlRICaptureMode mode) {
    UNUSED(mode);
    if (captured) return ACL_ERROR_RT_STREAM_CAPTURED;
    if (env_number("STANDIN_NO_GRAPHS", "0")) return 207008; /* stream resources insufficient */
    captured = stream;
    captured_graph = new_handle();
    return tell(BEGIN, captured_graph);
}
aclError aclmdlRICaptureGetInfo(aclrtStream stream, aclmdlRICaptureStatus *status, aclmdlRI *graph) {
    *status = is_captured(stream) ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE : ACL_MODEL_RI_CAPTURE_STATUS_NONE;
    if (graph) *graph = is_captured(stream) ? captured_graph : NULL;
    return ACL_SUCCESS;
}
aclError aclmdlRICaptureEnd(aclrtStream stream, aclmdlRI *graph) {
    if (!is_captured(stream)) return ACL_ERROR_RT_STREAM_NOT_CAPTURED;
    *graph = captured_graph;
    captured = NULL;
    return tell(END, captured_graph);
}
aclError aclmdlRIGetId(aclmdlRI graph, uint32_t *id) { *id = (uint32_t)(uintptr_t)graph; return ACL_SUCCESS; }
aclError aclmdlRIExecuteAsync(aclmdlRI graph, aclrtStream stream) { UNUSED(stream); return tell(EXECUTE, graph); }
aclError aclmdlRIDestroy(aclmdlRI graph) { return listener ? tell(DESTROY, graph) : ACL_SUCCESS; }
aclError aclmdlRICaptureTaskGrpBegin(aclrtStream stream) { UNUSED(stream); return tell(GROUP_BEGIN, NULL); }
aclError aclmdlRICaptureTaskGrpEnd(aclrtStream stream, aclrtTaskGrp *group) {
    UNUSED(stream);
    *group = new_handle();
    return tell(GROUP_END, *group);
}
aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream stream, aclrtTaskGrp group) {
    UNUSED(stream);
    return tell(UPDATE_BEGIN, group);
}
aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream stream) { UNUSED(stream); return tell(UPDATE_END, NULL); }
aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode *mode) { UNUSED(mode); return ACL_SUCCESS; }
