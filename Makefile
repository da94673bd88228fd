# Everything happens in .venv inside this clone.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
NEMO := .venv-nemo
KILLS ?= 200

.PHONY: help install nemo demo test test-nemo test-all faults lint lock bench bench-gpu bench-compare clean

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

install: $(STAMP) ## set up .venv with the pinned packages

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --upgrade 'setuptools>=77' wheel
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[dev]'
	@touch $@

nemo: $(NEMO)/.installed ## a second environment over the first, with NeMo and the Lightning that it is bound to

$(NEMO)/.installed: $(STAMP) constraints-nemo.txt
	@test -x $(NEMO)/bin/python || $(PYTHON) -m venv $(NEMO)
	@printf '%s\n' "$(CURDIR)/$$(echo .venv/lib/python*/site-packages)" "$(CURDIR)/src" > $$(echo $(NEMO)/lib/python*/site-packages)/below.pth
	$(NEMO)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-nemo.txt 'nemo-toolkit[asr]' lightning
	@touch $@

demo: install ## make speech, train a small Whisper on it, show what it learned (a few minutes)
	$(BIN)/python -m luthier.modalities.asr.demo runs/demo

test: install ## the default tests, in two processes of one thread each
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

test-nemo: nemo ## the default tests with the Lightning that NeMo is bound to, and those of NeMo; TESTS="tests/..." names some
	OMP_NUM_THREADS=1 $(NEMO)/bin/python -m pytest -n 2 --dist loadfile $(TESTS)

test-all: install ## with the slow tests, and those on the real data beside the clone
	$(BIN)/python -m pytest -m 'not gpu'

faults: install ## kill runs, fill disks, break files: the large form (KILLS=200)
	FAULT_KILLS=$(KILLS) $(BIN)/python -m pytest -m faults tests/faults

lint: install ## formatting, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: install ## speed and memory beside the native trainers; ONLY="asr sft" names some
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[bench]'
	$(BIN)/python tests/benchmarks/bench.py --only $(ONLY)

bench-gpu: install ## published sizes on a GPU, in under 8 minutes: speed, and share of what the device can do
	$(BIN)/python tests/benchmarks/bench.py --only gpu

bench-compare: install ## which ratios fell: BEFORE=old.json AFTER=benchmarks.json
	$(BIN)/python tests/benchmarks/bench.py --compare $(BEFORE) $(or $(AFTER),benchmarks.json)

lock: ## renew the pins from the newest versions that work together
	rm -rf .venv-lock && $(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet --disable-pip-version-check 'torch==2.14.1' 'torchaudio==2.11.1' 'torchvision==0.29.1' -e '.[dev]'
	.venv-lock/bin/python -m pip freeze --all --exclude-editable > constraints.txt
	rm -rf .venv-lock

clean: ## remove what was set up
	rm -rf .venv build dist src/*.egg-info
