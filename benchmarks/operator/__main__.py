"""The command: sizes in, a table and results.json out."""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
from pathlib import Path

from benchmarks.operator import __doc__ as description
from benchmarks.operator.bench import Bench, Plan
from benchmarks.operator.table import table


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.operator",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=int, nargs="+", default=[50, 500, 5000], help="sizes")
    parser.add_argument(
        "--out", type=Path, default=Path(".prodrl/bench-operator"), help="folder of results.json and logs"
    )
    parser.add_argument("--idle-seconds", type=float, default=Plan.idle_seconds)
    parser.add_argument("--load-seconds", type=float, default=Plan.load_seconds)
    parser.add_argument("--rate", type=float, default=Plan.rate, help="changes a second")
    chosen = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, _: sys.exit(128 + got))  # the servers stop on the way out
    chosen.out.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    plan = Plan(idle_seconds=chosen.idle_seconds, load_seconds=chosen.load_seconds, rate=chosen.rate)
    results = []
    for runs in chosen.runs:
        log = chosen.out / f"operator-{runs}.log"
        log.unlink(missing_ok=True)
        results.append(Bench(runs, plan, log).measure())
        (chosen.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    sys.stdout.write(table(results) + "\n")


if __name__ == "__main__":
    main()
