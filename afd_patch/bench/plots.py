"""One picture per benchmark, from the same content as the JSON file. matplotlib is imported here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from afd_patch.errors import ConfigError

#: Colours that differ also for the colour-blind (Okabe and Ito).
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7F7F7F")


def draw(content: dict[str, Any], path: Path) -> None:
    """Write the picture of ``content`` to ``path``; raises ``ConfigError`` without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("--plot needs matplotlib; install it (pip install matplotlib) or leave --plot out") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = _PICTURES[content["benchmark"]](pyplot, content)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _handoff(pyplot: Any, content: dict[str, Any]) -> Any:
    kinds = list(dict.fromkeys(entry["transport"] for entry in content["results"]))
    figure, axes = pyplot.subplots(
        1, len(kinds), figsize=(5.6 * len(kinds) + 0.6, 5), squeeze=False, sharey=True, layout="constrained"
    )
    for axis, kind in zip(axes[0], kinds, strict=True):
        entries = [entry for entry in content["results"] if entry["transport"] == kind]
        rows = [entry["rows"] for entry in entries]
        for colour, name in zip(_COLOURS, entries[0]["us"], strict=False):
            p50, p99 = ([entry["us"][name][key] for entry in entries] for key in ("p50", "p99"))
            axis.plot(rows, p50, "o-", color=colour, label=name)
            axis.plot(rows, p99, ":", color=colour, linewidth=1)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(rows, [str(row) for row in rows])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.set_xlabel(f"rows of {content['hidden']} bf16")
        axis.set_title("Unix socket and shared memory" if kind == "unix" else "TCP", fontsize=11)
    axes[0][0].set_ylabel("µs per hand-off")
    axes[0][0].legend(title="solid: p50, dotted: p99", frameon=False)
    busy = "cores kept busy" if content["busy"] else "cores left alone"
    figure.suptitle(f"One hand-off ({content['spin_us']} µs of active waiting, {busy})")
    return figure


def _serve(pyplot: Any, content: dict[str, Any]) -> Any:
    results = content["results"]
    engines = list(results[0]["tokens_per_second"])
    figure, axes = pyplot.subplots(
        1, len(results), figsize=(max(7.0, 3.0 * len(results) + 0.8), 4.4), layout="constrained",
    )  # fmt: skip
    for axis, entry in zip(axes if len(results) > 1 else [axes], results, strict=True):
        for position, engine in enumerate(engines):
            colour = _COLOURS[position % len(_COLOURS)]
            value = entry["tokens_per_second"][engine]
            axis.bar(position, value, color=colour, label=engine, width=0.75)
            rounds = entry["all_rounds"][engine]
            axis.plot([position] * len(rounds), rounds, "k_", markersize=10, alpha=0.5)
            axis.text(position, 0.02 * max(entry["tokens_per_second"].values()), f"{value:.0f}", ha="center",
                      color="white", fontsize=9, fontweight="bold")  # fmt: skip
        axis.set_xticks([])
        ratios = " and ".join(f"{ratio:.2f}" for ratio in entry["to_best_stock"].values())
        axis.set_title(f"{entry['workload']}\nAFD / best stock: {ratios}", fontsize=10)
        axis.set_ylabel(f"{entry['counted']} per second" if entry in (results[0], results[-1]) else "")
    handles, labels = (axes if len(results) == 1 else axes[0]).get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(engines), frameon=False, fontsize=9)
    millions = content["parameters"] / 1e6
    figure.suptitle(f"{millions:.0f} M parameters; bars: medians, marks: rounds; engine: {content['engine']}")
    return figure


def _load(pyplot: Any, content: dict[str, Any]) -> Any:
    bars = {"owned": "owned", "asked": "asked for", "read": "read from disk", "resident_growth": "resident after load",
            "peak_growth": "peak resident"}  # fmt: skip
    figure, axis = pyplot.subplots(figsize=(8, 4.6), layout="constrained")
    width = 0.8 / len(bars)
    for index, (key, label) in enumerate(bars.items()):
        for position, entry in enumerate(content["results"]):
            if key == "read" and not entry["read_is_known"]:
                continue
            place = position + (index - len(bars) / 2 + 0.5) * width
            value = entry[key] / 1e6
            axis.bar(place, value, width, color=_COLOURS[index], label=label if position == 0 else None)
            axis.annotate(f"{value:.0f}", (place, value), (0, 2), textcoords="offset points", ha="center", fontsize=8)
    axis.set_xticks(range(len(content["results"])), [entry["role"] for entry in content["results"]])
    axis.set_ylabel("MB (1e6 bytes)")
    axis.legend(frameon=False, ncols=len(bars), loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"Loading {content['parameters'] / 1e6:.0f} M parameters, by role")
    return figure


def _chaos(pyplot: Any, content: dict[str, Any]) -> Any:
    figure, axis = pyplot.subplots(figsize=(11, 4.8), layout="constrained")
    kinds = [kind for kind, count in content["event_counts"].items() if count]
    colours = dict(zip(kinds, _COLOURS, strict=False))
    seen: set[str] = set()
    for event in content["events"]:
        if not event.get("applied", True):
            continue
        kind = event["kind"]
        label = None if kind in seen else f"{kind} ({content['event_counts'][kind]})"
        seen.add(kind)
        lasting = kind in ("kill -9", "SIGSTOP")
        end = event["at"] + (event["seconds"] if lasting else 0.0)
        axis.axvspan(event["at"], max(end, event["at"] + 0.05), color=colours[kind], alpha=0.35, label=label, lw=0)
        axis.axvline(event["at"], color=colours[kind], lw=1)
    gaps = content["gaps"]
    axis.plot([at for at, _ in gaps], [1000 * gap for _, gap in gaps], "k.", markersize=2, rasterized=True)
    axis.axhline(1000 * content["call_timeout_s"], color="black", linestyle="--", linewidth=1)
    axis.annotate("call timeout", (0, 1000 * content["call_timeout_s"]), (4, -12), textcoords="offset points",
                  fontsize=8, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})  # fmt: skip
    axis.set_yscale("log")
    axis.set_xlabel("seconds")
    axis.set_ylabel("ms since the token before")
    axis.margins(x=0.01)
    # Tokens that arrive together have a gap of next to nothing, which is no news.
    axis.set_ylim(bottom=1000 * content["undisturbed_gap_s"]["p50"] / 10)
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, title="events")
    axis.set_title(
        f"{content['requests']} requests, {content['failed_requests']} failed, {content['changed_tokens']} tokens "
        f"changed, longest stall {content['longest_stall_s']:.1f} s ({content['transport']})"
    )
    return figure


_PICTURES: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "handoff": _handoff, "serve": _serve, "load": _load, "chaos": _chaos,
}  # fmt: skip
