"""The engine process of one model as `spares` starts it: `python -m anycore.server.ahead`.

What every engine is built with begins to load at once, beside all else that is imported; the rest is `child`'s.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import logging
import os
import threading
from pathlib import Path

NAMES = (
    "torch",
    "anycore.ranks.leader",
    "anycore.contract.selfcheck",
    "anycore.engine.warmup",
    "anycore.models.loader",
)
"""The longest to import first."""

LIBRARIES = (("libtorch_global_deps.so", os.RTLD_NOW | os.RTLD_GLOBAL), ("libtorch_cpu.so", os.RTLD_NOW))
"""In the order, and in the way, in which torch loads them."""

log = logging.getLogger(__name__)


def begin() -> None:
    """Begin to import what `build` will, while the front finds out what it has to say."""
    gc.disable()  # imports leave no garbage

    def work() -> None:
        try:
            load_libraries()
            for name in NAMES:
                importlib.import_module(name)
        except Exception:
            log.debug("importing ahead failed, as whoever needs it will be told", exc_info=True)
        finally:
            gc.freeze()  # or all that has been imported would be looked through at once, for a tenth of a second
            gc.enable()

    threading.Thread(target=work, name="import-ahead", daemon=True).start()


def load_libraries() -> None:
    """Let the system load torch's largest library, which takes as long as this process's other imports.

    An import would hold Python's lock meanwhile, as this call does not; one that fails is left for the import to tell.
    Builds for devices look for libraries of vendors in between, and are left alone.
    """
    found = importlib.util.find_spec("torch")
    folder = Path(found.origin).parent / "lib" if found is not None and found.origin is not None else None
    if folder is None or any(folder.glob("libc10_*")):
        return
    system = ctypes.CDLL(None)
    for name, flags in LIBRARIES:
        if (folder / name).exists():
            system.dlopen(os.fsencode(folder / name), flags)


if __name__ == "__main__":
    begin()
    from anycore.server import child

    code = child.main(child.launch_model)
    logging.shutdown()
    os._exit(code)  # Python would spend a second and more on taking torch apart, and the front waits
