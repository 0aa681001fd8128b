# Everything that is needed is created on the way: a virtual environment in .venv, then the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Tests that run at a time; some start a federation of their own, with up to 2 GB.
TESTERS ?= 2

.PHONY: demo test test-all chaos lint clean

demo: $(VENV)/.installed
	$(BIN)/blend run

test: $(VENV)/.test-installed lint
	$(BIN)/python -m pytest -n $(TESTERS)

test-all: $(VENV)/.test-installed lint
	$(BIN)/python -m pytest -m ""

chaos: $(VENV)/.test-installed
	PYTHONPATH=tests $(BIN)/python -m chaos

lint: $(VENV)/.test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml
	@echo "installing into $(VENV): PyTorch alone is several GB, so this takes minutes"
	$(BIN)/python -m pip install --quiet --progress-bar off -e .
	touch $@

$(VENV)/.test-installed: $(VENV)/bin/python pyproject.toml
	@echo "installing into $(VENV): PyTorch alone is several GB, so this takes minutes"
	$(BIN)/python -m pip install --quiet --progress-bar off -e ".[test]"
	touch $(VENV)/.installed $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
