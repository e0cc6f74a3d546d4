# make train   train the example on two ranks, after setting everything up
# make test    the tests;  ARGS="-k ring -x" goes to pytest
# make test-ci   what CI runs beside them: sanitizers, examples, further cases
# make test-nightly   packaging, benchmark tools, libraries, Slurm
# make test-slow   the slow tests: every world size, type and size, the contracts over TCP, long soaks
# make test-all   all of these
# make test-fake-gpu   tests of what needs a GPU and no speed, on a CUDA device that is not there (tests/fake_cuda)
# make mutants  faults of one place each (tests/mutants/faults.py), which the tests have to find; an hour
# make test-releases   a core of the tests on the oldest and the newest torch, each in an environment of its own
# make test-integrations   ring in Lightning, Accelerate, transformers, Ray and torchft, which pip fetches for it
# make docs    the documentation as a site, in build/site
# make build   the set-up alone
# make wheel   a wheel in dist/, for this Python and its torch (PYTHON=…, TORCH=2.15.0: for those)
# make stubs   write the type stubs of the compiled modules (ringdp/_C.pyi, tests/core/_core.pyi) anew, after a change of a binding
# make compile-each   check that each C++ file compiles by itself: the build compiles several together
#
# PYTHON names the Python to use (make test PYTHON=python3.12). One that has torch 2.11 or newer is used as it is;
# for one without torch a .venv is made here. TORCH=2.15.0 makes .venv-torch-2.15.0 and works there (the extension is built
# anew). tools/environment.py does that, and says what is missing.

PYTHON ?= python3
ARGS ?=
NPROC ?= 2
TORCH ?=
SETUP = $(PYTHON) tools/environment.py $(if $(TORCH),--torch $(TORCH))
# The oldest and the newest release of torch that ringdp is tested with, and what shows that they fit.
RELEASES = 2.11.0 2.15.0
RELEASE_TESTS = tests/contract/test_collectives_torch.py tests/contract/test_operations_torch.py \
  tests/unit/test_ddp_arguments.py tests/unit/test_stubs.py tests/train/test_parallel_construction.py \
  tests/train/test_ddp_parity.py
CPP = git ls-files --cached --others --exclude-standard '*.cpp' '*.h' '*.c' '*.cu' '*.cuh' '*.inc' '*.def'

.PHONY: mutants build wheel compile-each test test-ci test-nightly test-slow test-all test-fake-gpu test-releases test-integrations train lint format stubs docs clean distclean python

build: python
	@$(SETUP)

wheel: python
	@$(SETUP) -- python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .
	@ls -1 dist/ringdp-*.whl

compile-each: python
	@$(SETUP) --compile-each

test: python
	@$(SETUP) -- python tools/run_tests.py $(ARGS)

test-ci: python
	@$(SETUP) -- python tools/run_tests.py --tier ci $(ARGS)

test-nightly: python
	@$(SETUP) -- python tools/run_tests.py --tier nightly $(ARGS)

test-slow: python
	@$(SETUP) -- python tools/run_tests.py --tier slow $(ARGS)

test-all: python
	@$(SETUP) -- python tools/run_tests.py --tier all $(ARGS)

test-fake-gpu: python
	@$(SETUP) -- python -m tests.fake_cuda $(ARGS)

mutants: python
	@$(SETUP) -- python -m tests.mutants $(ARGS)

test-releases:
	set -e; for release in $(RELEASES); do echo "== torch $$release"; \
	  $(MAKE) --no-print-directory test TORCH=$$release ARGS="$(RELEASE_TESTS)"; done

test-integrations: python
	@$(SETUP) -- python -m pytest -m integrations tests/integrations $(ARGS)

train: python
	@$(SETUP) -- python launch.py --nproc-per-node $(NPROC) examples/digits.py $(ARGS)

lint: python
	@$(SETUP) --lint -- ruff check .
	@$(SETUP) --lint -- ruff format --check --quiet .
	@$(SETUP) --lint -- sh -c "$(CPP) | xargs clang-format --dry-run -Werror"
	@$(SETUP) --lint -- python tools/stubs.py --check
	@$(SETUP) --lint -- mypy

format: python
	@$(SETUP) --lint -- ruff check --fix-only --quiet .
	@$(SETUP) --lint -- ruff format --quiet .
	@$(SETUP) --lint -- sh -c "$(CPP) | xargs clang-format -i"

# Warnings are errors: a link or an anchor that leads nowhere, a docstring that cannot be read. Needs no compiled ringdp.
# Not --quiet: then mkdocs does not count warnings.
docs: python
	@NO_MKDOCS_2_WARNING=1 $(SETUP) --docs -- python -m mkdocs build $(ARGS)
	@echo "ringdp: the site is in build/site; python -m http.server -d build/site shows it"

stubs: build
	@$(SETUP) --lint -- python tools/stubs.py

# Everything that was built, but not .venv.
clean:
	rm -rf build dist ringdp.egg-info ringdp/_build_info.py ringdp/*.so tests/core/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv

python:
	@command -v "$(PYTHON)" >/dev/null || \
	  { echo "ringdp: there is no $(PYTHON): install Python 3.10 or newer, or name one (make PYTHON=…)."; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "ringdp: $(PYTHON) is older than Python 3.10: name a newer one (make PYTHON=python3.11)."; exit 1; }
