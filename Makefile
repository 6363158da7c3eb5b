# meander: build, checks and everyday commands. `make help` lists them, `make help-all` all others too.
# Go and make are enough; a C compiler only for `race`, Docker only for `up`, Python only for `golden`, `python-test` and `learn`.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help help-all build check lint test race fuzz integration bench generate learn up down demo ci clean

# One set of flags for every build, check and test: what one has compiled the others need not. Debuggers' tables
# (DWARF), which take a fifth of the compiler's time, are in nothing that make builds. By the tags, names of hosts and
# users are looked up by Go also where there is cgo, so most of what is for GPUs is compiled as for the other programs.
flags          := -trimpath -gcflags=all=-dwarf=false -tags=netgo,osusergo
export GOFLAGS := $(strip $(flags) $(filter-out $(flags),$(shell go env GOFLAGS 2>/dev/null)))

# 0.1.0 of its tag, else 0.1.0+gCOMMIT. RELEASE is the one place that says which version this is.
RELEASE := $(shell sed -n 's/^const Release = "\(.*\)"$$/\1/p' schemas/release.go)
commit  := $(shell git describe --always --dirty=.dirty --abbrev=12 --exclude='*' 2>/dev/null || echo devel)
tagged  := $(filter v$(RELEASE),$(shell git describe --tags --exact-match --dirty 2>/dev/null))
described := $(RELEASE)$(if $(tagged),,+$(patsubst %,g%,$(filter-out devel,$(commit)))$(filter devel,$(commit)))
VERSION := $(described)
STAMP   := -X github.com/meander-rl/meander/services/internal/boot.version=$(VERSION)

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

# The others, by what they are for.
include deploy/Makefile deploy/release/Makefile deploy/bench/Makefile deploy/engines/Makefile deploy/learn/Makefile integration/Makefile

targets = awk -F ':.*\#\# ' '/^[a-z0-9-]+:.*\#\# / { printf "  %-18s %s\n", $$1, $$2 }'
help: ## list the targets of every day
	@$(targets) $(firstword $(MAKEFILE_LIST))

help-all: ## list all targets: benches, training, engines, checks that need more than Go
	@$(targets) $(MAKEFILE_LIST)

build: ## build all binaries into bin/: static, no cgo
	@[ -x bin/meander ] || echo "compiling the programs: the first time this takes some minutes"
	CGO_ENABLED=0 go build -ldflags "-s -w $(STAMP)" -o bin/ ./services/cmd/...

check: fmt-check vet lint test ## what to run before a commit

lint: $(golangci_lint) ## golangci-lint, which has staticcheck with all of its checks
	GOGC=400 $(golangci_lint) run ./...

# `make vet` has more checks than go test would run.
# GOGC: compilers and tests use more memory, and a fifth less time.
test: ## tests of every package; no network or special hardware
	$(test_tmp) CGO_ENABLED=0 GOGC=400 go test -short -vet=off $(TEST_LIMIT) $(TEST_WIDTH) $(PACKAGES)

race: ## all tests under the race detector (needs a C compiler)
	$(test_tmp) CGO_ENABLED=1 GOGC=400 go test -race $(TEST_LIMIT) $(TEST_WIDTH) $(PACKAGES)

fuzz: ## every fuzz target for FUZZTIME each (default 30s)
	.ci/fuzz $(FUZZTIME)

# The packages whose tests have a long form, and no others (TestCode_LongTestsRun). CI takes all BESIDE them, once.
BESIDE ?=
integration: ## tests that take longer: whole pipelines, kills and faults, the commands of documents, every GPU kernel
	$(test_tmp) CGO_ENABLED=0 GOGC=400 go test -vet=off $(TEST_LIMIT) $(TEST_WIDTH) ./integration/... ./pkg/models/tensor/cuda/... $(BESIDE)

bench: ## benchmarks matching BENCH (default all), in benchstat's format
	go test -run '^$$' -bench '$(BENCH)' -benchmem $(PACKAGES)

generate: ## write the generated files
	go generate ./...

# The recipe's numbers are in deploy/bench/learn; flags of meander-train follow in LEARN, as LEARN="--updates 20 --stop".
# ENGINE=torch: a worker in the same environment computes the sampler's network; its runs are meander-out/learn/torch-SEED.
SEEDS ?= 2
ENGINE ?=
learn: learn-needs build build/learn-venv/ok ## train an adapter of signs on the stream: starts a pipeline, ends with a curve and contact sheets (Python; SEEDS="2 3 4"; ENGINE=torch)
	build/learn-venv/bin/python deploy/learn/learn.py --seeds $(SEEDS) $(if $(ENGINE),--engine $(ENGINE) --name $(ENGINE)) -- $(LEARN)

up: compose-plugin build/compose.env compose-check $(if $(filter secure,$(forms)),credentials) $(if $(torch),$(torch_token)) ## NATS and the four services in containers; PROFILE=secure: with roles and TLS, cluster: three servers; APART=1: between one and three; settings: docker-compose.yml
	$(if $(torch),MEANDER_TORCH_TOKEN=$$(cat '$(torch_token)')) VERSION=$(VERSION) $(if $(filter cluster,$(forms)),MEANDER_STREAM_REPLICAS=3) $(COMPOSE) up --build --detach --wait --remove-orphans
	@$(token); umask 077 && \
	echo "unset MEANDER_NATS_TOKEN; $(strip $(access)); export MEANDER_NATS_URL=$(servers)" > build/client.env
	@echo 'To reach it: . build/client.env'

down: compose-plugin build/compose.env ## stop the containers of every profile; the stored events stay
	$(COMPOSE) $(addprefix --profile ,$(PROFILES)) down --remove-orphans

demo: build ## build, then 4 prompts x 8 samples: a table of rewards and advantages, and contact sheets
	bin/meander run --group-size 8 --seed 5 --reward glyph --prompts deploy/demo/prompts.txt --out meander-out/demo

ci: ## everything CI runs
	.ci/all

clean: ## remove what the other targets made, except the tools
	rm -rf bin build dist meander-out/demo meander-out/demo-tokens
