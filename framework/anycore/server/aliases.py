"""vLLM's names beside ours, or instead of them, for dashboards that cannot be changed: `--metrics-names`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from anycore.server.series import PREFIX, TABLE

THEIRS = "vllm:"
LABELS = {"num_blocks": "num_gpu_blocks"}
VALUES = {("reason", "queue_full"): "max_num_queued_reqs"}


class Renamed(CollectorRegistry):
    """A registry that shows what another one collects under other names.

    Args:
        names: "vllm", where it has the series, in place of ours; "both"; or "anycore".
    """

    def __init__(self, source: CollectorRegistry, names: str) -> None:
        super().__init__()
        self._source = source
        self._names = names

    def collect(self) -> Iterator[Metric]:
        for family in self._source.collect():
            theirs = list(aliases(family)) if self._names != "anycore" else []
            if self._names != "vllm" or not theirs:
                yield family
            yield from theirs


def aliases(family: Metric) -> Iterable[Metric]:
    """Yield a family under every name that vLLM has or had for it."""
    series = TABLE.get(family.name)
    if series is None or not series.vllm:
        return
    for name in (family.name.removeprefix(PREFIX), *series.older):
        copy = Metric(THEIRS + name, family.documentation, family.type)
        copy.samples = [
            sample._replace(name=THEIRS + name + sample.name.removeprefix(family.name), labels=labels(sample))
            for sample in family.samples
        ]
        yield copy


def labels(sample: Sample) -> dict[str, str]:
    return {LABELS.get(name, name): VALUES.get((name, value), value) for name, value in sample.labels.items()}
