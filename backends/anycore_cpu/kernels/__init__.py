"""Kernels of our own in C++, one library a level of instructions: `build` finds or compiles it, `library` calls it."""
