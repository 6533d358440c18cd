# make test   everything CI tests                    make demo   the whole thing on this machine, explained
# make lint   ruff, formatting, types                make venv   only the environment
#
# Every target makes its own environment in .venv, and renews it when the lock or the packaging changes.
# It needs CPython 3.11 or newer (PYTHON=... chooses one), about 4 GB of disk, and no GPU.

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
LOCK := requirements/cpu.lock
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

.PHONY: venv test lint demo clean

venv: $(VENV)/.project

# The CPU build of torch is not on PyPI. An index or a folder of wheels that pip is configured with may have it;
# otherwise it comes from PyTorch's own index. Both know it under the version that the lock pins.
TORCH_INDEX := https://download.pytorch.org/whl/cpu

$(VENV)/.lock: $(LOCK)
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer was found; name one: make PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "Installing the environment of $(LOCK) into $(VENV); a few minutes the first time."
	@torch=$$(grep '^torch==' $(LOCK)); \
	$(PIP) install -qq --no-deps "$$torch" 2>/dev/null || \
	$(PIP) install -qq --no-deps --index-url $(TORCH_INDEX) "$$torch"
	@$(PIP) install -qq --no-deps -r $(LOCK)
	@touch $@

$(VENV)/.project: $(VENV)/.lock pyproject.toml afd_patch.pth
	@$(PIP) install -qq --no-deps --no-build-isolation --editable .
	@touch $@

test: venv
	$(PY) -m pytest

lint: venv
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

demo: venv
	@$(PY) -m afd_patch.demo

clean:
	rm -rf .demo .mypy_cache .pytest_cache .ruff_cache dist
