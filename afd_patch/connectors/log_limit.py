"""At most one log line per cause in a while: a lost server is met once per layer, and that is no news."""

from __future__ import annotations

import re
import time

_NUMBERS = re.compile(r"\d+")
#: Causes that are remembered at most; a peer must not be able to fill the memory with new ones.
_MAX_CAUSES = 64


class LogLimit:
    """``due(cause)`` is true for the first line about ``cause`` and then once in ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last: dict[str, float] = {}

    def due(self, cause: object) -> bool:
        """Causes that differ in numbers only (a call, a layer, a process) are one."""
        key = _NUMBERS.sub("#", str(cause))[:200]
        now = time.monotonic()
        last = self._last.get(key)
        if last is not None and now - last < self._seconds:
            return False
        if len(self._last) >= _MAX_CAUSES:
            self._last.clear()
        self._last[key] = now
        return True
