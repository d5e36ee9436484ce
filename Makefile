# Everything a fresh machine needs is Python >= 3.11 and make. `make quickstart` and `make test` do their own set-up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.installed
TOOLS := build/tools
TOOLS_SETUP := $(TOOLS)/.installed
QAT := build/qat
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

.PHONY: help setup quickstart test suite beside lint site types contracts test-older-cpus test-long soak audit lock harness takeover qat triton seeing conformance served grpo-vllm served-llamacpp bench rehearsal rehearsal-qat test-gpu bench-gpu gpu-report clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

setup: $(SETUP)  ## create .venv and install surefoot into it

# torch first and pinned: unpinned, it brings gigabytes of CUDA packages.
$(SETUP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

quickstart: $(SETUP)  ## fine-tune the embedded model, offline, and look at what came out
	$(BIN)/surefoot quickstart --overwrite

SUITE := $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow and not gpu and not soak and not rehearsal"

test: $(SETUP) lint contracts  ## lint, import contracts, types, tests
	$(MAKE) -j2 suite beside

suite: $(SETUP)
	$(SUITE)

# The suite's two workers leave a fifth of two cores idle, by waiting. What goes beside them takes that and no more (`nice`), and says its piece at the end.
beside: $(SETUP)
	@mkdir -p build
	@nice -n 19 $(MAKE) types qat rehearsal CASES="rehearsal and not slow" WORKERS=0 > build/beside.txt 2>&1; code=$$?; cat build/beside.txt; exit $$code

test-older-cpus: $(SETUP)  ## the same tests as processors without bf16 run them: AVX-512 alone, then AVX2 alone
	ATEN_CPU_CAPABILITY=avx512 ONEDNN_MAX_CPU_ISA=AVX512_CORE $(SUITE)
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(SUITE)

lint: $(SETUP) site
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

site: $(SETUP)  ## the documents as a web site in build/site; a link that leads nowhere is an error
	$(BIN)/mkdocs build --strict --quiet

types: $(SETUP)
	$(BIN)/pyright

contracts: $(SETUP)
	$(BIN)/lint-imports

test-long: $(SETUP) test-older-cpus  ## everything marked slow: whole matrices of kills, ranks and commands; and the suite as on older processors
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m "slow and not rehearsal"
	$(MAKE) rehearsal rehearsal-qat triton seeing

soak: $(SETUP)  ## random faults and millions of inputs with fresh seeds; SOAK="--scale 0.01" for less
	$(BIN)/pytest -n 2 --dist worksteal -m soak tests/faults tests/exactness $(SOAK)

# Tools that are no part of surefoot's own environment, in one of their own.
$(TOOLS_SETUP):
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check pip-audit uv
	@touch $@

audit: $(TOOLS_SETUP)  ## known vulnerabilities of the pinned packages; installs pip-audit and asks its public database
	$(PYTHON) tools/audit.py --pip-audit $(TOOLS)/bin/pip-audit

lock: $(SETUP) $(TOOLS_SETUP)  ## write locks/ anew from constraints.txt, hashes from the package index (SECURITY.md)
	$(BIN)/python tools/lock.py --uv $(TOOLS)/bin/uv $(FILES)

# transformers imports torchao wherever it is installed, which takes two seconds of each start and says much: so it lies
# in an environment of its own, over .venv.
$(QAT)/.installed: $(SETUP)
	$(PYTHON) -m venv $(QAT)
	$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
		> "$$($(QAT)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/over_venv.pth"
	$(QAT)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt torchao
	@touch $@

qat: $(QAT)/.installed  ## the tests of quantisation-aware training, with torchao (3 MB) in build/qat
	$(QAT)/bin/python -m pytest -m "not slow" tests/models/test_qat.py tests/models/test_block_floats.py tests/runs/test_qat.py \
		tests/planning/test_memory.py::test_activations_where_weights_are_rounded

# 190 MB, and of no use to surefoot itself without a GPU, where torch brings it.
triton: $(SETUP)  ## DoRA's kernels for GPUs in Triton's interpreter, which this installs into build/triton first
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target build/triton triton==3.6.0
	TRITON_INTERPRET=1 PYTHONPATH=build/triton $(BIN)/pytest tests/kernels/test_dora_gpu.py

# torchvision's kernels are for torch with CUDA, and its import asks for them (tests/helpers/torchvision_operators.py).
seeing: $(SETUP)  ## models whose pictures transformers reads with torchvision or timm, which this installs into build/vision first (40 MB)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target build/vision \
		-c constraints.txt torchvision timm
	PYTHONPATH=build/vision $(BIN)/pytest tests/data/test_picture_families.py tests/runs/test_picture_families_run.py \
		tests/runs/test_vision_parts.py tests/runs/test_vision_adapters.py tests/commands/test_generate_pictures.py \
		tests/runs/test_pictures_judged.py tests/runs/test_pictures_grpo.py tests/models/test_wrapped.py tests/interop/test_axolotl_trained.py

harness: $(SETUP)  ## the tests of lm-evaluation-harness, whose 400 MB this installs into .venv first
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,eval]'
	$(BIN)/pytest tests/evaluate/harness/test_harness.py

# Without dependencies: the environment's torch, transformers and peft are what is compared with. dill, with which
# datasets hashes tables, takes modules below a folder of this name for installed ones.
TRL := build/trl/site-packages
takeover: $(SETUP)  ## TRL's trainers, taken over: installs TRL 1.16 and datasets into build/trl first (100 MB)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(TRL) \
		trl==1.16.0 datasets multiprocess dill xxhash aiohttp pandas
	PYTHONPATH=$(TRL) $(BIN)/pytest tests/interop/takeover

conformance: $(SETUP)  ## model families x full, LoRA, DoRA against transformers and PEFT, as one table
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m conformance.table

served: $(SETUP)  ## `verify --served` against a real vLLM on the CPU, which this installs into build/vllm (3 GB)
	$(BIN)/python tools/served.py

grpo-vllm: $(SETUP)  ## stages grpo and distill with a real vLLM on the CPU: adapters, all weights, turns, a judge, a teacher (3 GB, as served)
	$(BIN)/python tools/grpo_vllm.py
	$(BIN)/python tools/grpo_vllm_ahead.py
	$(BIN)/python tools/grpo_vllm_turns.py
	$(BIN)/python tools/distill_vllm.py

served-llamacpp: $(SETUP)  ## the same against a real llama.cpp, which this builds into build/llamacpp
	$(BIN)/python tools/served_llamacpp.py

bench: $(SETUP)  ## throughput against HF Trainer + PEFT, interleaved, same numbers first
	$(BIN)/python benchmarks/throughput.py

CASES := rehearsal or gpu
WORKERS := 2
rehearsal: $(SETUP)  ## what takes a device, on a pretend GPU that computes on the CPU and refuses what a GPU refuses; needs g++
	PYTHONPATH=tests $(BIN)/python -m helpers.pretend_gpu $(BIN)/pytest -n $(WORKERS) --dist loadfile -m "$(CASES)" tests/rehearsal tests/gpu/test_training.py

rehearsal-qat: $(QAT)/.installed  ## those of its cases that need torchao
	PYTHONPATH=tests $(QAT)/bin/python -m helpers.pretend_gpu $(QAT)/bin/python -m pytest -m rehearsal -k qat tests/rehearsal

# On a machine with a GPU: any Python whose torch sees it, with no set-up of its own, as such machines bring theirs.
test-gpu:  ## tests that need a CUDA device; GPU_PYTHON=PYTHON for one beside .venv
	PYTHONPATH=$(CURDIR)/src $(GPU_PYTHON) -m pytest -m gpu tests/gpu tests/rehearsal tests/kernels tests/planning/probes tests/system

bench-gpu:  ## surefoot beside other trainers on one GPU, some 8 minutes a cell; CELLS="8b-lora" for one, BENCH=--list for none
	PYTHONPATH=$(CURDIR)/src $(GPU_PYTHON) benchmarks/gpu_cells.py $(CELLS) $(BENCH)

gpu-report:  ## all that is asked of a GPU as one page, in 30 minutes; goes on where it ended; REPORT="--minutes 90", REPORT=--rehearse without one
	$(GPU_PYTHON) tools/gpu_report $(REPORT)

clean:
	rm -rf $(VENV) build src/*.egg-info .pytest_cache .ruff_cache .hypothesis
