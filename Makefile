# make train   train the example on two ranks, after setting everything up
# make test    the test suite;  ARGS="-k ring -x" goes to pytest
# make test-all   the slow tests too: every world size, type and size, long soaks
# make test-integrations   RingDP in Lightning, Accelerate, transformers and Ray, which pip fetches for it
# make build   the set-up alone
#
# PYTHON names the Python to use (make test PYTHON=python3.12). One that has torch 2.11 or newer is used as it is;
# for one without torch a .venv is made here. tools/environment.py does that, and says what is missing.

PYTHON ?= python3
ARGS ?=
NPROC ?= 2
SETUP = $(PYTHON) tools/environment.py
CPP = git ls-files --cached --others --exclude-standard '*.cpp' '*.h' '*.c' '*.cu' '*.cuh'

.PHONY: build test test-all test-integrations train lint format clean distclean python

build: python
	@$(SETUP)

test: python
	@$(SETUP) -- python -m pytest $(ARGS)

test-all: python
	@$(SETUP) -- python -m pytest -m '' $(ARGS)

test-integrations: python
	@$(SETUP) -- python -m pytest -m integrations tests/integrations $(ARGS)

train: python
	@$(SETUP) -- python launch.py --nproc-per-node $(NPROC) examples/digits.py $(ARGS)

lint: python
	@$(SETUP) --lint -- ruff check .
	@$(SETUP) --lint -- ruff format --check --quiet .
	@$(SETUP) --lint -- sh -c "$(CPP) | xargs clang-format --dry-run -Werror"
	@$(SETUP) --lint -- mypy

format: python
	@$(SETUP) --lint -- ruff check --fix-only --quiet .
	@$(SETUP) --lint -- ruff format --quiet .
	@$(SETUP) --lint -- sh -c "$(CPP) | xargs clang-format -i"

# Everything that was built, but not .venv.
clean:
	rm -rf build dist ringdp.egg-info ringdp/_build_info.py ringdp/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv

python:
	@command -v "$(PYTHON)" >/dev/null || \
	  { echo "ringdp: there is no $(PYTHON): install Python 3.10 or newer, or name one (make PYTHON=…)."; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "ringdp: $(PYTHON) is older than Python 3.10: name a newer one (make PYTHON=python3.11)."; exit 1; }
