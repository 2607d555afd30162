VENV ?= .venv
PYTHON ?= python3.11
BIN := $(VENV)/bin

.PHONY: setup lock
setup: $(VENV)/.stamp

$(VENV)/.stamp: requirements/lock.txt setup.py pyproject.toml
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps -r requirements/lock.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation -e .
	touch $@

lock:
	$(BIN)/uv pip compile requirements/dev.in --override requirements/overrides.txt --python-version 3.11 \
	    --no-emit-package deeprec-spark --no-header --output-file requirements/lock.txt
