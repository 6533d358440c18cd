"""``python -m afd_patch.verify``: the same prompts on stock vLLM and through AFD, compared bit for bit."""
