"""The CUDA backend's kernels through Triton's compiler and ptxas, for a GPU that need not be there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

pytest.importorskip("triton")

from anycore_cuda.kernels.launch import KNOWN

PROGRAM = Path(__file__).with_name("cuda_compiled.py")


@pytest.mark.skipif(not KNOWN, reason="with this version of Triton kernels are not compiled ahead")
def test_the_rehearsal_compiles_all_that_the_warm_up_runs(tmp_path: Path) -> None:
    folder = tiny.tiny_lm(
        tmp_path / "lm", family="qwen3", layers=1, heads=4, kv_heads=2, head_dim=16, hidden=32, intermediate_size=640
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "kernels"), "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run([sys.executable, PROGRAM, folder], env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    kernels = json.loads(found.stdout.splitlines()[-1])
    assert kernels["missing"] == []
    assert kernels["hasty"] == []
    assert {"_norm", "_prepare", "_attend", "_decode", "_gated", "_matvec", "_choose"} <= set(kernels["rehearsed"])
    assert kernels["rehearsed"].count("_norm") > 2  # of parts, too
    assert "_small_product" in kernels["rehearsed"]
    assert {"_nibble_matvec", "_byte_matvec", "_nibble_product", "_byte_product", "_round"} <= set(kernels["quantised"])
    assert "_wide_product" in kernels["quantised"]
    assert {"_prepare", "_store", "_attend", "_decode", "_prefix"} <= set(kernels["rounded"])
    assert {"_spans", "_constrain"} <= set(kernels["masked"])
    assert kernels["unused"] == []
