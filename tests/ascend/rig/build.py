"""Compiles the stand-in libraries in about two seconds: `python build.py TORCH_NPU_FOLDER OUT`.

Inputs are runtime.c, the wheel's C headers, and the names that its libraries look for: nothing of CANN is needed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
EMPTY = ("libhccl", "libacl_op_compiler", "libge_runner", "libgraph", "libacl_tdt_channel", "libatb")
"""Libraries that torch_npu names as its own needs: each only leads to the one that has the symbols."""

MAKERS = ("Tensor", "Scalar", "IntArray", "FloatArray", "BoolArray", "TensorList", "ScalarList")
NOTHING = (
    *("InitPTACacheThreadLocal", "UnInitPTACacheThreadLocal", "SetPTAHashKey", "SetPTACacheHashKey", "CanUsePTACache"),
    *("PTAGetExecCache", "PTAFindExecCache", "AddTensorAddrToCachedList", "InitHugeMemThreadLocal"),
    *("UnInitHugeMemThreadLocal", "ReleaseHugeMem"),
)


def build(package: Path, out: Path) -> None:
    """Write the libraries that `package` (the folder of torch_npu) needs into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "stubs.c").write_text(stubs(package))
    (out / "operators.c").write_text(operators(package))
    (out / "empty.c").write_text("void standin_nothing(void) {}\n")
    strict = ["-Wall", "-Wextra", "-Wno-deprecated-declarations"]
    sources = [HERE / "runtime.c", out / "stubs.c"]
    compile_library(out, "libascendcl", sources, "-O1", *strict, f"-I{package / 'include'}", after=["-lpthread"])
    compile_library(out, "libopapi", [out / "operators.c"], "-O0")
    for name in EMPTY:
        compile_library(out, name, [out / "empty.c"], "-Wl,--no-as-needed", after=[f"-L{out}", "-lascendcl"])


def compile_library(out: Path, name: str, sources: Iterable[Path], *flags: str, after: Iterable[str] = ()) -> None:
    command = ["cc", "-fPIC", "-shared", *flags, f"-Wl,-soname,{name}.so", "-o", str(out / f"{name}.so")]
    subprocess.run([*command, *map(str, sources), *after], check=True)


def symbols(library: Path, kind: str) -> set[str]:
    """Names that a library defines (`--defined-only`) or leaves to others (`--undefined-only`)."""
    done = subprocess.run(["nm", "-D", kind, str(library)], capture_output=True, text=True, check=True)
    return {line.split()[-1] for line in done.stdout.splitlines() if line.strip()}


def stubs(package: Path) -> str:
    """C source of a do-nothing function for each symbol of CANN that the wheel wants and runtime.c does not define."""
    libraries = [*package.glob("_C*.so"), *(package / "lib").glob("*.so")]
    wanted = set().union(*(symbols(library, "--undefined-only") for library in libraries))
    wanted -= set().union(*(symbols(library, "--defined-only") for library in libraries))
    wanted = {name for name in wanted if re.match(r"(acl|rt[A-Z]|Msprof|Hccl)", name) or "3atb" in name}
    written = set(re.findall(r"^\w[\w \*]*?[ \*](\w+)\s*\(", (HERE / "runtime.c").read_text(), re.M))
    missing = sorted(name for name in wanted - written if not name.startswith("_ZTH"))
    lines = ["int standin_stub(const char *name);"]
    for number, name in enumerate(missing):
        declared = f'long standin_{number}(void) __asm__("{name}");'
        lines.append(f'{declared} long standin_{number}(void) {{ return standin_stub("{name}"); }}')
    return "\n".join(lines) + "\n"


def operators(package: Path) -> str:
    """C source of a libopapi in which every aclnn operator exists, remembers that it was called, and does nothing.

    With it torch_npu's C++ runs to its end: argument checks, shape and dtype inference, allocation of outputs.
    """
    lines = [
        "#include <string.h>",
        "static char last[128]; static long thing[8];",
        "const char *standin_last(void) { return last; }",
        "static long did(const char *name) { strncpy(last, name, sizeof last - 1); return 0; }",
    ]
    lines += [f"void *aclCreate{name}(void) {{ return thing; }}" for name in MAKERS]
    lines += [f"long {name}(void) {{ return 0; }}" for name in (*(f"aclDestroy{made}" for made in MAKERS), *NOTHING)]
    for name in sorted(operator_names(package)):
        lines.append(f"long {name}GetWorkspaceSize(void) {{ return 0; }}")
        lines.append(f'long {name}(void) {{ return did("{name}"); }}')
    return "\n".join(lines) + "\n"


def operator_names(package: Path) -> set[str]:
    found: set[str] = set()
    for library in (package / "lib").glob("lib*.so"):
        found |= {name.decode() for name in re.findall(rb"aclnn[A-Z][A-Za-z0-9_]{2,90}", library.read_bytes())}
    return {name.removesuffix("GetWorkspaceSize") for name in found}


if __name__ == "__main__":
    build(Path(sys.argv[1]), Path(sys.argv[2]))
