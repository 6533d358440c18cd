"""The environment variables: ours, those that look like ours, and vLLM's filter of plugins."""

from __future__ import annotations

from collections.abc import Mapping

from afd_patch.config import PLUGIN_NAME, VARIABLES, AFDConfig
from afd_patch.doctor.findings import Section
from afd_patch.errors import ConfigError

#: The least that a configuration needs, so that one variable can be judged at a time.
_LEAST = {"AFD_ROLE": "ffn", "AFD_LISTEN": "unix:/ffn.sock"}


def check_environment(environ: Mapping[str, str]) -> Section:
    """Findings about ``environ``; none of it is changed."""
    section = Section("Environment")
    ours = {name: value for name, value in environ.items() if name.startswith("AFD_")}
    unknown = False
    for name in sorted(set(ours) - set(VARIABLES)):
        try:
            AFDConfig.from_env({**_LEAST, name: ours[name]})
        except ConfigError as error:
            unknown = True
            section.problem(name, str(error).removeprefix(f"{name} "), "rename or unset it")
        else:
            section.note(name, "comes from Kubernetes, for a service whose name starts with afd; it is never read")
    _check_settings({name: value for name, value in ours.items() if name in VARIABLES}, section, unknown)
    _check_plugins(environ, section)
    return section


def _check_settings(ours: Mapping[str, str], section: Section, unknown: bool) -> None:
    try:
        config = AFDConfig.from_env(ours)
    except ConfigError as error:
        section.problem("settings", str(error))
        return
    if config is not None:
        section.ok("settings", f"role {config.role}, " + ", ".join(f"{k}={v}" for k, v in config.to_env().items()))
        if config.role == "ffn":
            section.note("AFD_ROLE", "ffn does not turn vllm serve into an FFN server", "use python -m afd_patch.serve")
    elif ours:
        section.note("settings", f"{', '.join(sorted(ours))} without AFD_ROLE: vLLM is left alone")
    elif not unknown:
        section.ok("settings", "no AFD_ROLE: vLLM is left alone")


def _check_plugins(environ: Mapping[str, str], section: Section) -> None:
    allowed = environ.get("VLLM_PLUGINS")
    if allowed is None:
        section.ok("VLLM_PLUGINS", "not set: every plugin is loaded")
        return
    if PLUGIN_NAME in allowed.split(","):
        section.ok("VLLM_PLUGINS", f"lets {PLUGIN_NAME} through")
        return
    text = f"{allowed!r} keeps {PLUGIN_NAME} out of vLLM's processes"
    fix = f"set VLLM_PLUGINS={','.join(filter(None, [allowed, PLUGIN_NAME]))} or unset it"
    (section.problem if environ.get("AFD_ROLE") else section.note)("VLLM_PLUGINS", text, fix)
