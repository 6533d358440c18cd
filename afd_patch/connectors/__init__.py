"""Moving rows between the roles: the contract, the wire format, and one file per transport.

This room knows bytes, sockets and tensors. It does not know vLLM, models or patches.
"""
