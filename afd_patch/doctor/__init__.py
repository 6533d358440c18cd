"""Is this installation sound? ``python -m afd_patch.doctor [MODEL]``; docs/doctor.md says what is looked at.

The doctor reads source files, settings and checkpoint headers, and asks FFN servers who they are. It changes nothing
and loads no model. vLLM is imported by a subprocess only (``live.py``), so a broken or foreign vLLM cannot take the
doctor down.
"""
