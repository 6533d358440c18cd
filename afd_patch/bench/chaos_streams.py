"""Streams of ``bench chaos``: ask for tokens one request after the other, compare each, and time every gap.

Where the tokens come from is a function; this file knows neither vLLM nor what disturbs the streams.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

#: ``source(prompt)`` yields the tokens of prompt number ``prompt`` as they come, and raises when the request fails.
Source = Callable[[int], Iterator[int]]
#: Seconds until the next request after one that failed.
_PAUSE_AFTER_FAILURE = 0.5


@dataclass
class Record:
    """What one stream met; times are seconds since ``began``."""

    began: float
    requests: int = 0
    tokens: int = 0
    changed_tokens: int = 0
    failures: list[tuple[float, str]] = field(default_factory=list)
    #: When each wait was over, and how long it was: for a token, for the end of a request, or for its failure.
    gaps: list[tuple[float, float]] = field(default_factory=list)
    #: The request that is running waits since then (``time.monotonic``); ``None`` when none is running.
    waiting_since: float | None = None

    def gaps_so_far(self) -> list[tuple[float, float]]:
        """``gaps`` and the wait that goes on right now."""
        gaps, since, now = list(self.gaps), self.waiting_since, time.monotonic()
        return gaps if since is None else [*gaps, (now - self.began, now - since)]


def ask(source: Source, prompt: int, record: Record) -> Iterator[int]:
    """The tokens of one request as they come; raises what ``source`` raises."""
    since = record.waiting_since = time.monotonic()
    try:
        for token in source(prompt):
            since = _end_wait(record, since)
            record.tokens += 1
            yield token
    finally:
        _end_wait(record, since)
        record.waiting_since = None


def _end_wait(record: Record, since: float) -> float:
    """A wait that began at ``since`` is over, and the next one begins: when?"""
    now = time.monotonic()
    record.gaps.append((now - record.began, now - since))
    record.waiting_since = now
    return now


class Stream(threading.Thread):
    """Asks ``source`` for the prompts of ``expected`` in turn, until ``stop``; what runs then is still completed."""

    def __init__(self, source: Source, expected: list[list[int]], first: int, began: float) -> None:
        super().__init__(name=f"stream {first}", daemon=True)
        self.record = Record(began)
        self._source = source
        self._expected = expected
        self._next = first
        self._stop_asking = threading.Event()

    def stop(self) -> None:
        self._stop_asking.set()

    def run(self) -> None:
        record = self.record
        while not self._stop_asking.is_set():
            prompt = self._next % len(self._expected)
            self._next += 1
            record.requests += 1
            try:
                self._compare(prompt)
            except Exception as error:  # whatever ends a request is what is counted here
                record.failures.append((time.monotonic() - record.began, f"{type(error).__name__}: {error}"[:500]))
                self._stop_asking.wait(_PAUSE_AFTER_FAILURE)

    def _compare(self, prompt: int) -> None:
        """One request: each token as it comes; what is missing counts only where the request did not fail."""
        expected, came = self._expected[prompt], 0
        for token in ask(self._source, prompt, self.record):
            self.record.changed_tokens += came >= len(expected) or token != expected[came]
            came += 1
        self.record.changed_tokens += max(0, len(expected) - came)
