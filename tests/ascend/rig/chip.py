"""What differs between chip families, by the number that torch_npu knows them under."""

from __future__ import annotations

import torch_npu

A2 = range(220, 226)  # 910B
A3 = range(250, 256)  # 910C
INFERENCE = range(200, 206)  # 310P


def soc() -> int:
    return int(torch_npu.npu.get_soc_version())


def has_fused_infer_attention() -> bool:
    return soc() in A2 or soc() in A3


def has_bfloat16() -> bool:
    return soc() not in INFERENCE
