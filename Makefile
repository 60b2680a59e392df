# make judge | sealed | test | bench | bench-compare | bench-store | doctor | lint | types: each sets up what it needs,
# then does its job.
#
#   make judge ARGS='--config configs/max-autotune.yaml'    options for the command itself
#   make judge PYTHON=python3.12                            another Python for the virtual environment
#   make judge PYTHON=python3 VENV=                         that Python as it is: no environment, no network

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

# The versions a fresh environment gets; pyproject.toml has the range that is allowed.
TORCH ?= 2.13.0
TRITON ?= 3.7.1
# Without a GPU: the CPU build where pip already finds one, else from PyTorch's own index, else whatever PyPI has for
# this platform (on macOS that is a CPU build; on Linux it is the CUDA build, larger, which runs on a CPU as well).
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

READY := $(if $(VENV),$(VENV)/.ready)
RUN := $(if $(VENV),$(VENV)/bin/python,$(PYTHON))
PIP := $(RUN) -m pip --disable-pip-version-check

.PHONY: judge sealed test bench bench-compare bench-store doctor lint types setup clean

judge: $(READY)
	$(RUN) -m tools judge $(ARGS)

sealed: $(READY)
	$(RUN) -m tools sealed $(ARGS)

test: $(READY)
	$(RUN) -m pytest tests --ignore=tests/bench $(ARGS)

bench: $(READY)
	$(RUN) -m tools bench $(ARGS)

bench-compare: $(READY)
	$(RUN) -m tools bench --compare $(ARGS)

bench-store: $(READY)
	$(RUN) -m tools bench --store $(ARGS)

doctor: $(READY)
	$(RUN) -m tools doctor $(ARGS)

lint: $(READY)
	$(RUN) -m ruff check .

types: $(READY)
	$(RUN) -m mypy

setup: $(READY)

ifneq ($(VENV),)
$(READY): pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	printf 'torch==$(TORCH)\ntriton==$(TRITON)\n' > $(VENV)/constraints.txt
	if command -v nvidia-smi > /dev/null && nvidia-smi > /dev/null 2>&1; then \
	    $(PIP) install 'torch==$(TORCH)'; \
	else \
	    $(PIP) install 'torch==$(TORCH)+cpu' \
	    || $(PIP) install 'torch==$(TORCH)+cpu' --index-url $(TORCH_CPU_INDEX) \
	    || $(PIP) install 'torch==$(TORCH)'; \
	fi
	$(PIP) install -c $(VENV)/constraints.txt -e '.[dev]'
	touch $@
endif

clean:
	rm -rf build dist out .pytest_cache .ruff_cache .mypy_cache .hypothesis .benchmarks methods/main/*.egg-info
