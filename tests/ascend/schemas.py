"""Reads operator schemas from torch_npu wheel files of any version: `python tests/ascend/schemas.py WHEEL...`.

Writes data/torch_npu-VERSION.txt with those of the operators that the rig has references for. The wheel is only read:

    pip download --no-deps --only-binary=:all: --python-version 3.11 torch-npu==2.7.1
"""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

DATA = Path(__file__).parent / "data"

OPERATORS = (
    *("npu_fused_infer_attention_score", "npu_fusion_attention", "npu_scatter_pa_kv_cache", "npu_scatter_nd_update_"),
    *("npu_gather_pa_kv_cache", "npu_rms_norm", "npu_add_rms_norm", "npu_swiglu", "npu_rotary_mul"),
    *("npu_dynamic_quant", "npu_quant_matmul", "npu_weight_quant_batchmatmul", "npu_convert_weight_to_int4pack"),
)


def schemas(wheel: Path) -> list[str]:
    """Texts of the schemas, as they stand in the library's string table."""
    with zipfile.ZipFile(wheel) as archive:
        library = next(name for name in archive.namelist() if name.endswith("/libtorch_npu.so"))
        content = archive.read(library)
    found = re.findall(rb"_?[a-z][a-zA-Z0-9_.]*\((?:[A-Z][\x20-\x7e]*)?\) -> [\x20-\x7e]+", content)
    texts = {text.decode() for text in found}
    return sorted(text for text in texts if text.split("(")[0] in OPERATORS)


def main(wheels: list[str]) -> None:
    DATA.mkdir(exist_ok=True)
    for wheel in map(Path, wheels):
        version = wheel.name.split("-")[1]
        (DATA / f"torch_npu-{version}.txt").write_text("\n".join(schemas(wheel)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
