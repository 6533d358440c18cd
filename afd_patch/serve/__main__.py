"""The command: picks the role and turns an error of the user into one sentence."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from afd_patch.errors import AFDError, ConfigError, RankLost
from afd_patch.serve import flags as our
from afd_patch.serve.launcher import Launcher
from afd_patch.serve.roles import attention_command, run_ffn_role


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 stopped as asked, 1 a process failed, 2 a setting is wrong."""
    flags, vllm_flags = our.parse(sys.argv[1:] if arguments is None else arguments)
    os.environ.pop("AFD_ROLE", None)  # the flags say what this process is
    try:
        our.check_model(flags.model)
        if flags.role == "ffn":
            listen = flags.listen or os.environ.get("AFD_LISTEN")
            if not listen:
                raise ConfigError("--role ffn needs --listen unix:PATH or --listen tcp://HOST:PORT")
            run_ffn_role(our.config_for(flags, "ffn", listen=listen), flags.model, vllm_flags)
            return 0
        if flags.listen is not None:
            raise ConfigError("--listen belongs to --role ffn; leave it out, or add --role ffn")
        if flags.role == "attention":
            config = our.config_for(flags, "attention", ffn=flags.ffn or [os.environ.get("AFD_FFN", "")])
            command = attention_command(flags.model, vllm_flags)
            os.execvpe(command[0], command, {**os.environ, **config.to_env()})
        if flags.ffn:
            raise ConfigError("--ffn belongs to --role attention; leave it out, or add --role attention")
        return Launcher(flags, vllm_flags).run()
    except AFDError as error:
        print(f"afd_patch: {error}", file=sys.stderr)
        return 1 if isinstance(error, RankLost) else 2


if __name__ == "__main__":
    sys.exit(main())
