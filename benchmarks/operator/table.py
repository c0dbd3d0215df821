"""The figures as a table: a row a size, and a row of ratios to the smallest. Called by the command."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

COLUMNS = {
    "runs": "runs",
    "objects": "objects",
    "load_p50": "p50 s",
    "load_p99": "p99 s",
    "load_longest": "max s",
    "load_bare_watch_p99": "p99 s, bare watch",
    "silent_p99": "p99 s, silent gateways",
    "load_highest_rss_mib": "RSS MiB, highest",
    "idle_requests_per_run_minute": "calls/run/min, idle",
    "start_synced_seconds": "start to synced s",
    "restart_synced_seconds": "restart to synced s",
    "restart_looked_seconds": "all looked at s",
    "idle_cpu_seconds_per_minute": "idle CPU s/min",
    "load_cpu_share": "CPU under load",
    "load_average_load": "machine load",
}
BARS = {
    "load_p99": 2.0,
    "silent_p99": 2.0,
    "load_highest_rss_mib": 400.0,
    "restart_synced_seconds": 30.0,
    "idle_requests_per_run_minute": 2.0,
}
"""For 500 runs; each must be below."""
BAR_RUNS = 500


def table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    rows = [list(COLUMNS.values()), ["---"] * len(COLUMNS)]
    for result in results:
        rows.append([_shown(result.get(key)) for key in COLUMNS])
    for result in results[1:]:
        rows.append([_ratio(result.get(key), results[0].get(key)) for key in COLUMNS])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, "", *(verdict for result in results for verdict in verdicts(result))])


def verdicts(result: dict[str, Any]) -> list[str]:
    """What the bars say of the size that they are set for."""
    if result["runs"] != BAR_RUNS:
        return []
    return [
        f"{'within' if result[key] < bar else 'ABOVE'} the bar: {COLUMNS[key]} {_shown(result[key])} (below {bar:g})"
        for key, bar in BARS.items()
    ]


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _ratio(value: Any, base: Any) -> str:
    return f"x{value / base:.2g}" if base else "-"
