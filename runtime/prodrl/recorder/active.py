"""The recorder of this process: one object that ``plugin`` makes, and ``capture`` and ``middleware`` use."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from prodrl.config import RecorderConfig
from prodrl.recorder.counters import Counters
from prodrl.recorder.record import Facts, Observation

logger = logging.getLogger("prodrl.recorder")


class Sink(Protocol):
    """Where observations go; see :class:`prodrl.recorder.sink.ShardSink`."""

    def start(self) -> None:
        """Begin to write; before that nothing runs, because vLLM may fork after the plugin was loaded."""
        ...

    def offer(self, seen: Observation) -> None:
        """Take it or drop it; never waits, never raises."""
        ...

    def close(self) -> None:
        """Write what is waiting."""
        ...


@dataclass
class Recorder:
    """Configuration, figures and writer."""

    config: RecorderConfig
    counters: Counters
    sink: Sink
    read_facts: Callable[[Any], Facts]
    """From an engine."""
    _facts: Facts | None = field(default=None, init=False)

    def facts_of(self, engine: Any) -> Facts:
        """Facts of the engine, read once: a process has one."""
        if self._facts is None:
            self._facts = self.read_facts(engine)
        return self._facts

    def count_fault(self, message: str, *arguments: object) -> None:
        """Count a fault of our own, inside an ``except``; the log shows the first and then each hundredth."""
        if self.counters.dropped_faults % 100 == 0:
            logger.exception(message, *arguments)
        self.counters.dropped_faults += 1


_active: Recorder | None = None


def get() -> Recorder | None:
    """The recorder of this process; None where none was configured."""
    return _active


def activate(recorder: Recorder) -> None:
    """Make it the recorder of this process."""
    global _active  # noqa: PLW0603  # vLLM makes the middleware itself: there is no other way to hand it over
    _active = recorder
