"""The error family of afd_patch.

Every message is one sentence (or two) that names the cause and the way out, because the reader is usually
somebody whose deployment has just stopped. This file knows nothing about vLLM, torch or patches.
"""

from __future__ import annotations


class AFDError(Exception):
    """Root of all errors that afd_patch raises on purpose."""


class ConfigError(AFDError):
    """A setting (an ``AFD_*`` variable, a flag, an argument) is wrong."""


class UnsupportedError(AFDError):
    """The model, or a feature that was asked for, cannot be split; the message says why."""


class PatchError(AFDError):
    """A patch could not be registered or applied; nothing of it was left behind."""


class RestoreConflict(PatchError):
    """A slot holds somebody else's object, so it was left alone; our patch there is inert."""


class PatchNotApplied(PatchError):
    """A role was about to run while some of its patches were not in effect."""


class ForwardContextError(AFDError):
    """The forward context carries no AFD metadata: this forward does not belong to an active role."""


class WeightError(AFDError):
    """A checkpoint name that no rule knows, or a parameter that was not completely loaded."""


class ConnectorError(AFDError):
    """Rows could not be moved between the two roles."""


class HandshakeError(ConnectorError):
    """The two sides do not belong together; the message gives both values."""


class ProtocolError(ConnectorError):
    """Bytes that no correct peer sends."""


class RemoteFFNError(ConnectorError):
    """The FFN server answered a call with an error."""


class RankLost(AFDError):
    """A rank of a tensor-parallel FFN role has ended or is out of step, so the role cannot go on."""
