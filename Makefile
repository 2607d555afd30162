# Everything a newcomer or CI runs. `make help` lists the targets.
VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := $(VENV)/bin
UV_VERSION := 0.13.9
CORE := $(wildcard embedding/core/*.cc embedding/core/*.h embedding/core/*.inc)
CPP := $(shell find embedding -name "*.cc" -o -name "*.h" -o -name "*.inc")

# Debian packages of the optional storage tiers; `make setup LIBRARIES=` goes on without them.
LIBRARIES ?= libleveldb1d libmemkind0 libpmem1

DATA ?=
MODE ?= async
OUT ?= demo-out
PYTEST ?= -q
# Two processes: heavy tests (clusters, environments) one after another on the one, all others on the other.
PARALLEL ?= -n 2 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup libraries demo demo-cluster test test-all lint format bench sanitize wheel lock clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(VENV)/.stamp ## Make the environment in .venv from the lock file and build the extension

$(VENV)/.stamp: requirements/lock.txt setup.py pyproject.toml $(CORE)
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then $(MAKE) --no-print-directory libraries; fi
	@test -n "$(PYTHON)" || { echo "Python 3.11 is needed: set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Setting up $(VENV): about 2 GB of packages, a minute or two …"
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	test -x $(BIN)/uv || $(BIN)/pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps -r requirements/lock.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation -e .
	touch $@

libraries: ## Install libpmem, memkind and LevelDB, which storage tiers use if they are there (Debian, as root)
	@missing=$$(for package in $(LIBRARIES); do dpkg -s $$package >/dev/null 2>&1 || echo $$package; done); \
	test -z "$$missing" || { set -x; \
	    apt-get install -y -q --no-install-recommends $$missing >/dev/null 2>&1 || \
	    { apt-get update -q && apt-get install -y -q --no-install-recommends $$missing; } >/dev/null; } || \
	{ echo "Not installed:" $$missing "(as root, with a package source; or leave them out: make setup LIBRARIES=)" >&2; \
	  exit 1; }

demo: setup ## Run the main job in this process: make demo [DATA=criteo.tsv|movielens-folder]
	$(BIN)/deeprec-spark demo --out $(OUT) $(if $(DATA),--data "$(DATA)")

demo-cluster: setup ## The same by spark-submit on a standalone cluster it starts: … [DATA=…] [MODE=async|sync]
	$(BIN)/deeprec-spark demo --out $(OUT) --cluster --mode $(MODE) $(if $(DATA),--data "$(DATA)")

test: setup ## Run the tests (about 40 minutes on 2 cores)
	$(BIN)/pytest $(PARALLEL) $(PYTEST)

test-all: setup ## Run the tests in full length, the slow ones too
	DEEPREC_TEST_ALL=1 $(BIN)/pytest $(PARALLEL) $(PYTEST)

lint: setup ## Check style, types and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(if $(CPP),$(BIN)/clang-format --dry-run --Werror $(CPP))

format: setup ## Rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(if $(CPP),$(BIN)/clang-format -i $(CPP))

bench: setup ## Compare training speed with Keras's and PyTorch's embeddings
	$(BIN)/python -m benchmarks.training --model dlrm --batch 2048

SANITIZE_SECONDS ?= 5
sanitize: ## Stress the engine under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer
	embedding/core/tests/sanitize.sh $(SANITIZE_SECONDS)

wheel: setup ## Build dist/deeprec_spark-*.whl
	rm -rf build dist
	$(BIN)/python -m build --wheel --no-isolation --outdir dist .

lock: ## Resolve requirements/*.in anew
	$(BIN)/uv pip compile requirements/dev.in --override requirements/overrides.txt --python-version 3.11 \
	    --no-emit-package deeprec-spark --no-header --output-file requirements/lock.txt

clean: ## Remove what builds and demos made; keeps the environment
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache
	@if [ -f $(OUT)/.deeprec-demo ]; then rm -rf $(OUT); elif [ -e $(OUT) ]; then \
		echo "Left alone, since no demo marked it: $(OUT)"; fi
