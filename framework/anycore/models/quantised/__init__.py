"""Checkpoints with quantised matrices: what each method announces and how it stores them; rounding, where none did."""
