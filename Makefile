# Everything runs from .venv, which is made at first use. Options, given as VARIABLE=value after the target:
#   PYTHON      the interpreter that makes .venv (3.11 or newer)
#   PIP_FLAGS   passed to pip, for example --extra-index-url=https://download.pytorch.org/whl/cpu for a smaller PyTorch

PYTHON ?= python3
PIP_FLAGS ?=
BIN := .venv/bin
STAMP := .venv/.installed
# A process per core, each with one thread.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help venv demo demo-quick test test-full lint style clean

help:
	@echo "make demo         train under a memory budget and compare with plain PyTorch"
	@echo "make demo-quick   the same, smaller"
	@echo "make test         style, types, layers and tests, as CI runs them"
	@echo "make test-full    the full product of models, planners, budgets and engines too"
	@echo "make bench        every claim measured that needs no GPU and no other Python, into benchmarks/results; hours"
	@echo "make clean        remove .venv and all caches"

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "tapestream needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true)."; \
	  echo "Try: make $(or $(MAKECMDGOALS),venv) PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@echo "installing into .venv (minutes the first time)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	@touch $@

demo: venv
	@$(BIN)/tapestream demo

demo-quick: venv
	@$(BIN)/tapestream demo --quick

lint: style
	@echo "mypy";         $(BIN)/mypy --no-error-summary

style: venv
	@echo "ruff";         $(BIN)/ruff check --quiet . && $(BIN)/ruff format --quiet --check .
	@echo "lint-imports"; $(BIN)/lint-imports > .lint-imports.tmp 2>&1 || { cat .lint-imports.tmp; exit 1; }

# Types are looked at while tests are collected, which takes one core.
test: style
	@echo "mypy, pytest"; $(BIN)/mypy --no-error-summary & types=$$!; \
	  $(PYTEST); tests=$$?; wait $$types || { echo "mypy found errors, see above"; exit 1; }; exit $$tests

test-full: lint
	@echo "pytest, in full"; $(PYTEST) -m "full or not full"

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f .lint-imports.tmp

# Half an hour; then some hours, about three of them for million_layers, which takes 32 GB of disk.
BENCHMARKS := everything_fits equal_peak kept_attention from_disk beside_ramtorch random_lengths forward_only planning_speed \
  beside_schedules least_again \
  async_disk beside_compiled beside_trainer loop_overhead offload_and_recompute program_long program_networks program_speed save_speed supernets \
  what_to_expect million_layers
# Each needs more than they do, and is run by itself: beside_deepspeed (DeepSpeed), loop_beside (--peers, a Python with
# jax, equinox and pyrevolve), loop_long (no --folder) and those in benchmarks/gpu.

.PHONY: bench
bench: venv  # writes benchmarks/results; BENCHMARKS='some of them', THREADS=n, FOLDER=path/on/the/disk/to/measure
	@for name in $(BENCHMARKS); do echo "$$name"; \
	  $(BIN)/python -m benchmarks.$$name $(if $(THREADS),--threads $(THREADS)) $(if $(FOLDER),--folder $(FOLDER)) || exit 1; done
