# Everything a developer runs. `make` alone lists the targets; each makes its environment first if it is not there.

PYTHON ?= python3
TORCH ?= 2.13.0
NEWEST ?= 2.15.0
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet
PUBLISHING := $(VENV)/.publishing
COVERAGE := .venv-coverage
COVERAGE_PIP := $(COVERAGE)/bin/python -m pip --disable-pip-version-check --quiet --quiet
QUANTIZE := .venv-quantize
QUANTIZE_PIP := $(QUANTIZE)/bin/python -m pip --disable-pip-version-check --quiet --quiet
CLIENTS := .venv-clients
CLIENTS_PIP := $(CLIENTS)/bin/python -m pip --disable-pip-version-check --quiet --quiet

.DEFAULT_GOAL := help
.PHONY: help test test-slow test-models test-clients test-all lint format types layers check demo bench bench-quantize coverage docs package test-newest clean

help: ## list the targets
	@echo "Targets (PYTHON=$(PYTHON) makes the environment $(VENV) with torch $(TORCH)):"
	@awk -F ':.*## ' '/^[a-z.-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' Makefile
	@echo "ARGS is passed on, for example: make test ARGS='tests/zoo -k resnet'"

.venv: $(INSTALLED) ## make the environment and install the pinned versions

# The stamp, not the folder, is the real target: a folder's time changes with every file written in it.
# setuptools goes in first and build isolation is off, so that the build uses the pinned one and fetches nothing more.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("torchgraft needs Python 3.11 or newer, found " + sys.version.split()[0] + "; choose another with: make PYTHON=python3.12 ...") if sys.version_info < (3, 11) else None'
	@echo "Installing torch $(TORCH) and the pinned tools into $(VENV) (about a minute, once)"
	@$(PYTHON) -m venv $(VENV)
	@sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(VENV)/constraints.txt
	@$(PIP) install -c $(VENV)/constraints.txt setuptools
	@$(PIP) install -c $(VENV)/constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

test: $(INSTALLED) ## run the tests of every day and the examples in docstrings
	$(BIN)/python -m pytest -n auto --dist loadfile -m "not slow" $(ARGS)

test-slow: $(INSTALLED) ## run the thorough tests that `make test` leaves out
	$(BIN)/python -m pytest -n auto --dist loadfile -m slow $(ARGS)

test-all: test test-slow test-models ## run all tests

test-models: $(COVERAGE)/.installed ## try models of transformers, timm and torchvision at every level (a download)
	$(COVERAGE)/bin/python -m pytest -q -p no:cacheprovider tests/models $(ARGS)

lint: $(INSTALLED) ## check style, unused code and the ban on torch.fx outside bridge/
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED) ## rewrite the files in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(INSTALLED) ## check the types of src
	$(BIN)/mypy

layers: $(INSTALLED) ## check that each room imports only the rooms below it
	$(BIN)/lint-imports

check: test-all lint types layers ## all tests, lint, types and layers, as CI does

# A thread that waits must not keep a core from those that work: on two busy cores that is a minute instead of three.
demo: $(INSTALLED) ## capture ResNet-50, change it, check it against eager, and write a page about it to build/demo
	@$(BIN)/python -m torchgraft demo $(ARGS)
	@echo
	@OMP_WAIT_POLICY=passive $(BIN)/python -m torchgraft report zoo:resnet50 -o build/demo

bench: $(INSTALLED) ## time torchgraft beside torch.fx and print the ratios
	@$(BIN)/python -m benchmarks $(ARGS)

bench-quantize: $(QUANTIZE)/.installed ## quantized programs beside torch.ao, onnxruntime, OpenVINO and torchao: time, memory, training (a large download)
	@PYTHONPATH=src $(QUANTIZE)/bin/python -m benchmarks.quantizing $(ARGS)
	@PYTHONPATH=src $(QUANTIZE)/bin/python -m benchmarks.quantizing.language
	@PYTHONPATH=src $(QUANTIZE)/bin/python -m benchmarks.quantizing.memory
	@PYTHONPATH=src $(QUANTIZE)/bin/python -m benchmarks.quantizing.digits

# Packages that ask for a torch of their own go in without what they ask for.
$(QUANTIZE)/.installed: benchmarks/quantizing/constraints.txt
	@echo "Installing torch $(TORCH), onnxruntime, OpenVINO, NNCF and torchao into $(QUANTIZE) (a few minutes, once)"
	@$(PYTHON) -m venv $(QUANTIZE)
	@sed 's/^torch==.*/torch==$(TORCH)/' benchmarks/quantizing/constraints.txt > $(QUANTIZE)/constraints.txt
	@$(QUANTIZE_PIP) install -c $(QUANTIZE)/constraints.txt torch
	@$(QUANTIZE_PIP) install --no-deps -r $(QUANTIZE)/constraints.txt
	@touch $@

# A sweep that was stopped goes on where it was with RESUME=1; without, it begins anew, because the code may have changed.
coverage: $(COVERAGE)/.installed ## capture the models of torchvision, timm and transformers and write docs/coverage.md (a large download)
	@mkdir -p build
	$(if $(RESUME),,@rm -f build/coverage.jsonl)
	@$(COVERAGE)/bin/python -m benchmarks.coverage --rows build/coverage.jsonl --markdown docs/coverage.md $(ARGS)

# torchvision goes in alone: it asks for a torch of its own, and the operators it is compiled with are not needed.
$(COVERAGE)/.installed: constraints.txt benchmarks/coverage/constraints.txt
	@echo "Installing torch $(TORCH), torchvision, timm and transformers into $(COVERAGE) (a few minutes, once)"
	@$(PYTHON) -m venv $(COVERAGE)
	@sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt benchmarks/coverage/constraints.txt > $(COVERAGE)/constraints.txt
	@$(COVERAGE_PIP) install -c $(COVERAGE)/constraints.txt setuptools numpy
	@$(COVERAGE_PIP) install -c $(COVERAGE)/constraints.txt --no-build-isolation -e .
	@$(COVERAGE_PIP) install -c $(COVERAGE)/constraints.txt --no-deps torchvision
	@$(COVERAGE_PIP) install -c $(COVERAGE)/constraints.txt timm transformers pillow pytest hypothesis
	@touch $@

# Notebooks are run by the kernel of the environment, on one thread: they are small, and other jobs run beside them.
docs: $(PUBLISHING) ## build the documentation site in build/site: links checked, notebooks run
	@OMP_NUM_THREADS=1 NO_MKDOCS_2_WARNING=true $(BIN)/python -m mkdocs build --strict $(ARGS)
	@echo "build/site/index.html"

package: $(PUBLISHING) ## build the wheel and the source distribution in dist, check them, and try the wheel
	@rm -rf dist
	@$(BIN)/python -m build --no-isolation --outdir dist > /dev/null
	@$(BIN)/twine check --strict dist/*
	@$(BIN)/python .ci/check_package.py

$(PUBLISHING): $(INSTALLED)
	@echo "Installing the tools for documentation and packages into $(VENV) (half a minute, once)"
	@$(PIP) install -c $(VENV)/constraints.txt --no-build-isolation -e '.[docs,release]'
	@touch $@

test-clients: $(CLIENTS)/.installed ## run clients of torch.fx on torchgraft, ported by an import, and write docs/clients.md (a large download)
	@$(CLIENTS)/bin/python -m benchmarks.clients $(if $(ARGS),$(ARGS),--markdown docs/clients.md)

$(CLIENTS)/.installed: benchmarks/clients/constraints.txt
	@echo "Installing torch $(TORCH) and clients of torch.fx into $(CLIENTS) (a few minutes, once)"
	@$(PYTHON) -m venv $(CLIENTS)
	@sed 's/^torch==.*/torch==$(TORCH)/' benchmarks/clients/constraints.txt > $(CLIENTS)/constraints.txt
	@$(CLIENTS_PIP) install -c $(CLIENTS)/constraints.txt torch
	@$(CLIENTS_PIP) install --no-deps -r $(CLIENTS)/constraints.txt
	@touch $@

test-newest: ## run the tests on the newest torch, in an environment of its own (a large download)
	@$(MAKE) --no-print-directory test VENV=.venv-newest TORCH=$(NEWEST)

clean: ## remove the environments and everything that was generated
	rm -rf .venv .venv-newest $(COVERAGE) $(CLIENTS) build dist src/*.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
