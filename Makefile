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
.PHONY: help venv demo demo-quick quick dist test test-gpu test-full lint style clean

help:
	@echo "make demo         train under a memory budget and compare with plain PyTorch"
	@echo "make demo-quick   the same, smaller"
	@echo "make quick        style, and one test of each kind; under a minute"
	@echo "make test         style, types, layers and tests, as CI runs them; those of a GPU on a simulated one"
	@echo "make test-gpu     the tests of a GPU alone, on a simulated one (needs g++)"
	@echo "make test-full    the full product of models, planners, budgets and engines too"
	@echo "make test-torch   a choice of the tests with another PyTorch: make test-torch TORCH=2.11.0"
	@echo "make bench        every claim measured that needs no GPU and no other Python, into benchmarks/results; hours"
	@echo "make dist         wheel and source archive, into dist"
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

dist: venv
	@rm -rf dist build
	@$(BIN)/python -c "from setuptools import build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')" > /dev/null
	@ls dist

# What to run while one works: one test of each kind.
quick: style
	@echo "pytest, quick"; $(BIN)/python -m pytest -p no:xdist tests/test_quick.py

# Types are looked at while tests are collected, which takes one core.
test: style
	@echo "mypy, pytest"; $(BIN)/mypy --no-error-summary & types=$$!; \
	  $(PYTEST); tests=$$?; wait $$types || { echo "mypy found errors, see above"; exit 1; }; \
	  [ $$tests = 0 ] || exit $$tests
	@$(MAKE) --no-print-directory test-gpu

# In a run of their own: in these processes PyTorch has a GPU. Then tests of what has to be exact anywhere.
FAMILIES := tests/frontends/test_chain_hazards.py tests/frontends/test_join_exact.py tests/frontends/loop/test_loop_exact.py \
  tests/frontends/test_living.py tests/frontends/test_overflow.py tests/frontends/test_update_on_host.py tests/frontends/saving/test_save_exact.py \
  tests/optim/test_streamed_optimizer.py tests/transformers/test_trials.py
ON_SIMULATED_GPU := PYTHONPATH=tests $(PYTEST) -p simulated_gpu.plugin -o addopts="-q --strict-markers" \
  tests/gpu tests/simulated_gpu $(FAMILIES)
test-gpu: venv
	@echo "pytest, on a simulated GPU"; $(ON_SIMULATED_GPU) -m "not full"

test-full: lint
	@echo "pytest, in full"; $(PYTEST) -m "full or not full"
	@echo "pytest, on a simulated GPU, in full"; $(ON_SIMULATED_GPU) -m "full or not full"

# PyTorch's versions differ in private names, kernels and optimizers. One version at a time, in an environment of its
# own; these are the tests of what touches them, and a few of each family.
TORCH_TESTS := tests/capture/test_observe.py tests/capture/test_transforms.py tests/runner/test_private.py tests/runner/test_unneeded.py tests/storage/test_meter.py tests/storage/test_pool.py \
  tests/planning/test_profile.py tests/frontends/test_around.py tests/frontends/test_chain_exact.py \
  tests/frontends/test_kept_inside.py tests/frontends/test_join_exact.py tests/frontends/test_stream_exact.py \
  tests/frontends/loop/test_loop_compiled.py tests/frontends/program/test_program_exact.py \
  tests/frontends/program/test_program_surroundings.py tests/frontends/program/test_program_users.py \
  tests/frontends/program/test_program_writes.py tests/frontends/program/test_program_opaque.py \
  tests/frontends/saving/test_save_exact.py tests/optim/test_streamed_optimizer.py tests/cli/test_cli_plan.py \
  tests/frontends/outlines/test_fake.py tests/models/test_grouped.py tests/frontends/outlines/test_outline.py

.PHONY: test-torch
test-torch: $(if $(TORCH),.venv-torch-$(TORCH)/.installed)
	@test -n "$(TORCH)" || { echo "say with which PyTorch: make test-torch TORCH=2.11.0"; exit 1; }
	@echo "pytest, PyTorch $(TORCH)"; $(PYTEST:$(BIN)%=.venv-torch-$(TORCH)/bin%) $(TORCH_TESTS)

# setuptools and sympy: PyTorch asks for versions of its own.
.venv-torch-%/.installed: pyproject.toml constraints.txt
	@echo "installing PyTorch $* into .venv-torch-$* (minutes the first time)"
	@$(PYTHON) -m venv .venv-torch-$*
	@grep -vE '^(torch|setuptools|sympy)==' constraints.txt > .venv-torch-$*/constraints.txt
	@.venv-torch-$*/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) \
	  -c .venv-torch-$*/constraints.txt -e '.[dev]' torch==$*
	@touch $@

clean:
	rm -rf .venv .venv-torch-* build dist src/*.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f .lint-imports.tmp

# Half an hour; then some hours, about three of them for million_layers, which takes 32 GB of disk.
BENCHMARKS := memory_over_a_step first_seconds everything_fits equal_peak kept_attention from_disk accumulate beside_ramtorch random_lengths forward_only planning_speed planned_seconds plans_kept \
  beside_schedules least_again ablation \
  async_disk beside_compiled beside_trainer loop_overhead offload_and_recompute program_long program_networks program_speed save_speed supernets \
  what_to_expect streaming_on_paper ranks_scaling ranks_gloo million_layers
# Each needs more than they do, and is run by itself: beside_deepspeed and ranks_deepspeed (DeepSpeed), loop_beside
# (--peers, a Python with jax, equinox and pyrevolve), loop_long (no --folder), against and three_tiers (a revision) and
# those in benchmarks/gpu.

.PHONY: bench
bench: venv  # writes benchmarks/results; BENCHMARKS='some of them', THREADS=n, FOLDER=path/on/the/disk/to/measure
	@for name in $(BENCHMARKS); do echo "$$name"; \
	  $(BIN)/python -m benchmarks.$$name $(if $(THREADS),--threads $(THREADS)) $(if $(FOLDER),--folder $(FOLDER)) || exit 1; done
