"""Tests of the patch manager: plain Python, except test_real_vllm."""
