"""Kernels that start before the one ahead has ended, and wait inside (programmatic dependent launch, Hopper and later).

What a small kernel costs most is its start and its end; started early, it has its programs in place, and its weights
on the way, when the work ahead is done. The flag EARLY of every kernel says whether it does; `CudaBackend` decides.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Why this is safe. `wait` returns when the kernel ahead has ended and its writes can be seen. A kernel ends only after
# all of its own programs, which wait, too: so by then everything before that one has ended as well, however early
# each of them let the next one start. What is written and read by steps is touched after `wait` only; what is read
# before are weights, which no step writes. Kernels that know nothing of this (cuBLAS, torch) begin when everything
# ahead has ended. All of it holds in a captured graph, whose edges are made from the same order.


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    """The next kernel may start once every program of this one is here: none of its programs takes a place of ours."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait(EARLY: tl.constexpr):
    """Return when all that was launched before this kernel has ended. Every program must come here."""
    if EARLY:
        gdc_wait()


def launch_options(early: bool) -> dict[str, bool]:
    """Launch options of a kernel that starts early or does not."""
    return {"launch_pdl": True} if early else {}
