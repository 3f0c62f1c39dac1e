# The two commands: `make demo` and `make test`. Each sets everything up on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN := $(VENV)/.installed-run
DEV := $(VENV)/.installed-dev
# Marks a venv that was made here: one of the user's own is installed into, never removed.
OURS := $(VENV)/.made-by-make
# A GPU machine's own python3, with its own torch, where nobody has made a venv.
GPU_PYTHON := $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
NAME ?= layer
ARGS ?=
DEMO_OUT ?= runs/demo
# Tests start hundreds of processes: what one has compiled the next need not.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test install venv lint types unit coverage matrix faults docs docs-tables format gpu-test gpu-bench clean

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(RUN)  ## install, then train a small MoE language model on 4 local ranks; ARGS="--ranks 2 --steps 50"
	$(BIN)/imbrex demo --out $(DEMO_OUT) $(ARGS)

# Half a minute of types and documentation beside the tests, whose ranks wait for each other.
test: lint  ## install, then every check that needs no GPU
	$(MAKE) --no-print-directory --jobs=3 docs types unit

install: $(DEV)  ## only install, with everything that the checks need

# What a set-up that failed left behind is made anew, with the Python of this call.
venv:
	@if test -e $(RUN) || { test -x $(BIN)/python && ! test -e $(OURS); }; then \
		test "$(origin PYTHON)" = file || test "$$($(PYTHON) -V)" = "$$($(BIN)/python -V)" \
			|| { echo "$(VENV) has $$($(BIN)/python -V): make clean, then make PYTHON=$(PYTHON) ..."; exit 1; }; \
	else \
		$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
			|| { echo "imbrex needs Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 1; }; \
		{ test ! -e $(OURS) || rm -rf $(VENV); } && mkdir -p $(VENV) && touch $(OURS) && $(PYTHON) -m venv $(VENV); \
	fi

# Of 12,000 modules 3,000 are ever imported. Python compiles those then: 9 s of a processor for 33.
INSTALL = $(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt -e
FAILED = { echo "the exact versions in constraints.txt could not be installed with $$($(BIN)/python -V), see above:" \
	"mend that, or give another with make PYTHON=python3.12 ..."; exit 1; }

$(RUN): constraints.txt pyproject.toml | venv
	$(INSTALL) . || $(FAILED)
	@touch $@

$(DEV): constraints.txt pyproject.toml | venv
	$(INSTALL) '.[dev]' || $(FAILED)
	@touch $@ $(RUN)

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV)
	$(BIN)/basedpyright

UNIT = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu" --ignore=tests/gpu -n 2 --dist loadfile --no-loadscope-reorder

unit: $(DEV)
	$(UNIT)

# Counting is an eighth of what tests take, so `make test` does without.
coverage: $(DEV)  ## the tests once more, with their lines counted: at least 90 % of src/imbrex, before a release
	$(BIN)/coverage erase
	$(UNIT) --cov --cov-report=term

matrix: $(DEV)  ## every codec x transport x schedule x tensor ranks, forward and backward, on 4 and 8 ranks; kernels on both Blackwells
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/ranks/test_matrix.py tests/compile/test_other_gpus.py --matrix full -n 2 $(ARGS)

faults: $(DEV)  ## put known faults back one at a time and demand that a test catches each; ARGS="--list"
	$(BIN)/python -m tests.faults $(ARGS)

docs: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-tables: $(DEV)  ## write the documentation's tables from benchmarks/results and docstrings
	PYTHONPATH=src:. $(BIN)/python -m docs.tables

format: $(DEV)  ## let ruff write the layout
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

gpu-test:  ## the tests that need a Hopper GPU
	PYTHONPATH=src $(GPU_PYTHON) -m pytest -m gpu tests/gpu $(ARGS)

gpu-bench:  ## one benchmark, NAME=layer|..., into benchmarks/results/NAME.json
	PYTHONPATH=src:. $(GPU_PYTHON) benchmarks/$(NAME).py $(ARGS)

clean:  ## remove what was installed and built
	rm -rf $(VENV) site .coverage*
