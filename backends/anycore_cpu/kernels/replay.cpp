// A whole step in one call: the kernels that Python has recorded, one after the other.
#include "replay.hpp"

namespace {

struct Call {  // as `recording.py` writes it
    void (*run)(const anycore::Word* words);
    const anycore::Word* words;
};

}  // namespace

extern "C" void anycore_replay(const Call* calls, long count) {
    for (const Call* call = calls; call < calls + count; call++) call->run(call->words);
}
