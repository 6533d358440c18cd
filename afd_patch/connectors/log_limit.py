"""A few log lines per cause in a while, and the number of the others: a lost server is met once per layer, and that is
no news.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

_NUMBERS = re.compile(r"\d+")
#: Causes that are told apart at most; a peer must not be able to fill the memory, or the log, with new ones.
_MAX_CAUSES = 64


@dataclass
class _Window:
    """The lines about one cause until ``end``."""

    end: float = 0.0
    lines: int = 0
    omitted: int = 0
    last: str = ""


class LogLimit:
    """``due(cause)`` is true for the first line about ``cause``, and for the next one when ``seconds`` have passed.

    The others are counted, and ``omitted`` tells how many they were.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._windows: dict[str, _Window] = {}
        self._ended: list[tuple[int, str]] = []

    def due(self, cause: object, lines: int = 1) -> bool:
        """Causes that differ in numbers only (a call, a layer, a process) are one; the first ``lines`` are due."""
        now = time.monotonic()
        text = str(cause)[:200]
        key = self._key(text, now)
        window = self._windows.setdefault(key, _Window())
        if now >= window.end:
            self._end(window)
            window.end = now + self._seconds
            window.lines = window.omitted = 0
        window.lines += 1
        if window.lines <= lines:
            return True
        window.omitted += 1
        window.last = text
        return False

    def omitted(self) -> list[tuple[int, str]]:
        """Of each cause whose time has passed: how many lines were not due, and the last of them; told once."""
        self._forget_ended(time.monotonic())
        told, self._ended = self._ended, []
        return told

    def _forget_ended(self, now: float) -> None:
        for key in [key for key, window in self._windows.items() if now >= window.end]:
            self._end(self._windows.pop(key))

    def _end(self, window: _Window) -> None:
        if window.omitted:
            self._ended = [*self._ended, (window.omitted, window.last)][-_MAX_CAUSES:]

    def _key(self, text: str, now: float) -> str:
        key = _NUMBERS.sub("#", text)
        if key in self._windows or len(self._windows) < _MAX_CAUSES:
            return key
        self._forget_ended(now)
        return key if len(self._windows) < _MAX_CAUSES else "all others"
