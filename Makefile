# make demo | test | test-gpu | random-cases | bench | sanitize | lint     each sets up what it needs, then runs; a
# second call installs nothing. The set-up is a virtual environment in .venv with the versions of requirements/.
#
#   PYTHON=python3          use that interpreter as it is and install nothing (a GPU machine without a network)
#   TORCH_INDEX=URL         an index of PyTorch builds to look at besides PyPI, such as that of the CPU builds
#   ARGS="..."              arguments for the program that runs: `make bench ARGS="--quick"`, `make test ARGS="-k sink"`
#   SANITIZER=PATH          the compute-sanitizer that `make sanitize` runs, where it finds none or the wrong one
#   JOBS=N                  processes that `make test` runs (2)
#   GPUS=N                  GPUs that `make test-gpu` may count on (1): no test is skipped for want of as many
#   EXAMPLES=N              calls of each of its 20 properties that `make random-cases` draws (1000)

VENV := .venv
JOBS ?= 2
ARGS ?=
GPUS ?= 1
EXAMPLES ?= 1000
export PYTHONUNBUFFERED := 1

ifdef PYTHON
RUN := $(PYTHON)
PARALLEL :=
export PYTHONPATH := $(CURDIR)/src$(if $(PYTHONPATH),:$(PYTHONPATH))
ready = Makefile
else
RUN := $(VENV)/bin/python
PARALLEL = -n $(JOBS)
ready = $(VENV)/$(1).stamp
endif

.PHONY: demo test test-gpu random-cases bench sanitize lint
.NOTPARALLEL:

demo: $(call ready,demo)
	$(RUN) -m slattn demo $(ARGS)

# Everything that needs no GPU. One thread a process: the machine's cores are already taken by the processes.
test: $(call ready,test)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -m "not gpu" $(PARALLEL) $(ARGS)

test-gpu: $(call ready,gpu)
	SLATTN_REQUIRE_GPU=$(GPUS) $(RUN) -m pytest -m gpu $(ARGS)

# SLATTN_SEED, which the last line tells, gives the same calls again. The kernels are compiled first, each once.
random-cases: $(call ready,gpu)
	$(RUN) tests/properties.py
	SLATTN_REQUIRE_GPU=1 SLATTN_EXAMPLES=$(EXAMPLES) OMP_NUM_THREADS=1 $(RUN) -m pytest -q -m gpu \
	    tests/test_properties.py -n auto --dist worksteal $(ARGS)

bench: $(call ready,gpu)
	$(RUN) -m slattn bench $(ARGS)

# The tests named sanitize are the smallest ones that reach every kernel: under a tool each takes a hundred times longer.
# Without torch's caching allocator a tensor's end is the end of its allocation, so that a read past it is seen.
sanitize: $(call ready,gpu)
	@sanitizer=$(SANITIZER); [ -n "$$sanitizer" ] || sanitizer=$$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer \
	    $(VENV)/lib/python3*/site-packages/nvidia/cu13/bin/compute-sanitizer 2>/dev/null | head -n 1); \
	[ -n "$$sanitizer" ] || { echo "compute-sanitizer is missing: it comes with the CUDA toolkit, or with" \
	    "pip install nvidia-cuda-sanitizer-api==13.0.85" >&2; exit 1; }; \
	for tool in memcheck racecheck initcheck synccheck; do \
	    echo "== $$tool"; \
	    SLATTN_REQUIRE_GPU=1 PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$$sanitizer" --tool $$tool --target-processes all \
	        --error-exitcode 1 $(RUN) -m pytest -m gpu -k sanitize -p no:cacheprovider $(ARGS) || exit 1; \
	done

lint: $(call ready,test)
	$(RUN) -m ruff check src tests docs
	$(RUN) -m ruff format --check src tests docs
	$(RUN) -m mypy

$(VENV)/bin/python:
	@python3 -m venv $(VENV) || { rm -rf $(VENV); \
	    echo "python3 -m venv failed: on Debian and Ubuntu it is the package python3-venv" >&2; exit 1; }

# gpu.txt includes test.txt, which includes demo.txt.
$(VENV)/demo.stamp: requirements/demo.txt
$(VENV)/test.stamp: requirements/demo.txt requirements/test.txt requirements/frameworks.txt
$(VENV)/gpu.stamp: requirements/demo.txt requirements/test.txt requirements/frameworks.txt requirements/gpu.txt
$(VENV)/%.stamp: requirements/constraints.txt pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
	    -c requirements/constraints.txt -r requirements/$*.txt
	$(if $(filter demo,$*),,$(VENV)/bin/python -m pip install --quiet --no-deps -r requirements/frameworks.txt)
	$(VENV)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@
