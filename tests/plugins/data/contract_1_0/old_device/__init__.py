"""A backend as it was written for contract 1.0, and is never edited: this anycore must go on running it."""

from anycore import hookimpl
from anycore.contract.declare import BackendSpec, Device, Level, Probe, Support, Task

ROW = {"weights": ("float32",), "level": Level.NATIVE}
FEATURES = ("chunked_prefill", "prefix_caching", "sliding_window", "softcap", "logprobs", "token_types")


def open_device(index):
    from old_device.device import OldBackend

    return OldBackend(index)


@hookimpl
def register_backends():
    return [
        BackendSpec(
            name="old",
            api=(1, 0),
            support=(
                Support(tasks=tuple(Task), attention="causal", block_sizes=(8,), features=FEATURES, **ROW),
                Support(tasks=(Task.EMBED, Task.RERANK), attention="bidirectional", features=FEATURES, **ROW),
            ),
            probe=lambda: Probe(devices=(Device(0, "Old 0", "old1", 8 * 2**30),)),
            open=open_device,
            priority=-50,
        )
    ]
