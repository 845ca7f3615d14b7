"""The real scheduler, block pool and router under a virtual clock: what `anycore simulate` predicts with."""
