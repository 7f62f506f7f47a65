# Everything a user or a developer does, each by one word; `make help` lists them.
# A stamp in the virtual environment remembers what is installed, so a second `make` installs nothing.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c

PYTHON ?= python3
VENV ?= .venv
# torch goes in first and alone: a CPU or a CUDA build, as TORCH and TORCH_INDEX say.
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
# megatron-core: a release that setup.py allows.
CORE ?= megatron-core
# The newest one asks for a newer Python than the oldest does; its tests have an environment of their own.
PYTHON_NEWEST ?= python3.12
VENV_NEWEST ?= .venv-newest
CORE_NEWEST ?= megatron-core==0.19.2
PYTEST_ARGS ?=
BENCH_ARGS ?=
# Two files of tests at a time: ranks wait for each other, and a file's worlds are its own.
IN_PARALLEL := --numprocesses=2 --dist=loadfile

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMPS := $(VENV)/.stamps
TORCH_STAMP := $(STAMPS)/$(subst =,-,$(TORCH))
CORE_STAMP := $(STAMPS)/$(subst =,-,$(CORE))
TORCHRUN := $(BIN)/torchrun --standalone --nproc-per-node 2
RUN := runs/quickstart
# One thread a rank: ranks share the cores, and sums do not depend on the number of cores.
export OMP_NUM_THREADS := 1

.DEFAULT_GOAL := help
.PHONY: help install quickstart bench test test-all test-newest-core test-slurm lint format clean distclean

help: ## List these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMPS)/run ## Make .venv and install what a run needs

quickstart: $(RUN)/sft/curves.png $(RUN)/grpo/curves.png ## Train a small model on real rollouts: imitation, then GRPO
	@echo
	@echo "Pictures      $^"
	@echo "TensorBoard   $(BIN)/tensorboard --logdir $(RUN)"
	@echo "Numbers       $(RUN)/grpo/tensorboard/metrics.jsonl"
	@echo "Start over    rm -r $(RUN)"
	@echo "Next, the same run with another parallel layout, and both over each other:"
	@echo "  $(TORCHRUN) pretrain_rl.py --config examples/grpo.yaml \\"
	@echo "      --save runs/tp/checkpoints --load runs/tp/checkpoints --tensorboard-dir runs/tp/tensorboard \\"
	@echo "      --context-parallel-size 1 --tensor-model-parallel-size 2 --sequence-parallel"
	@echo "  $(BIN)/python tools/plot_run.py $(RUN)/grpo runs/tp --output runs/layouts.png"

# Stopped runs go on where their last checkpoint is; finished ones are not run again.
$(RUN)/sft/curves.png: examples/quickstart.yaml | $(STAMPS)/run
	$(TORCHRUN) pretrain_rl.py --config $<
	$(BIN)/python tools/plot_run.py $(RUN)/sft --output $@

$(RUN)/grpo/curves.png: examples/grpo.yaml $(RUN)/sft/curves.png | $(STAMPS)/run
	$(TORCHRUN) pretrain_rl.py --config $<
	$(BIN)/python tools/plot_run.py $(RUN)/grpo --output $@

bench: $(STAMPS)/bench ## Compare the head with other heads, on this machine (BENCH_ARGS=...)
	@mkdir -p runs
	$(BIN)/python -m benchmarks.head --json runs/bench.json $(BENCH_ARGS)

test: $(STAMPS)/test lint ## Install what tests need, lint, run the tests (PYTEST_ARGS=...)
	$(BIN)/pytest -m "not slow" --session-timeout=1800 $(IN_PARALLEL) $(PYTEST_ARGS)

test-all: $(STAMPS)/test lint ## The same with the slow tests
	$(BIN)/pytest --session-timeout=7200 $(IN_PARALLEL) $(PYTEST_ARGS)

test-newest-core: ## The tests once more, on PYTHON_NEWEST with CORE_NEWEST, in .venv-newest (about 5 GB)
	$(MAKE) test PYTHON=$(PYTHON_NEWEST) VENV=$(VENV_NEWEST) CORE=$(CORE_NEWEST)

test-slurm: $(STAMPS)/test ## Prove examples/slurm on a Slurm started here (as root, with slurm-wlm and munge)
	$(BIN)/python -m tests.slurm.prove

lint: $(STAMPS)/test ## ruff, formatting, types, import contracts, batch scripts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-logo
	$(BIN)/shellcheck -x examples/slurm/*.s*

format: $(STAMPS)/test ## Format the sources and fix what ruff can fix
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean: ## Remove caches and builds
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv*' -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## Remove .venv and .venv-newest too; runs/ stays
	rm -rf $(VENV) $(VENV_NEWEST)

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Python 3.11 or newer is needed: PYTHON=$(PYTHON) is $$($(PYTHON) --version 2>&1)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(TORCH_STAMP): $(STAMPS)/venv
	$(PIP) install "$(TORCH)" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	@touch $@

$(CORE_STAMP): $(STAMPS)/venv
	@touch $@

$(STAMPS)/run: $(TORCH_STAMP) $(CORE_STAMP) setup.py
	$(PIP) install --editable '.[plot]' "$(CORE)"
	@touch $@

$(STAMPS)/test: $(TORCH_STAMP) $(CORE_STAMP) setup.py
	$(PIP) install --editable '.[plot,test,lint]' "$(CORE)"
	@touch $(STAMPS)/run $@

$(STAMPS)/bench: $(TORCH_STAMP) $(CORE_STAMP) setup.py
	$(PIP) install --editable '.[plot,bench]' "$(CORE)"
	@touch $(STAMPS)/run $@
