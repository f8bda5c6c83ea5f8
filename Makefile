# The lines that people and CI run. `make run` and `make test` do all the set-up.

CARGO ?= cargo

.PHONY: run test test-trainer demo simulate lint fuzz fuzz-api bench bench-growth bench-instructions bench-overload bench-trainer torture libtorch openapi help

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: ## Serve on 127.0.0.1:8080 from SQLite in data/; needs Rust and a C compiler
	$(CARGO) run --release -p forebay -- serve

test: lint ## Everything: both databases, the trainer on the CPU; fetches Postgres, PgBouncer and libtorch where there is none
	./scripts/postgres-bin > /dev/null
	./scripts/pgbouncer-bin > /dev/null
	./scripts/python-env snippets > /dev/null
	./scripts/python-env openapi > /dev/null
	$(CARGO) test -p forebay-client
	$(CARGO) test -p forebay
	$(MAKE) test-trainer

test-trainer: libtorch ## The trainer's lints and tests alone
	$(CARGO) clippy -p forebay-trainer --all-targets -- -D warnings
	$(CARGO) test -p forebay-trainer

demo: libtorch ## A model learns arithmetic from nothing: service, two workers, trainer; TASK=lookup, SEED=2
	$(CARGO) build --release -p forebay-trainer
	$(CARGO) build --release -p forebay
	./scripts/demo --task $(or $(TASK),arithmetic) --seed $(or $(SEED),1)

simulate: ## The same work synchronously and asynchronously, as a picture: docs/async.svg; five minutes
	$(CARGO) build --release -p forebay
	./scripts/simulate --seeds 5 --svg docs/async.svg

lint: ## Formatting and lints
	$(CARGO) fmt --all --check
	$(CARGO) clippy -p forebay-client --all-targets -- -D warnings
	$(CARGO) clippy -p forebay --all-targets -- -D warnings

fuzz: ## Every parser under libFuzzer, SECONDS=60 each; needs a nightly compiler and cargo-fuzz
	./scripts/fuzz $(or $(SECONDS),60)

fuzz-api: ## The API against its OpenAPI document with schemathesis, SECONDS=180; needs Python 3 with pip
	./scripts/fuzz-api --seconds $(or $(SECONDS),180) --seed $(or $(SEED),1)

bench: ## Durable ingest beside the drain-only ceiling, in rounds; BENCH=--postgres, SLIME_URL and ATROPOS_URL add others
	$(CARGO) build --release -p forebay
	./scripts/bench $(BENCH)

bench-growth: ## The same operations on an empty ledger and on one of ten million rollouts; needs 6 GB of disk
	$(CARGO) build --release -p forebay
	./scripts/growth $(BENCH)

bench-instructions: ## Instructions per token of parsing and packing, which no busy machine changes; needs valgrind
	CARGO=$(CARGO) ./scripts/instructions

bench-overload: ## Ten times the connections that reach the peak: goodput, leases and recovery
	$(CARGO) bench -p forebay --bench overload

torture: ## The long versions of the reliability tests, and a table of their counts; hours
	./scripts/torture --seed $(or $(SEED),7)

bench-trainer: libtorch ## The trainer's step beside eager PyTorch, in turn on the same cores
	$(CARGO) build --release -p forebay-trainer
	./scripts/bench-trainer

libtorch:
	./scripts/libtorch > /dev/null

openapi: ## Write openapi/forebay.json from the routes
	$(CARGO) run -q -p forebay -- openapi > openapi/forebay.json
