"""Tests on the real vLLM: engines in forked children of a process that has imported vLLM once."""
