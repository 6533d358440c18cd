"""``python -m afd_patch.serve``: both roles on this machine, or one of them."""
