"""What a running vLLM says: patches in effect, foreign wrappers, and its own judgement of a model.

A subprocess imports vLLM (``probe.py``) while the rest of the doctor reads files. It has a time limit, and what it
said until then counts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from afd_patch.boundaries import TABLES
from afd_patch.config import PLUGIN_NAME
from afd_patch.doctor.findings import Section
from afd_patch.doctor.probe import MARK

_ENGINE: dict[str, Any] = {"skip_tokenizer_init": True}


class LiveProbe:
    """One subprocess; ``finish`` waits for it and gives what it found."""

    def __init__(
        self,
        environ: Mapping[str, str],
        modules: Sequence[Sequence[str]],
        model: str | None,
        engine: Mapping[str, Any],
        limit: float,
    ) -> None:
        self._limit = limit
        self._deadline = time.monotonic() + limit
        # Files, not pipes: a pipe that nobody reads yet can fill up. ``finish`` closes them.
        self._output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        arguments = [json.dumps(list(modules)), model or "", json.dumps({**_ENGINE, **engine})]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "afd_patch.doctor.probe", *arguments],
            env=_environment(environ),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._errors,
            start_new_session=True,
        )

    def finish(self) -> dict[str, Any]:
        """What the probe said, by kind; ``error`` where it ended early, ``late`` where the limit ended it."""
        said: dict[str, Any] = {}
        try:
            self._process.wait(max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            said["late"] = self._limit
        finally:
            self.stop()
        self._output.seek(0)
        for line in self._output:
            if line.startswith(MARK):
                said.update(json.loads(line.removeprefix(MARK)))
        if self._process.returncode != 0 and "late" not in said:
            self._errors.seek(0)
            lines = [line.strip() for line in self._errors if line.strip()]
            said["error"] = lines[-1][:400] if lines else f"it ended with status {self._process.returncode}"
        self._output.close()
        self._errors.close()
        return said

    def stop(self) -> None:
        """End the subprocess and what it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The given environment, with a role whose settings are right whatever the user's are."""
    env = {name: value for name, value in environ.items() if not name.startswith("AFD_") or name == "AFD_GATE"}
    if env.get("AFD_GATE") not in ("ffn", "attention"):
        env.pop("AFD_GATE", None)
    allowed = env.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN_NAME not in allowed.split(","):
        env["VLLM_PLUGINS"] = ",".join(filter(None, [allowed, PLUGIN_NAME]))
    return {**env, "AFD_ROLE": "ffn", "AFD_LISTEN": "unix:/afd-doctor.sock", "VLLM_LOGGING_LEVEL": "ERROR"}


def describe_patches(said: Mapping[str, Any], *, one_family: bool) -> Section:
    """Patches in effect and foreign wrappers; ``one_family``: only what a given model needs was imported."""
    section = Section("In a running vLLM")
    if "patches" not in said:
        if "late" in said:
            section.note(
                "import", f"vLLM was not imported within {said['late']:g} s, so foreign wrappers are unknown",
                "give it more time with --limit SECONDS",
            )  # fmt: skip
        else:
            section.problem("import", f"vLLM cannot be imported with a role: {said.get('error')}", "repair it first")
        return section
    patches = said["patches"]
    if patches["activated"]:
        section.ok("activation", "a process with AFD_ROLE activates by itself")
    else:
        section.problem(
            "activation", "a process with AFD_ROLE does not activate by itself", "install afd_patch again (pip install)"
        )
    for module, error in patches["failed"].items():
        families = [
            a for table in TABLES if any(n.startswith(f"{module}:") for n in table.classes) for a in table.architectures
        ]
        needed = f" (needed for {', '.join(families)})" if families else ""
        report = section.note if families and not one_family else section.problem
        report(module, f"cannot be imported: {error}{needed}", "install what it needs")
    if not patches["complete"]:
        late = f"within {said['late']:g} s" if "late" in said else f"before it failed: {said.get('error')}"
        section.note("import", f"not every model family was imported {late}", "give it more time with --limit SECONDS")
    for state in patches["states"]:
        if state["state"] == "APPLIED":
            section.ok(state["name"], "in effect" + (f", {state['detail']}" if state["detail"] else ""))
        elif not (state["state"] == "PENDING" and "not been imported" in state["detail"]):
            section.problem(state["name"], f"{state['state'].lower()}: {state['detail']}", "remove what is in its way")
    applied = sum(state["state"] == "APPLIED" for state in patches["states"])
    section.summary = f"a process with AFD_ROLE activates by itself; {applied} patches are in effect"
    _describe_foreign(patches["foreign"], section)
    return section


def _describe_foreign(foreign: Sequence[Mapping[str, str]], section: Section) -> None:
    for item in foreign:
        text = f"{item['owner']} is {item['where']} on {item['target']}"
        if item["where"] in ("above", "below"):
            text = f"{item['owner']} wraps {item['target']}, {item['where']} ours"
            section.note(item["name"], text, "both are called; make sure that it passes arguments and results on")
        else:
            section.problem(item["name"], text, "the patch changes that class and not vLLM's; remove the other plugin")
    if not foreign:
        section.ok("foreign wrappers", "none on our targets")


def describe_configuration(said: Mapping[str, Any], section: Section) -> None:
    """vLLM's and the roles' judgement of the model, into ``section``."""
    content = said.get("configuration")
    if content is None:
        if "late" in said:
            section.note(
                "configuration", f"vLLM did not make its configuration within {said['late']:g} s (the first time, it "
                "inspects the model class)", "give it more time with --limit SECONDS",
            )  # fmt: skip
        elif "error" in said:
            section.note("configuration", "not judged, because vLLM cannot be imported")
    elif "refused" in content:
        section.problem("configuration", content["refused"])
    elif "native" in content:
        section.problem("configuration", f"stock vLLM refuses the model: {content['native']}", "see vLLM's own message")
    else:
        section.ok("configuration", "vLLM and both roles accept it with default engine settings")
