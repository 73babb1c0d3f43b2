# make demo    train a small transformer to sort words, under a minute
# make test    what finds most faults of a change, five minutes
# make test-all  all tests that this machine can run, half an hour
# make fuzz    random problems on the emulator, ten minutes
# make fuzz-gpu  the same and large ones on this machine's GPU, ten minutes
# make fuzz-tests  the tests that draw calls at random, for hours
# make mutate  mutate the kernels: do the tests notice? ten minutes
# make affected FILE=sm90/forward.cu  the tests that run a kernel file
# make coverage  which lines of the kernels does no test run?
# make bench   time cuflash on this machine's GPU
# make sweep   tune tile sizes for this machine's GPU
# make docs    run every example, then build the site into build/docs
# make lint    style and types of the Python files
# make clean   remove .venv and all else that make made
#
# Each makes .venv and installs what it needs, CuPy too where there is a GPU.
#   make test PYTHON=python3.12          another Python for a new .venv
#   make test ARGS="-k causal"           options for pytest or for the script
#   make fuzz ARGS="--seconds 60 --record"

PYTHON ?= python3
ARGS ?=
BIN := .venv/bin

# The extras of setup.cfg that each target needs; a GPU adds its own.
EXTRAS_demo := scripts
EXTRAS_test := test,scripts
EXTRAS_test-all := test,scripts,mpi
EXTRAS_fuzz := test,scripts
EXTRAS_fuzz-gpu := test,scripts
EXTRAS_fuzz-tests := test,scripts
EXTRAS_mutate := test,scripts
EXTRAS_affected := test,scripts
EXTRAS_coverage := test,scripts
EXTRAS_bench := scripts
EXTRAS_sweep := test,scripts
EXTRAS_docs := docs
EXTRAS_lint := lint

.PHONY: demo test test-all fuzz fuzz-gpu fuzz-tests mutate affected coverage bench \
	sweep docs lint clean
.DELETE_ON_ERROR:
# make would take the stamps for intermediate files.
.PRECIOUS: .venv/installed-%

# One thread for a matrix product: those of the demo are small, and threads
# that wait for each other cost them more than they gain.
ONE_THREAD := OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1

demo: .venv/installed-demo
	$(ONE_THREAD) $(BIN)/python scripts/demo.py $(ARGS)

# One process a core, at most four, so that they share a GPU's memory well.
# Some tests take a minute, most no time. Idle workers steal tests.
PYTEST := $(ONE_THREAD) $(BIN)/python -m pytest --dist worksteal

ALL_CORES := -n auto --maxprocesses 4

test: .venv/installed-test
	HYPOTHESIS_PROFILE=quick $(PYTEST) $(ALL_CORES) -m "not slow" $(ARGS)

test-all: .venv/installed-test-all
	HYPOTHESIS_PROFILE=ci $(PYTEST) $(ALL_CORES) $(ARGS)

# Both print for each failure the command that runs it again, and with
# ARGS=--record add to docs/fuzz.json what was tried.
fuzz: .venv/installed-fuzz
	$(BIN)/python scripts/fuzz.py $(ARGS)

fuzz-gpu: .venv/installed-fuzz-gpu
	$(BIN)/python scripts/fuzz.py --on gpu $(ARGS)

# Prints each failing example as one line, to be kept in the test; counts what
# was drawn in build/fuzz/tests_*.json, for scripts/fuzz.py --merge.
fuzz-tests: .venv/installed-fuzz-tests
	CUFLASH_TRIED=build/fuzz CUFLASH_COMMIT=$$(git rev-parse --short=10 HEAD) \
	HYPOTHESIS_PROFILE=nightly $(PYTEST) -n auto -m "drawn or property" $(ARGS)

# Prints for each mutant the command that runs it again:
# docs/internals/emulator.md.
mutate: .venv/installed-mutate
	$(ONE_THREAD) $(BIN)/python scripts/mutate.py $(ARGS)

affected: .venv/installed-affected
	HYPOTHESIS_PROFILE=quick $(ONE_THREAD) $(BIN)/python \
		scripts/affected.py $(FILE) $(ARGS)

coverage: .venv/installed-coverage
	$(ONE_THREAD) $(BIN)/python scripts/kernel_coverage.py $(ARGS)

bench: .venv/installed-bench
	$(BIN)/python scripts/bench.py $(ARGS)

# ARGS=--dry-run works without a GPU.
sweep: .venv/installed-sweep
	$(BIN)/python scripts/sweep_blocks.py $(ARGS)

# ARGS="--require torch --require jax" fails where their examples do not run.
docs: .venv/installed-docs
	$(ONE_THREAD) $(BIN)/python scripts/run_examples.py $(ARGS)
	$(ONE_THREAD) $(BIN)/python scripts/build_docs.py

lint: .venv/installed-lint
	$(BIN)/ruff check $(ARGS)
	$(BIN)/ruff format --check
	$(BIN)/mypy

# Without an index first: that needs no network where .venv has all already.
.venv/installed-%: setup.cfg setup.py pyproject.toml cuflash/_version.py \
		scripts/cuda_extra.py | $(BIN)/python
	@cuda=$$($(BIN)/python scripts/cuda_extra.py) && \
	extras="$(EXTRAS_$*)$${cuda:+,$$cuda}" && \
	install="$(BIN)/python -m pip install -qq --editable .[$$extras]" && \
	if ! PIP_FIND_LINKS= $$install --no-index --no-build-isolation \
		>/dev/null 2>&1; then \
		echo "Installing cuflash[$$extras] into .venv" && \
		$$install || { echo "make $*: .venv lacks packages of" \
		"cuflash[$$extras], and pip did not get them" >&2; exit 1; }; \
	fi
	@touch $@

# pip is renewed because the one of early Pythons 3.10 knows no editable
# installs from pyproject.toml; setuptools, for those without a network.
$(BIN)/python:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10))" || \
	{ echo "$(PYTHON) is not there, or too old: cuflash needs Python 3.10" \
	"or newer. Try make PYTHON=python3.12" >&2; exit 1; }
	@echo "Making .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv --clear .venv && \
	$(BIN)/python -m pip install -qq --upgrade pip setuptools || \
	{ rm -rf .venv; \
	echo "make: .venv could not be made; pip needs a network for it" >&2; \
	exit 1; }

clean:
	rm -rf .venv build dist cuflash.egg-info demo_output sweep_output
	rm -rf .pytest_cache .hypothesis .ruff_cache .mypy_cache .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
