"""Streams while their FFN server is killed, stopped, and cut off; what they notice of it.

One FFN server is behind a proxy. Events come in a seeded order: kill -9 and a new start, SIGSTOP and SIGCONT, and
calls or replies that the proxy cuts, delays, truncates (then silence, then the line closes) or corrupts (one bit).
Tokens are compared with those of the same requests before anything was disturbed, also those of requests that fail.
Exit status 0: something was disturbed, tokens came, none of them changed, no stream hangs, and no request failed while
the server was back within the call timeout. Unknown flags go to vLLM.
"""

from __future__ import annotations

import argparse
import logging
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from afd_patch.bench.chaos_servers import SmallDeployment, VLLMDeployment
from afd_patch.bench.chaos_streams import Record, Stream, ask
from afd_patch.bench.models import checkpoint
from afd_patch.bench.proxy import DISTURBANCES, Proxy
from afd_patch.bench.report import median
from afd_patch.connectors.endpoint import parse_endpoint
from afd_patch.errors import ConfigError
from afd_patch.hosting import free_port

TAKES_VLLM_FLAGS = True
KILL, STOP = "kill -9", "SIGSTOP"
EVENTS = (KILL, STOP, *DISTURBANCES)
_PROMPTS = 4
#: Seconds: between events, of a stop, of a server that is gone before it is started again, of a silent line.
_PAUSE, _STOPPED, _GONE, _SILENT = (0.5, 2.0), (0.3, 3.0), (0.0, 1.0), (0.1, 1.5)
#: Seconds after which no frame is expected that a disturbance could meet.
_NO_FRAME = 5.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a folder (default: a new random qwen3_moe)")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long events come (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the events (%(default)s)")
    parser.add_argument("--streams", type=int, default=2, help="requests at a time (%(default)s)")
    parser.add_argument("--transport", choices=("unix", "tcp"), default="tcp", help="(%(default)s)")
    parser.add_argument("--call-timeout", type=float, default=60.0, help="AFD_CALL_TIMEOUT (%(default)s)")
    parser.add_argument("--events", default=",".join(EVENTS), help="which of them (%(default)s)")
    parser.add_argument("--without-vllm", action="store_true", help="connectors and a small FFN alone")


def run(options: argparse.Namespace, vllm_flags: Sequence[str]) -> dict[str, Any]:
    """Disturb; returns what the streams met."""
    events = [event.strip() for event in options.events.split(",")]
    unknown = sorted(set(events) - set(EVENTS))
    if unknown:
        raise ConfigError(f"--events {unknown[0]!r} is none of {', '.join(EVENTS)}")
    if options.seconds <= 0 or options.streams < 1 or options.call_timeout <= 0:
        raise ConfigError("--seconds, --streams and --call-timeout must be positive")
    if options.without_vllm and (options.model or vllm_flags):
        raise ConfigError(f"--without-vllm has no use for {' '.join(filter(None, [options.model, *vllm_flags]))}")
    rng = random.Random(options.seed)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="afd-chaos-")))
        unix = options.transport == "unix"
        behind, front = (
            parse_endpoint(f"unix:{folder}/{name}.sock" if unix else f"tcp://127.0.0.1:{free_port()}")
            for name in ("ffn", "proxy")
        )
        proxy = Proxy(front, behind, random.Random(options.seed))
        stack.callback(proxy.close)
        deployment: SmallDeployment | VLLMDeployment
        if options.without_vllm:
            if options.seconds < 30:  # nobody wants to read about every repeat of a short test
                logging.getLogger("vllm.afd_patch").setLevel(logging.ERROR)
            deployment = SmallDeployment(behind, front, folder, options.call_timeout)
        else:
            model = checkpoint(options.model, folder, "qwen3_moe")
            deployment = VLLMDeployment(model, behind, front, folder, vllm_flags, options.call_timeout)
        stack.callback(deployment.close)
        deployment.wait_ready()
        calm = Record(time.monotonic())
        sources = [deployment.source(stream) for stream in range(options.streams)]
        # The first time includes warm-ups; what counts as undisturbed is the second.
        for prompt in range(_PROMPTS):
            list(ask(sources[0], prompt, Record(calm.began)))
        expected = [list(ask(sources[0], prompt, calm)) for prompt in range(_PROMPTS)]
        began = time.monotonic()
        streams = [Stream(source, expected, index, began) for index, source in enumerate(sources)]
        for stream in streams:
            stream.start()
        happened = _disturb(deployment, proxy, events, rng, began, options.seconds)
        proxy.disarm()
        for stream in streams:
            stream.stop()
        for stream in streams:
            stream.join(options.call_timeout * 3)
        return {
            "deployment": "connectors alone" if options.without_vllm else f"vLLM, {options.model or 'qwen3_moe'}",
            "transport": options.transport,
            "seed": options.seed,
            "call_timeout_s": options.call_timeout,
            **_summary(streams, calm, happened, proxy, options.call_timeout),
        }


def _disturb(
    deployment: SmallDeployment | VLLMDeployment, proxy: Proxy, events: list[str], rng: random.Random, began: float,
    seconds: float,
) -> list[dict[str, Any]]:  # fmt: skip
    """Events until ``seconds`` have passed since ``began``; each kind comes before any comes again."""
    happened: list[dict[str, Any]] = []
    bag: list[str] = []
    while time.monotonic() - began < seconds:
        if not bag:
            bag = rng.sample(events, len(events))
        kind = bag.pop()
        at = time.monotonic()
        entry: dict[str, Any] = {"kind": kind}
        if kind == KILL:
            deployment.ffn.kill()
            time.sleep(rng.uniform(*_GONE))
            deployment.ffn.restart()
            deployment.ffn.wait_ready()
        elif kind == STOP:
            deployment.ffn.signal(signal.SIGSTOP)
            time.sleep(rng.uniform(*_STOPPED))
            deployment.ffn.signal(signal.SIGCONT)
        else:
            entry["direction"] = rng.choice(("call", "reply"))
            disturbance = proxy.disturb(kind, entry["direction"], rng.uniform(*_SILENT))
            # One that is not armed any more is under way.
            entry["applied"] = disturbance.done.wait(_NO_FRAME) or disturbance not in proxy.disarm()
        entry["at"] = round(at - began, 3)
        entry["seconds"] = round(time.monotonic() - at, 3)
        happened.append(entry)
        time.sleep(rng.uniform(*_PAUSE))
    return happened


def _summary(
    streams: list[Stream], calm: Record, happened: list[dict[str, Any]], proxy: Proxy, timeout: float
) -> dict[str, Any]:
    records = [stream.record for stream in streams]
    stuck = sum(stream.is_alive() for stream in streams)
    failures = [failure for record in records for failure in record.failures]
    changed = sum(record.changed_tokens for record in records)
    tokens = sum(record.tokens for record in records)
    gaps = sorted(gap for record in records for gap in record.gaps_so_far())
    applied = Counter(event["kind"] for event in happened if event.get("applied", True))
    met_nothing = Counter(event["kind"] for event in happened if not event.get("applied", True))
    outages = [event["seconds"] for event in happened if event["kind"] in (KILL, STOP)]
    back_in_time = all(seconds < timeout for seconds in outages)
    objections = {
        "no token came": not tokens,
        "nothing was disturbed": not applied,
        "tokens changed": changed,
        "streams hang": stuck,
        "requests failed": failures and back_in_time,
    }
    return {
        "events": happened,
        "event_counts": {kind: applied[kind] for kind in EVENTS},
        "events_without_a_frame": dict(met_nothing),
        "requests": sum(record.requests for record in records),
        "tokens": tokens,
        "failed_requests": len(failures),
        "failures": failures[:20],
        "changed_tokens": changed,
        "stuck_streams": stuck,
        "longest_stall_s": round(max((gap for _, gap in gaps), default=0.0), 3),
        "undisturbed_gap_s": {
            "p50": round(median([gap for _, gap in calm.gaps]), 5),
            "longest": round(max(gap for _, gap in calm.gaps), 5),
        },
        "longest_outage_s": max(outages, default=0.0),
        "server_back_within_limit": back_in_time,
        "connections": proxy.connections,
        "gaps": [(round(at, 3), round(gap, 5)) for at, gap in gaps],
        "objections": [sentence for sentence, holds in objections.items() if holds],
        "passed": not any(objections.values()),
    }


def print_report(results: dict[str, Any]) -> None:
    calm = results["undisturbed_gap_s"]
    print(f"{results['deployment']}, {results['transport']}: {_listed(results['event_counts']) or 'no events'}")
    if results["events_without_a_frame"]:
        print(f"  met no frame        {_listed(results['events_without_a_frame'])} (not counted as events)")
    print(f"  requests            {results['requests']} ({results['tokens']} tokens)")
    print(f"  failed requests     {results['failed_requests']}")
    print(f"  changed tokens      {results['changed_tokens']}")
    print(f"  longest stall       {results['longest_stall_s']:.2f} s")
    print(f"  longest outage      {results['longest_outage_s']:.2f} s (call timeout {results['call_timeout_s']:g} s)")
    print(f"  undisturbed gap     {1000 * calm['p50']:.1f} ms (longest {1000 * calm['longest']:.1f} ms)")
    if results["stuck_streams"]:
        print(f"  streams that hang   {results['stuck_streams']}")
    for at, text in results["failures"][:3]:
        print(f"  failed at {at:.1f} s: {text}")
    print("passed" if results["passed"] else f"NOT passed: {', '.join(results['objections'])}")


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} x {kind}" for kind, count in counts.items() if count)
