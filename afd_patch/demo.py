"""``python -m afd_patch.demo``: the whole product on this machine, step by step, in plain words.

It makes a real language model, serves it with attention and FFN in different processes, asks it a question through
the OpenAI API, and then proves that nothing was lost. It only runs the commands that a person would run, and stops
what it started, whatever happens. ``make demo`` calls it in an environment of its own.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from afd_patch.hosting import free_port

QUESTION = "What is the capital of France?"
ENGINE_FLAGS = ("--max-model-len", "2048", "--kv-cache-memory-bytes", "256M", "--enforce-eager")
READY_SECONDS = 300.0
STOP_SECONDS = 60.0


class DemoFailed(Exception):
    """A step did not work; the message says which one and where to look."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns 0 when every step worked, 1 otherwise, 130 after Ctrl-C."""
    arguments = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _end_on_sigterm)
    try:
        _demo(arguments.dir, arguments.port)
    except DemoFailed as failure:
        print(f"\nThe demo stopped: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped; nothing is left running.", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m afd_patch.demo", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--dir", type=Path, default=Path(".demo"), help="folder for model and logs (default: .demo)")
    parser.add_argument("--port", type=int, help="port of the OpenAI API (default: a free one)")
    return parser


def _demo(folder: Path, port: int | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model, log = folder / "smollm2-moe", folder / "serve.log"

    _step(1, "A model. SmolLM2-135M-Instruct, a small real language model, cut into a mixture of four experts a layer.")
    if (model / "config.json").exists():
        _say(f"It is in {model} already, from an earlier run.")
    else:
        _run("afd_patch.tiny", "smollm2-moe", str(model), "--force")

    _step(2, "Two processes. One has attention, KV cache and the OpenAI API: vLLM as it is. The other has the experts.")
    port = port or free_port()
    with _served(model, port, log) as url:
        _step(3, f'A question, through the OpenAI API: "{QUESTION}"')
        _say(f"Answer: {_ask(url)}")
        _say("In every layer, for every token, the rows went from the attention process to the experts and back.")

    _step(4, "The proof. The same prompts on vLLM without AFD and through AFD; every token and logprob must be equal.")
    _run("afd_patch.verify", str(model), *ENGINE_FLAGS)

    _step(5, "Done. Everything that was started is stopped.")
    _say("A real model answered while its attention and its experts ran in different processes, exactly as in one.")
    _say(f"Serve it yourself: {_python()} -m afd_patch.serve {model} {' '.join(ENGINE_FLAGS)}")


@contextmanager
def _served(model: Path, port: int, log: Path) -> Iterator[str]:
    """``afd_patch.serve`` in the background; yields the URL of the API when it is ready."""
    command = _command("afd_patch.serve", str(model), "--port", str(port), *ENGINE_FLAGS)
    _say(f"$ {_shown(command)} &")
    _say(f"Its output goes to {log}. Both import vLLM and load their part of the weights: about a minute.")
    with log.open("wb") as output:
        server = subprocess.Popen(
            command,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches the demo only, which then stops the server
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _say(f"Ready after {_wait_until_ready(server, url, log):.0f} s at {url}")
        yield url
    finally:
        _stop(server)


def _wait_until_ready(server: subprocess.Popen[bytes], url: str, log: Path) -> float:
    """Seconds until the health endpoint answered."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    began = time.monotonic()
    while time.monotonic() < began + READY_SECONDS:
        if server.poll() is not None:
            raise DemoFailed(f"serve ended with status {server.returncode}; the last lines of {log}:\n{_tail(log)}")
        try:
            with opener.open(f"{url}/health", timeout=5):
                return time.monotonic() - began
        except OSError:
            time.sleep(0.5)
    raise DemoFailed(f"serve was not ready within {READY_SECONDS:.0f} s; the last lines of {log}:\n{_tail(log)}")


def _ask(url: str) -> str:
    import openai

    with openai.OpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        timeout=120,
        http_client=openai.DefaultHttpxClient(trust_env=False),  # a proxy cannot reach this machine's loopback
    ) as client:
        try:
            completion = client.chat.completions.create(
                model=client.models.list().data[0].id,
                messages=[{"role": "user", "content": QUESTION}],
                temperature=0,
                max_tokens=64,
            )
        except openai.OpenAIError as error:
            raise DemoFailed(f"the server did not answer the question: {error}") from None
    return (completion.choices[0].message.content or "").strip()


def _run(module: str, *arguments: str) -> None:
    """``python -m module``, shown, with its output."""
    command = _command(module, *arguments)
    _say(f"$ {_shown(command)}")
    process = subprocess.Popen(command, env=_environment(), start_new_session=True)
    try:
        status = process.wait()
    finally:
        _stop(process)
    if status:
        raise DemoFailed(f"{module} ended with status {status}; its output is above")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and SIGKILL for what is left of its session after a while or a second Ctrl-C."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(STOP_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _command(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def _shown(command: Sequence[str]) -> str:
    return " ".join([_python(), *command[1:]])


def _python() -> str:
    """This interpreter, as short as it can be written from here."""
    python = Path(sys.executable)
    return str(python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else python)


def _environment() -> dict[str, str]:
    """This environment without AFD settings of the caller's, without a look at the hub, without progress bars."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("AFD_")}
    return {**own, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TQDM_DISABLE": "1"}


def _tail(log: Path, lines: int = 20) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _end_on_sigterm(*_: Any) -> NoReturn:
    raise KeyboardInterrupt


def _step(number: int, text: str) -> None:
    print(f"\n{number}. {text}", flush=True)


def _say(text: str) -> None:
    print(f"   {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
