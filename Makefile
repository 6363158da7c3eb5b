# meander: build, checks and everyday commands. `make help` lists them.
# Go and make are enough; a C compiler only for `race`, Docker only for `up`, Python only for `golden`, `python-test` and `learn`.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help build python-test python-wheel python-docs asyncapi-test ts-test observability-test engines-test ui-test ui-images build-onnx build-cuda cuda-build gpu-programs gpu-bench compose-plugin check fmt fmt-check vet lint test race cover fuzz integration soak chaos chaos-long onnx-test bench bench-compare bench-sampler bench-tokens bench-gemm bench-advantage bench-events bench-swarm bench-policy bench-weights bench-torch bench-roofline \
	lines generate generate-check ptx ptxas golden learn learn-hacked learn-transfer learn-figures learn-sums learn-trl learn-verl learn-accelerate learn-distill learn-test trainers-test rewards-test engines-torch up down logs demo demo-tokens ci clean tools

# One set of flags for every build, check and test: what one has compiled the others need not. Debuggers' tables
# (DWARF), which take a fifth of the compiler's time, are in nothing that make builds.
flags          := -trimpath -gcflags=all=-dwarf=false
export GOFLAGS := $(strip $(filter-out $(flags),$(shell go env GOFLAGS 2>/dev/null)) $(flags))

VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo devel)
STAMP   := -X github.com/meander-rl/meander/services/internal/boot.version=$(VERSION)

# Linters are pinned and built here with the Go that builds the project: one built by
# an older Go refuses newer code.
GOFUMPT       := v0.12.0
GOLANGCI_LINT := v2.15.0
TOOLS         := $(CURDIR)/.tools
gofumpt       := $(TOOLS)/gofumpt-$(GOFUMPT)
golangci_lint := $(TOOLS)/golangci-lint-$(GOLANGCI_LINT)

BENCHSTAT     := v0.0.0-20260908200009-22c9c6c9d4da

COMPOSE_LEAST := 2.20
# PROFILE=secure, cluster or both: files over docker-compose.yml; other names are profiles that it has.
comma    := ,
FORMS    := secure cluster
profiles := $(subst $(comma), ,$(PROFILE))
forms    := $(strip $(foreach f,$(FORMS),$(filter $f,$(profiles))))
# Every profile of docker-compose.yml: what any of them started is stopped.
PROFILES := all-in-one gpu metrics observability torch
# Compose takes a name that it does not know, and starts what has none.
ifneq ($(filter up down logs compose-check,$(MAKECMDGOALS)),)
unknown  := $(filter-out $(FORMS) $(PROFILES),$(profiles))
$(if $(unknown),$(error PROFILE=$(PROFILE): there is no $(unknown); \
	must be of $(FORMS) $(PROFILES), with commas between several))
misplaced := $(filter $(FORMS),$(subst $(comma), ,$(COMPOSE_PROFILES)))
$(if $(misplaced),$(error COMPOSE_PROFILES=$(COMPOSE_PROFILES): $(misplaced) must be in PROFILE))
endif
# The token between sampler and worker of the profile torch.
torch    := $(filter torch,$(profiles) $(subst $(comma), ,$(COMPOSE_PROFILES)))
torch_token := $(or $(MEANDER_TORCH_TOKEN_FILE),build/torch/token)
# Once a file is named Compose does not look for the override by itself.
COMPOSE  := docker compose --env-file build/compose.env \
	$(if $(forms),--file docker-compose.yml $(patsubst %,--file deploy/compose.%.yml,$(forms) $(if $(word 2,$(forms)),secure-cluster)) $(addprefix --file ,$(wildcard docker-compose.override.yml))) \
	$(addprefix --profile ,$(filter-out $(FORMS),$(profiles)))
AUTH     := $(or $(MEANDER_AUTH),./build/auth)
# What a client of the containers needs to know, whichever form they have.
address  := $(if $(filter secure,$(forms)),tls://,nats://meander:$$MEANDER_NATS_TOKEN@)127.0.0.1:
servers  := $(address)$(or $(MEANDER_PORT),4222)$(if $(filter cluster,$(forms)),$(comma)$(address)$(or $(MEANDER_PORT_2),4224)$(comma)$(address)$(or $(MEANDER_PORT_3),4225))
access   := $(if $(filter secure,$(forms)),\
	export MEANDER_NATS_CREDS=$(abspath $(AUTH))/trainer.creds MEANDER_NATS_TLS_CA=$(abspath $(AUTH))/tls/ca.pem,\
	unset MEANDER_NATS_CREDS MEANDER_NATS_TLS_CA)
# The token of the stack: that of the caller, or of this checkout.
token    := [ "$$MEANDER_NATS_TOKEN" ] || . ./build/compose.env; export MEANDER_NATS_TOKEN

# What a caller may set: make race PACKAGES=./pkg/bus
# The longest first: the others are compiled and tested beside them.
PACKAGES ?= ./services/command ./integration ./...
# Go ends the tests of a package after this long; its own 10 minutes are few on a busy machine.
TEST_LIMIT ?= -timeout 30m
# Packages, and tests of each, side by side: most wait for processes and servers, and leave the cores to others.
TEST_WIDTH ?= -p 4 -parallel 6
# Where tests have their temporary files: in memory, where this machine has room there; TEST_TMP= leaves them on the disk.
TEST_TMP ?= $(shell .ci/scratch)
test_tmp  = $(if $(TEST_TMP),GOTMPDIR=$${GOTMPDIR-$${TMPDIR:-/tmp}} TMPDIR=$(TEST_TMP))
FUZZTIME ?= 30s
SOAK ?= 1
SOAK_TESTS ?= .
# SEED=0 draws other faults each time.
SEED   ?= 0
FAULTS ?= 100
BENCH    ?= .
REF      ?= HEAD~1
CLANG    ?= clang-19
PYTHON   ?= $(firstword $(wildcard build/golden-venv/bin/python) python3)

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## build all binaries into bin/: static, no cgo
	@[ -x bin/meander ] || echo "compiling the programs: the first time this takes some minutes"
	CGO_ENABLED=0 go build -ldflags "-s -w $(STAMP)" -o bin/ ./services/cmd/...

build-onnx: ## the same with ONNX reward functions (needs a C compiler)
	CGO_ENABLED=1 go build -tags onnx -ldflags "-s -w $(STAMP)" -o bin/ ./services/cmd/...

build-cuda: ## the same for NVIDIA GPUs; they start without NVIDIA software too (needs a C compiler, no CUDA toolkit)
	CGO_ENABLED=1 .ci/cuda go build -tags cuda -ldflags "-s -w $(STAMP)" -o bin/ ./services/cmd/...

cuda-build: ## build, vet and tests of what is for GPUs, on a GPU or without (needs a C compiler)
	.ci/cuda go build -tags cuda -ldflags "-s -w $(STAMP)" -o build/cuda/bin/ ./services/cmd/...
	.ci/cuda go vet -tags cuda ./...
	.ci/cuda go test -tags cuda $(TEST_LIMIT) -run GPU ./pkg/tensor/cuda/... ./pkg/tensor/devices/ ./integration/

gpu-programs: ## what deploy/bench/gpu.sh needs, into build/cuda/bin/; made without a GPU (needs a C compiler)
	.ci/cuda go build -tags cuda -ldflags "-s -w $(STAMP)" -o build/cuda/bin/ ./services/cmd/... ./integration/tools/bench
	.ci/cuda go test -c -tags cuda -o build/cuda/bin/cuda.test ./pkg/tensor/cuda

gpu-bench: gpu-programs ## everything a GPU has to show, to build/gpu.md: right, fast, beside PyTorch; says what it lacks
	PYTHON='$(PYTHON)' deploy/bench/gpu.sh

check: fmt-check vet lint test ## what to run before a commit

fmt: $(gofumpt) ## format all Go files
	$(gofumpt) -w .

fmt-check: $(gofumpt) ## fail and list the files when some are not formatted
	test -z "$$($(gofumpt) -l . | tee -a /dev/stderr)"

vet: ## go vet
	go vet ./...

lint: $(golangci_lint) ## golangci-lint, which has staticcheck with all of its checks
	$(golangci_lint) run ./...

# `make vet` has more checks than go test would run.
# GOGC: compilers and tests use more memory, and a fifth less time.
test: ## tests of every package; no network or special hardware
	$(test_tmp) CGO_ENABLED=0 GOGC=400 go test -short -vet=off $(TEST_LIMIT) $(TEST_WIDTH) $(PACKAGES)

race: ## all tests under the race detector (needs a C compiler)
	$(test_tmp) CGO_ENABLED=1 go test -race $(TEST_LIMIT) $(TEST_WIDTH) $(PACKAGES)

cover: ## test coverage over all packages: total, and build/cover.html
	.ci/cover

fuzz: ## every fuzz target for FUZZTIME each (default 30s)
	.ci/fuzz $(FUZZTIME)

# The packages whose tests have a long form, and no others (TestCode_LongTestsRun).
integration: ## tests that take longer: whole pipelines, kills and faults, the commands of documents, every GPU kernel
	$(test_tmp) CGO_ENABLED=0 GOGC=400 go test -vet=off $(TEST_LIMIT) $(TEST_WIDTH) ./integration/... ./pkg/tensor/cuda/...

soak: ## terminal, memory and CUDA kernel tests in their long form, for an hour or so
	MEANDER_SOAK=$(SOAK) go test -v -count=1 -timeout 4h -run '$(SOAK_TESTS)' ./integration/... ./pkg/tensor/cuda/...

# CHAOS is what a longer form adds.
chaos: ## FAULTS=100 of processes, network, disk and server under load, then an audit of the streams; SEED=7 draws others
	go test -v -count=1 -timeout 4h -run '^TestChaos$$' ./integration/tools/chaos -args -seed $(SEED) -faults $(FAULTS) $(CHAOS)

chaos-long: ## the same with 1000 faults; figures to deploy/bench/chaos.md
	$(MAKE) chaos FAULTS=1000 CHAOS='-figures $(CURDIR)/deploy/bench/chaos.md'

onnx-test: ## tests of ONNX reward functions (needs a C compiler and ONNXRUNTIME_LIB, the path of libonnxruntime.so)
	CGO_ENABLED=1 go test -tags onnx ./pkg/scorer/onnxscore/... ./pkg/scorer/scorerfile/...

bench: ## benchmarks matching BENCH (default all), in benchstat's format
	go test -run '^$$' -bench '$(BENCH)' -benchmem $(PACKAGES)

bench-compare: ## benchmarks matching BENCH at REF and here, side by side
	BENCHSTAT=$(BENCHSTAT) .ci/bench-compare '$(REF)' '$(BENCH)' '$(PACKAGES)'

# Rounds of both engines take turns. The peer says which Python packages it misses.
bench-sampler: build/bench ## the sampler and diffusers side by side, share per operation, matrix products
	build/bench sampler --peer '$(PYTHON) deploy/bench/diffusers_peer.py'

# TOKENS_FLAGS: one row of it, e.g. --batch 8 --rounds 3.
bench-tokens: build/bench ## language models beside transformers' generate and a bare loop: `sums`, and random weights of width 1024
	build/bench tokens --peer '$(PYTHON) deploy/bench/transformers_peer.py' $(TOKENS_FLAGS)

bench-gemm: build/bench ## matrix products at the shipped model's shapes against the multiply-add peak
	build/bench gemm

bench-advantage: build/bench ## rewards through the advantage service beside a bare consumer, its latency and memory
	build/bench advantage

bench-events: build/bench ## steps through the event plane beside a bare publisher, where the time goes, latency, growth
	build/bench events

bench-swarm: build/bench ## 16, 128 and 1024 virtual samplers of the synthetic model on one server
	build/bench swarm

bench-policy: build/bench ## from a push of weights to the first sample that is made with them, under load
	build/bench policy

# WEIGHTS_FLAGS: --gb 10 --ways path --push-only and the like.
bench-weights: build build/bench ## whole transformers by path: time, and memory of who pushes and of the sampler
	build/bench weights $(WEIGHTS_FLAGS)

# TORCH_FLAGS: --device cuda:0 --model FOLDER and the like. Without a Python of yours, that of make engines-torch.
bench-torch: build/bench ## workers of PyTorch: what a call costs, the network beside our own, deterministic beside batched (Python)
	PYTHONPATH=pkg/client/python OMP_NUM_THREADS=1 build/bench torch \
		--python '$(or $(MEANDER_PYTHON),$(wildcard build/torch-venv/bin/python),python3)' $(TORCH_FLAGS)

bench-roofline: build/bench ## what an evaluation costs GPUs by a model of their data sheets; needs none
	build/bench gpu --roofline

# Go knows what has changed.
.PHONY: build/bench
build/bench:
	CGO_ENABLED=0 go build -ldflags "-s -w" -o $@ ./integration/tools/bench

lines: ## lines of the product by folder: hand-written Go that programs and clients link
	@.ci/lines

generate: ## write the generated files
	go generate ./...

# Clang compiles for a GPU without a CUDA toolkit, and without a GPU.
ptx: ## compile the CUDA kernels (needs clang-19)
	cd pkg/tensor/cuda/kernels && $(CLANG) -x cuda --cuda-device-only -nocudainc -nocudalib --cuda-gpu-arch=sm_80 --cuda-feature=+ptx78 \
		-O3 -ffp-contract=off -S kernels.cu -o sm_80.ptx && \
	$(CLANG) -x cuda --cuda-device-only -nocudainc -nocudalib --cuda-gpu-arch=sm_90a --cuda-feature=+ptx80 \
		-O3 -ffp-contract=off -S hopper.cu -o sm_90a.ptx && LC_ALL=C sha256sum *.cu *.cuh *.ptx | LC_ALL=C sort -k 2 > SUMS

# The package is 40 MB, and needs neither a GPU nor CUDA.
build/ptxas/ok:
	$(PYTHON) -m pip install --quiet --no-deps --target build/ptxas nvidia-cuda-nvcc-cu12==12.9.86
	chmod +x build/ptxas/nvidia/cuda_nvcc/bin/ptxas && touch $@

ptxas: ## NVIDIA's assembler on the compiled kernels: registers and spills of testdata/registers.txt (pip, or PTXAS=FILE; says so without)
	@if [ "$$PTXAS" ] || $(MAKE) --no-print-directory build/ptxas/ok || command -v ptxas; then \
		CGO_ENABLED=0 go test -count=1 -v -run '^TestPTX_Assembles$$' ./pkg/tensor/cuda/kernels; \
	else echo 'make ptxas: skipped: pip cannot get the package of ptxas, as it says above, and PTXAS names none'; fi

generate-check: ## fail when the generated files are stale
	.ci/generate-check

python-test: build build/python-venv/ok ## types and tests of the Python client, against meander up and a server with the four services (Python 3.10)
	go build -o build/nats-server github.com/nats-io/nats-server/v2
	cd pkg/client/python && ../../../build/python-venv/bin/mypy
	cd pkg/client/python && MEANDER_BIN=$(CURDIR)/bin/meander NATS_SERVER=$(CURDIR)/build/nats-server ../../../build/python-venv/bin/python -m pytest -q -rs

asyncapi-test: build/asyncapi/ok ## the AsyncAPI document by the official parser, and subscribers that are generated from it (npm, Python)
	MEANDER_NODE_MODULES=$(CURDIR)/build/asyncapi/node_modules MEANDER_PYTHON=$(CURDIR)/build/asyncapi/venv/bin/python \
		CGO_ENABLED=0 go test -v -count=1 -run '^TestAsyncAPI$$' ./integration/

# CHROMIUM: another browser. UI_SHOTS: a folder for an image of each page, size and colours that the tests see.
CHROMIUM  ?= $(firstword $(foreach b,chromium chromium-browser google-chrome,$(shell command -v $b)))
UI_SHOTS  ?=
ui_test    = $(test_tmp) CHROMIUM='$(CHROMIUM)' MEANDER_UI_AXE='$(CURDIR)/build/ui-test/node_modules/axe-core/axe.min.js' \
	MEANDER_UI_SHOTS='$(UI_SHOTS)' go test -v -count=1 $(TEST_LIMIT)
ui-test: ui-needs build/ui-test/ok ## the page of meander ui in a browser: clicks, keys, restarts, broken pipelines, 10 000 groups, accessibility (Chromium, npm)
	$(ui_test) -run '^TestPage' ./services/ui

ui-images: ui-needs build/ui-test/ok ## the images of the page in the guide, made anew (Chromium, npm)
	MEANDER_UI_GUIDE='$(CURDIR)/deploy/guide' $(ui_test) -run '^TestPage_World$$' ./services/ui

.PHONY: ui-needs
ui-needs: ## fail and say what make ui-test needs of this machine that is not there
	@[ '$(CHROMIUM)' ] || { echo "make ui-test needs Chromium: install chromium or google-chrome, or name one with CHROMIUM=/path" >&2; exit 1; }
	@command -v npm >/dev/null || { echo "make ui-test needs npm, for the checker of accessibility: install Node.js" >&2; exit 1; }

build/ui-test/ok: services/ui/testdata/package.json
	mkdir -p build/ui-test && cp services/ui/testdata/package.json build/ui-test
	npm install --prefix build/ui-test --ignore-scripts --no-package-lock --no-audit --no-fund
	touch $@

build/asyncapi/ok: integration/testdata/asyncapi/package.json integration/testdata/asyncapi/requirements.txt
	mkdir -p build/asyncapi && cp integration/testdata/asyncapi/package.json build/asyncapi
	npm install --prefix build/asyncapi --ignore-scripts --no-package-lock --no-audit --no-fund
	python3 -m venv build/asyncapi/venv
	build/asyncapi/venv/bin/python -m pip install --quiet --requirement integration/testdata/asyncapi/requirements.txt
	touch $@

observability-test: build/observability/ok ## the board, the alerts and traces by real Prometheus, OpenTelemetry collector and Jaeger; Go builds those that are not on PATH, for minutes
	PATH="$(CURDIR)/build/observability/bin:$$PATH" CGO_ENABLED=0 go test -v -count=1 $(TEST_LIMIT) -run '^TestObservability' ./integration/

build/observability/ok: .ci/observability
	.ci/observability build/observability
	touch $@

ts-test: ## the TypeScript client: types of every golden event, and a program on a pipeline (needs node 20 and npm; says so without)
	@if command -v node > /dev/null && command -v npm > /dev/null; then $(MAKE) build/typescript/ok && \
		MEANDER_TYPESCRIPT=$(CURDIR)/build/typescript CGO_ENABLED=0 go test -v -count=1 -run '^TestTypeScript' ./integration/; \
	else echo 'make ts-test: skipped, for want of node (20 or newer) and npm in PATH'; fi

build/typescript/ok: pkg/client/typescript/package.json
	mkdir -p build/typescript && cp $< build/typescript
	npm install --prefix build/typescript --ignore-scripts --no-package-lock --no-audit --no-fund
	touch $@

python-wheel: build build/python-venv/ok ## the wheel and source distribution of the Python client into build/dist: built twice alike, checked, tried on each Python from 3.10 to 3.14 that is here
	cd pkg/client/python && ../../../build/python-venv/bin/mypy
	.ci/python-wheel build/python-venv/bin/python build/dist
	cd pkg/client/python && MEANDER_BIN=$(CURDIR)/bin/meander MEANDER_DIST=$(CURDIR)/build/dist ../../../build/python-venv/bin/python -m pytest -q -rs tests/test_package.py tests/test_wheel.py

python-docs: build/python-venv/ok ## the reference of the Python client from its docstrings, to build/python-docs/index.html
	build/python-venv/bin/python pkg/client/python/reference.py build/python-docs

build/python-venv/ok: pkg/client/python/pyproject.toml pkg/client/python/tests/requirements.txt
	python3 -m venv build/python-venv
	build/python-venv/bin/python -m pip install --quiet --editable pkg/client/python --requirement pkg/client/python/tests/requirements.txt
	touch $@

golden: build/golden-venv/ok ## rebuild the goldens of models, schedules, rollouts, losses, chat templates and the text reward (Python, pinned requirements)
	build/golden-venv/bin/python deploy/golden/make_schedules.py pkg/flow/testdata/diffusers.json
	build/golden-venv/bin/python deploy/golden/make_shifts.py pkg/flow/testdata/shifts.json
	build/golden-venv/bin/python deploy/golden/make_grids.py pkg/flow/testdata/grids.json
	build/golden-venv/bin/python deploy/golden/make_torch_random.py pkg/torchrandom/testdata/randn.json
	build/golden-venv/bin/python deploy/golden/make_text.py pkg/scorer/testdata/text.json
	build/golden-venv/bin/python deploy/golden/make_losses.py pkg/client/policyloss/testdata/losses.json
	build/golden-venv/bin/python deploy/golden/make_scheduled.py pkg/scheduled/testdata/rolls.json
	build/golden-venv/bin/python deploy/golden/make_simpletuner.py pkg/scheduled/testdata/simpletuner.json
	build/golden-venv/bin/python deploy/golden/make_tables.py pkg/scheduled/testdata/tables.json
	build/golden-venv/bin/python deploy/golden/make_chat_templates.py pkg/jinja/testdata
	build/golden-venv/bin/python deploy/golden/make_golden.py pkg/model/qwenimage/testdata/golden
	build/golden-venv/bin/python deploy/golden/make_lora.py pkg/lora/testdata/peft.json
	build/golden-venv/bin/python deploy/golden/make_defaults.py pkg/lm/qwen2/testdata/defaults.json \
		pkg/model/qwenimage/testdata/defaults.json pkg/flow/testdata/defaults.json

build/golden-venv/ok: deploy/golden/requirements.txt
	python3 -m venv build/golden-venv
	build/golden-venv/bin/python -m pip install --requirement deploy/golden/requirements.txt
	touch $@

# The recipe's numbers are in deploy/bench/learn; flags of meander-train follow in LEARN, as LEARN="--updates 20 --stop".
# ENGINE=torch: a worker in the same environment computes the sampler's network; its runs are meander-out/learn/torch-SEED.
SEEDS ?= 2
ENGINE ?=
learn: learn-needs build build/learn-venv/ok ## train an adapter of signs on the stream: starts a pipeline, ends with a curve and contact sheets (Python; SEEDS="2 3 4"; ENGINE=torch)
	build/learn-venv/bin/python deploy/learn/learn.py --seeds $(SEEDS) $(if $(ENGINE),--engine $(ENGINE) --name $(ENGINE)) -- $(LEARN)

learn-hacked: learn-needs build build/learn-venv/ok ## the same without what holds diversity, until the reader is gamed: to see the alarms
	build/learn-venv/bin/python deploy/learn/learn.py --name hacked --seeds 2 -- --hold-diversity 0 --no-stop $(LEARN)

learn-transfer: build/learn-venv/ok ## the kept adapters drawn by diffusers and peft, outside meander, and read by tesseract, on the test's prompts (SEEDS="2 3 4")
	build/learn-venv/bin/python deploy/learn/transfer.py $(foreach s,$(SEEDS),meander-out/learn/seed-$(s)/best)

learn-figures: build/learn-venv/ok ## deploy/bench/learn from the runs in meander-out/learn
	build/learn-venv/bin/python deploy/learn/figures.py meander-out/learn/*-*

learn-sums: build build/learn-venv/ok ## train an adapter of the language model sums by GRPO on the stream, a minute a seed: deploy/bench/learn-sums.md (Python; SEEDS="0 1 2"; ENGINE=vllm=URL or sglang=URL)
	build/learn-venv/bin/python deploy/learn/examples.py --seeds $(SEEDS) $(if $(ENGINE),--engine $(ENGINE))

learn-distill: build build/learn-venv/ok ## on-policy distillation: a teacher of sums, trained first unless TEACHER=ADAPTER names one, and students, a minute each: deploy/bench/learn-distill.md (Python; SEEDS="0 1 2")
	build/learn-venv/bin/python deploy/learn/examples.py --example distill_sums.py --out meander-out/learn-distill --seeds $(SEEDS) $(if $(TEACHER),--teacher $(TEACHER))

learn-trl: build build/trl-venv/ok ## the same by TRL's GRPOTrainer, two minutes a seed: deploy/bench/learn-trl.md (Python; SEEDS="0 1 2")
	build/trl-venv/bin/python deploy/learn/examples.py --example trl_sums.py --out meander-out/learn-trl --seeds $(SEEDS)

learn-verl: build build/verl-venv/ok ## the same by verl's trainer, which runs on Ray: deploy/bench/learn-verl.md (Python; SEEDS="0 1 2")
	build/verl-venv/bin/python deploy/learn/examples.py --example verl_sums.py --out meander-out/learn-verl --seeds $(SEEDS)

learn-accelerate: build build/trl-venv/ok ## an adapter of signs by accelerate and FSDP2, in two processes: deploy/bench/learn-accelerate.md (Python; SEEDS="0 1 2")
	build/trl-venv/bin/python deploy/learn/examples.py --example accelerate_signs.py --out meander-out/learn-accelerate --seeds $(SEEDS) -- --updates 40

trainers-test: build build/trl-venv/ok build/verl-venv/ok ## tests of the plugs for what people train with: DataLoader, TRL, accelerate, TensorBoard, W&B, trackio, datasets, WebDataset, verl
	cd pkg/client/python && MEANDER_BIN=$(CURDIR)/bin/meander $(CURDIR)/build/trl-venv/bin/python -m pytest -q -rs tests/test_sync.py tests/test_dataset.py tests/test_trl.py tests/test_accelerate.py tests/test_track.py
	MEANDER_PYTHON=$(CURDIR)/build/trl-venv/bin/python go test -v -count=1 -run '^TestWrite_Python$$' ./pkg/shards/
	cd pkg/client/python && MEANDER_BIN=$(CURDIR)/bin/meander $(CURDIR)/build/verl-venv/bin/python -m pytest -q -rs tests/test_verl.py

# ImageReward and HPSv3 take older transformers than the others; no weights are fetched.
rewards-test: build build/rewards-venv/ok build/rewards-venv/transformers4/ok ## tests of the rewards that people use: tiny random weights of their real classes against the libraries, and a pipeline (Python; 8 GB, or TORCH=cpu)
	cd pkg/client/python && MEANDER_BIN=$(CURDIR)/bin/meander $(CURDIR)/build/rewards-venv/bin/python -m pytest -q -rs tests/test_rewards.py tests/test_judge.py
	cd pkg/client/python && PYTHONPATH=$(CURDIR)/build/rewards-venv/transformers4 $(CURDIR)/build/rewards-venv/bin/python -m pytest -q -rs tests/test_rewards.py -k 'imagereward or hpsv3'

build/rewards-venv/transformers4/ok: deploy/learn/requirements-transformers4.txt build/rewards-venv/ok
	build/rewards-venv/bin/python -m pip install --quiet --no-deps --upgrade --target $(@D) --requirement $<
	touch $@

# verl takes older transformers than TRL.
build/trl-venv/ok build/verl-venv/ok build/rewards-venv/ok: build/%-venv/ok: deploy/learn/requirements-%.txt deploy/learn/install.sh pkg/client/python/pyproject.toml
	TORCH='$(TORCH)' deploy/learn/needs.sh build/$*-venv
	TORCH='$(TORCH)' deploy/learn/install.sh build/$*-venv deploy/learn/requirements-$*.txt

learn-test: build build/learn-venv/ok ## tests of the trainer, which need torch: its parts, and small runs on a pipeline of signs
	cd pkg/client/python && MEANDER_BIN=$(CURDIR)/bin/meander $(CURDIR)/build/learn-venv/bin/python -m pytest -q tests/test_train.py tests/test_losses.py tests/test_velocity.py tests/test_shard.py tests/test_learning.py tests/test_grpo.py tests/test_teacher.py tests/test_texts.py

build/learn-venv/ok: deploy/learn/requirements.txt deploy/learn/install.sh pkg/client/python/pyproject.toml | learn-needs
	TORCH='$(TORCH)' deploy/learn/install.sh build/learn-venv

TORCH_TESTS := pkg/client/python/tests/torch_engine
engines-torch: build/torch-venv/ok ## tests of the torch engine's worker: each family against the pipeline of diffusers itself, and the whole way (Python; 7 GB, or TORCH=cpu)
	cd pkg/client/python && $(CURDIR)/build/torch-venv/bin/python -m pytest -q -rs tests/torch_engine
	MEANDER_PYTHON=$(CURDIR)/build/torch-venv/bin/python go test $(TEST_LIMIT) -run 'TestTorch_Python' ./integration/

engines-test: build/engines/ok ## real vLLM, SGLang and SGLang-Diffusion on the CPU: whole pipelines, pushed weights, kills (Python, gcc; 6 GB, half an hour)
	MEANDER_ENGINES=$(CURDIR)/build/engines go test -v -count=1 -timeout 90m -run '^TestEngines' ./integration/

build/engines/ok: $(wildcard deploy/engines/*) $(wildcard deploy/engines/*/*/*)
	deploy/engines/install.sh build/engines

build/torch-venv/ok: $(TORCH_TESTS)/requirements.txt deploy/learn/install.sh pkg/client/python/pyproject.toml
	TORCH='$(TORCH)' deploy/learn/needs.sh build/torch-venv
	TORCH='$(TORCH)' deploy/learn/install.sh build/torch-venv $(TORCH_TESTS)/requirements.txt

# TORCH=cpu: the CPU build of torch or none; see deploy/learn/install.sh.
.PHONY: learn-needs
learn learn-hacked: GOLD = gold -- $(LEARN)
learn-needs: ## what make learn needs of this machine: fail and say all that is not there
	@TORCH='$(TORCH)' ENGINE='$(ENGINE)' deploy/learn/needs.sh build/learn-venv $(GOLD)

up: compose-plugin build/compose.env compose-check $(if $(filter secure,$(forms)),credentials) $(if $(torch),$(torch_token)) ## NATS and the four services in containers; PROFILE=secure: with roles and TLS, cluster: three servers; APART=1: between one and three; settings: docker-compose.yml
	$(if $(torch),MEANDER_TORCH_TOKEN=$$(cat '$(torch_token)')) VERSION=$(VERSION) $(if $(filter cluster,$(forms)),MEANDER_STREAM_REPLICAS=3) $(COMPOSE) up --build --detach --wait --remove-orphans
	@$(token); umask 077 && \
	echo "unset MEANDER_NATS_TOKEN; $(strip $(access)); export MEANDER_NATS_URL=$(servers)" > build/client.env
	@echo 'To reach it: . build/client.env'

.PHONY: compose-check
compose-check: compose-plugin build/compose.env ## say why the stack cannot be brought to this form
	@$(token); deploy/compose.check '$(forms)' '$(profiles),$(COMPOSE_PROFILES)'

down: compose-plugin build/compose.env ## stop the containers of every profile; the stored events stay
	$(COMPOSE) $(addprefix --profile ,$(PROFILES)) down --remove-orphans

logs: compose-plugin build/compose.env ## follow the containers' logs
	$(COMPOSE) $(addprefix --profile ,$(PROFILES)) logs --follow

.PHONY: compose-test
compose-test: ## the containers of docker-compose.yml for real, on images made without any registry; says so where there is no engine
	MEANDER_COMPOSE=1 go test -v -count=1 $(TEST_LIMIT) -run '^TestCompose$$' ./integration/

# What each container gets of the credentials, for users of the containers to read: nobody else gets past the folder.
.PHONY: credentials
credentials: $(AUTH)/users.json ## the folders of credentials that make up PROFILE=secure mounts, made anew
	set -e; for role in intake sampler reward advantage admin viewer; do \
		install -d -m 755 $(AUTH)/containers $(AUTH)/containers/$$role; \
		install -m 444 $(AUTH)/$$role.creds $(AUTH)/containers/$$role/key.creds; \
		install -m 444 $(AUTH)/tls/ca.pem $(AUTH)/containers/$$role; done
	install -d -m 755 $(AUTH)/containers/nats
	install -m 444 $(AUTH)/auth.conf $(AUTH)/tls/server.pem $(AUTH)/tls/server-key.pem $(AUTH)/containers/nats

$(AUTH)/users.json:
	$(MAKE) build
	bin/meander auth init $(AUTH) --tls --tls-host nats,nats-2,nats-3

compose-plugin: ## fail and say what is needed when containers cannot be run here
	@have=$$(docker compose version --short 2>/dev/null | tr -d v); \
	printf '%s\n' $(COMPOSE_LEAST) "$$have" | sort -CV || { \
		echo "containers need Docker with its Compose plugin, $(COMPOSE_LEAST) or newer; here: $${have:-none}. See docs.docker.com/compose/install" >&2; exit 1; }

# The token of this checkout's containers; MEANDER_NATS_TOKEN in the environment wins.
build/compose.env:
	mkdir -p build
	umask 077 && echo "MEANDER_NATS_TOKEN=$$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')" > $@

# For the worker's user to read: only the owner of the folder gets past it.
build/torch/token:
	mkdir -p build && install -d -m 700 build/torch
	umask 333 && od -An -N24 -tx1 /dev/urandom | tr -d ' \n' > $@

demo: build ## build, then 4 prompts x 8 samples: a table of rewards and advantages, and contact sheets
	bin/meander run --group-size 8 --seed 5 --reward glyph --prompts deploy/demo/prompts.txt --out meander-out/demo

demo-tokens: build ## build, then 4 sums x 8 answers of a language model: a table of rewards and advantages
	bin/meander run --model sums --group-size 8 --seed 5 --logits topk:20:F16 --prompts deploy/demo/sums.txt --out meander-out/demo-tokens

ci: ## everything CI runs
	.ci/all

clean: ## remove what the other targets made, except the tools
	rm -rf bin build meander-out/demo meander-out/demo-tokens

tools: $(gofumpt) $(golangci_lint) ## build the pinned linters into .tools/

$(gofumpt):
	.ci/tool mvdan.cc/gofumpt $(GOFUMPT)

$(golangci_lint):
	.ci/tool github.com/golangci/golangci-lint/v2/cmd/golangci-lint $(GOLANGCI_LINT)
