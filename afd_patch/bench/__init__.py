"""``python -m afd_patch.bench``: what a hand-off, a token, a load and a failure cost on this machine.

``handoff`` measures one call, ``serve`` tokens per second, ``load`` bytes read and kept, ``chaos`` what requests notice
of killed, stopped and garbled FFN servers. This room uses what the others offer to a user; nothing imports it.
"""
