"""What a command shows while it works: lines, and a bar with the time left. Called by the other modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_LINES = 10
"""Lines that a bar becomes where there is no terminal."""


class Display:
    """Lines and bars on a console; a bar becomes a few lines where nobody watches."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()

    def say(self, line: str) -> None:
        """Print a line as it is."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def bar(self, name: str, total: int) -> Iterator[Callable[[str], None]]:
        """A bar; the function that is given counts one and shows a word."""
        if not self.console.is_terminal:
            yield self._lines(name, total)
            return
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f}/{task.total:.0f}"))
        times = (TextColumn("{task.fields[word]}"), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        with Progress(*columns, *times, console=self.console) as progress:
            task = progress.add_task(name, total=total, word="")
            yield lambda word: progress.update(task, advance=1, word=word)

    def _lines(self, name: str, total: int) -> Callable[[str], None]:
        done = 0

        def advance(word: str) -> None:
            nonlocal done
            done += 1
            if done == total or done % max(1, total // _LINES) == 0:
                self.say(f"{name}: {done} of {total}, {word}")

        return advance
