# Every target builds .venv first when it is missing or older than what defines it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
EXTRAS := experiments,cli,tensorboard,prometheus,test,dev

.PHONY: demo test test-slow check lint bench evidence clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[$(EXTRAS)]"
	touch $@

demo: $(VENV)/.installed
	$(BIN)/python -m experiments.attention_fault demo

test: $(VENV)/.installed
	$(BIN)/pytest -n $(WORKERS) --dist worksteal -m "not slow"

test-slow: $(VENV)/.installed
	$(BIN)/pytest -m slow

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

check: lint test test-slow

bench: $(VENV)/.installed
	$(BIN)/python -m experiments.bench_metrics cores
	$(BIN)/python -m experiments.bench_metrics monitor
	$(BIN)/python -m experiments.bench_msign
	$(BIN)/python -m experiments.bench_sharded
	$(BIN)/python -m experiments.bench_watch

# Hours; resumable. How long each experiment takes: experiments/README.md.
evidence: $(VENV)/.installed
	$(BIN)/python -m experiments.evidence run

# The TPU's own compiler, in an environment of its own; no TPU is needed.
tpu:
	$(PYTHON) -m venv .venv-tpu
	.venv-tpu/bin/pip install --quiet --constraint constraints.txt --editable ".[experiments,tpu]"
	.venv-tpu/bin/python -m experiments.tpu_study

clean:
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache
