# One truth for tooling: CI runs exactly these targets.
PYTHON ?= python3
# Pinned for development; users bring any torch >= 2.8.
TORCH  ?= torch==2.13.0
OLDEST_TORCH := torch==2.8.*
OLDEST_HF := transformers==5.10.*
BIN    := .venv/bin
# Tests go to JOBS processes of one thread, which take what others have not begun; auto: as many as cores and memory
# allow (tests/workers.py).
JOBS   ?= auto
WORKERS = --numprocesses $(JOBS) --durations 10 --durations-min 5
ON_CPU  = -m 'not gpu' $(WORKERS) --dist worksteal
# Tests of one xdist_group share a worker, so that processes of ranks start once. tests/workers.py orders the groups, so
# that workers do not wait for each other's kernels.
ON_GPU  = $(WORKERS) --dist loadgroup --no-loadscope-reorder
# Another Python that has all packages, on a machine without network: nothing is installed.
WITH   ?= $(BIN)/python
READY   = $(if $(filter $(BIN)/python,$(WITH)),.venv/ready)

# Modules whose public names the reference shows; what begins with ! is left out, as modules whose name a function has.
API    := moefp8 moefp8.distributed moefp8.functional.training.weights moefp8.hf moefp8.layers \
	'!moefp8.precompile' '!moefp8.(distributed|routing|testing)[.]'

NVRTCS := nvidia-cuda-nvrtc-cu12==12.6.* nvidia-cuda-nvrtc-cu12==12.8.* nvidia-cuda-nvrtc-cu12==12.9.* \
	nvidia-cuda-nvrtc==13.0.* nvidia-cuda-nvrtc

.PHONY: help demo test test-hf-oldest test-torch-oldest test-gpu test-gpu-quick public fuzz faults sanitize \
	verify-compilers check format docs dist publish bench-load clean
help:            ## list the targets
	@grep -E '^[a-z-]+: .*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

.venv/ready: pyproject.toml
	@echo 'Installing $(TORCH) and all that development needs into .venv: once, some 75 s with a fast network.'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

demo: .venv/ready  ## load an FP8 MoE checkpoint and generate with it
	$(BIN)/python examples/generate.py

test: .venv/ready  ## every test that needs no GPU
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ON_CPU)

# The newest transformers is what `make test` runs with.
test-hf-oldest:  ## the tests of the plug-in with the oldest transformers that it supports
	$(PYTHON) -m venv .venv-hf-oldest
	.venv-hf-oldest/bin/pip install --quiet $(TORCH)
	.venv-hf-oldest/bin/pip install --quiet --editable '.[hf,testing]' $(OLDEST_HF) 'pytest-xdist>=3.8'
	OMP_NUM_THREADS=1 .venv-hf-oldest/bin/python -m pytest $(ON_CPU) tests/hf

# It brings CUDA's packages, gigabytes. Left out: peers, most tests of FSDP2, and transformers, which have faults of
# their own there on a CPU; and how much NVRTC spills: that of torch 2.8 lets `swiglu_columns.cu` of FP8 spill 12 bytes.
test-torch-oldest:  ## most tests with the oldest torch that users may bring
	$(PYTHON) -m venv .venv-torch-oldest
	.venv-torch-oldest/bin/pip install --quiet '$(OLDEST_TORCH)'
	.venv-torch-oldest/bin/pip install --quiet --editable '.[hf,testing]' \
		'peft>=0.20' 'nvidia-cuda-nvdisasm>=13' 'pytest-xdist>=3.8'
	OMP_NUM_THREADS=1 .venv-torch-oldest/bin/python -m pytest $(ON_CPU) -k 'not spills_nothing' \
		tests/adapters tests/checkpoint tests/deep_gemm tests/distributed/expert_parallel tests/functional tests/fuzz \
		tests/kernels tests/layers tests/precompile tests/quant tests/routing tests/testing

test-gpu: $(READY)  ## the tests that need a GPU; WITH=python3: by a Python that has all packages
	OMP_NUM_THREADS=1 $(WITH) -m pytest $(ON_GPU) -m 'gpu and not fuzz'

test-gpu-quick: $(READY)  ## every kernel, layer and direction on a GPU, in two minutes
	OMP_NUM_THREADS=1 $(WITH) -m pytest $(ON_GPU) -m 'gpu and not fuzz and not slow'

public: $(READY)  ## all public names on this checkout and on AGAINST=DIR, bit for bit; DEVICE=cuda for a GPU
	$(WITH) -m tests.public --against $(AGAINST) --device $(or $(DEVICE),cpu)

fuzz: $(READY)  ## MOEFP8_FUZZ_EXAMPLES random cases of each op, on a GPU if there is one
	if $(WITH) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
		$(WITH) -m pytest -m fuzz && MOEFP8_HYPOTHESIS_PROFILE=fuzz $(WITH) -m pytest tests/fuzz -m gpu; \
	else \
		MOEFP8_HYPOTHESIS_PROFILE=fuzz $(WITH) -m pytest tests/fuzz -m 'not gpu'; \
	fi

faults: $(READY)  ## put faults into the library, one at a time: a test of behaviour must see each
	$(WITH) -m tests.faults

sanitize: .venv/ready  ## small launches of every kernel under NVIDIA's compute-sanitizer
	for tool in memcheck racecheck synccheck; do \
		compute-sanitizer --tool $$tool --error-exitcode 1 \
			$(BIN)/python -m tests.kernels.sanitizer || exit 1; \
	done

# A version that passes belongs into `kIsVerifiedCompiler` in moefp8/kernels/gemm/sm90/pipeline.cuh.
verify-compilers: .venv/ready  ## read the machine code of GEMMs and router as each NVRTC makes it
	for nvrtc in $(NVRTCS); do \
		$(BIN)/pip install --quiet --no-deps --target ".nvrtc/$$nvrtc" "$$nvrtc" || exit 1; \
		MOEFP8_TEST_ALL_KERNELS=1 MOEFP8_NVRTC="$$(find ".nvrtc/$$nvrtc" -name 'libnvrtc.so.*' | head -1)" \
			$(BIN)/python -m pytest -k 'stage or fence or spills' \
			tests/kernels/gemm/sm90/test_compile.py tests/routing/test_route.py || exit 1; \
	done

check: .venv/ready  ## formatting, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/ready  ## rewrite in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: .venv/ready  ## the reference of all public names, from their docstrings, into site/
	$(BIN)/python -m pdoc --docformat google --output-directory site $(API)
	@echo 'It begins at site/index.html.'

dist: .venv/ready  ## wheel and sdist into dist/, each tried outside this checkout
	rm -rf dist
	$(BIN)/python -m build --no-isolation --sdist --wheel  # both from this checkout
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python -m tests.dist dist

publish: dist  ## upload what `make dist` made, with twine's own settings
	$(BIN)/python -m twine upload dist/*

bench-load: .venv/ready  ## checkpoint loading speed and memory
	$(BIN)/python -m benchmarks.load

clean:  ## remove what make made
	rm -rf .venv .venv-hf-oldest .venv-torch-oldest .nvrtc build dist site
