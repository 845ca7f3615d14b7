"""The latencies of a request, as they are named on the command line and in reports."""

from __future__ import annotations

LABELS = {
    "ttft": "Time to first token",
    "tpot": "Time per token after it",
    "itl": "Inter-token latency",
    "e2el": "End to end",
}

Slo = dict[str, float]
"""Limits in milliseconds, by a name from LABELS."""
