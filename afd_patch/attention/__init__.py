"""The attention role: stand-ins for the FFN, the custom op they call, and the connectors of this process.

Knows torch and the connector contract; knows nothing of how patches get in place.
"""
