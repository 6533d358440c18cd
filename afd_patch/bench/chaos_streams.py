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
    #: When each token came, and how long after the token (or the start of the request) before it.
    gaps: list[tuple[float, float]] = field(default_factory=list)
    #: The request that is running waits since then.
    waiting_since: float = 0.0


def ask(source: Source, prompt: int, record: Record) -> list[int]:
    """The tokens of one request; raises what ``source`` raises."""
    tokens = []
    record.waiting_since = time.monotonic()
    for token in source(prompt):
        now = time.monotonic()
        record.gaps.append((now - record.began, now - record.waiting_since))
        record.waiting_since = now
        tokens.append(token)
    return tokens


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
                tokens = ask(self._source, prompt, record)
            except Exception as error:  # whatever ends a request is what is counted here
                record.failures.append((time.monotonic() - record.began, f"{type(error).__name__}: {error}"[:500]))
                self._stop_asking.wait(_PAUSE_AFTER_FAILURE)
                continue
            expected = self._expected[prompt]
            record.tokens += len(tokens)
            record.changed_tokens += abs(len(tokens) - len(expected))
            record.changed_tokens += sum(a != b for a, b in zip(tokens, expected, strict=False))
