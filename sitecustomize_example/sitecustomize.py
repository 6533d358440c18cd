"""Arms afd_patch at Python's start, for images where nothing can be installed and only PYTHONPATH can change.

Python imports the first ``sitecustomize`` of ``sys.path``, so one that the image already has would no longer run:
this one runs it. Without ``AFD_ROLE``, that is all it does.
"""

import os
import sys


def _run_the_next_one() -> None:
    """Execute the ``sitecustomize`` that this one hides: the first on ``sys.path`` behind this folder."""
    here = os.path.realpath(os.path.dirname(__file__))
    places = [os.path.realpath(entry) for entry in sys.path]
    behind = sys.path[places.index(here) + 1 :] if here in places else []
    from importlib.machinery import PathFinder

    spec = PathFinder.find_spec("sitecustomize", behind)
    if spec is None or spec.loader is None:
        return
    from importlib.util import module_from_spec

    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def _arm() -> None:
    """Make the import of vLLM activate the role; end this process where that is impossible."""
    if not os.environ.get("AFD_ROLE"):
        return
    try:
        from afd_patch.plugin import arm
    except Exception as error:
        print(
            f"afd_patch: AFD_ROLE is set, but afd_patch cannot be imported ({error}); put the folder that contains "
            "afd_patch on PYTHONPATH beside this one, or unset AFD_ROLE",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)  # Python's start-up reports any exception from here and goes on, and vLLM would run without AFD
    arm()


try:
    _run_the_next_one()
finally:
    _arm()
