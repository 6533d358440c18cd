"""Tests of the commands that a person runs, as real processes."""
