# The commands that people and CI run. `make run` and `make test` need no other set-up.

CARGO ?= cargo

.PHONY: run test test-service test-console test-python test-frameworks test-facades test-trainer test-clients endure test-engines test-openhands demo example examples simulate lint lint-alone audit fuzz fuzz-api bench bench-batches bench-client bench-engines bench-export bench-facades bench-growth bench-instructions bench-overload bench-serve bench-sessions bench-trainer console-bytes console-pictures parity-slime torture libtorch generate wheel help

help: ## Print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: ## Serve on 127.0.0.1:8080 with an SQLite database in data/; needs Rust and a C compiler
	$(CARGO) run --release --bin forebay -- serve

test: test-service test-python test-trainer ## Run all lints and tests: the service on both databases, the Python package, the trainer on the CPU; downloads what is missing

test-service: lint test-console ## Run the tests of the service and its client, without libtorch; downloads Postgres, PgBouncer and Chromium if missing
	./scripts/postgres-bin > /dev/null
	./scripts/pgbouncer-bin > /dev/null
	./scripts/chromium-bin > /dev/null
	./scripts/python-env snippets > /dev/null
	./scripts/python-env openapi > /dev/null
	./scripts/python-env moto > /dev/null
	./scripts/template-fixtures --check
	$(CARGO) test

test-console: ## Check the types of the live page and test its modules without a browser; needs Node.js 20, fetches TypeScript, 44 MB
	./scripts/test-console

test-python: ## Run the lints and tests of the Python package against a service that they start
	$(CARGO) build --bin forebay
	python=$$(./scripts/python-env package) && \
	$$python -m ruff format --check && $$python -m ruff check && $$python -m basedpyright --warnings && $$python -m pytest
	python=$$(./scripts/python-env oldest) && cd python/tests && $$python -m pytest test_http.py test_tls.py test_bodies.py test_service.py

test-frameworks: ## Run the tests of the Python package with PyTorch, TRL, slime (a checkout in SLIME_SRC), verl and Tinker, of exports in the oldest and newest readers of Parquet, and of imports with checkouts in NEMO_GYM_SRC and VERIFIERS_SRC, and print a table; fetches them, 6 GB; FRAMEWORKS="trl"
	$(CARGO) build --bin forebay
	./scripts/test-frameworks $(FRAMEWORKS)

test-facades: ## Run the clients of other rollout buffers against the facades: slime's (a checkout in SLIME_SRC), Atropos' (ATROPOS_SRC; fetches PyTorch, 5 GB); FACADES="slime"
	$(CARGO) build --bin forebay
	./scripts/test-facades $(FACADES)

test-trainer: libtorch ## Run only the trainer's lints and tests
	$(CARGO) clippy -p forebay-trainer --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --no-deps --document-private-items -p forebay-trainer
	./scripts/python-env wandb > /dev/null
	./scripts/python-env openai > /dev/null
	$(CARGO) test -p forebay-trainer

console-bytes: ## Print the bytes of the files that browsers load for the live page, as they are and with gzip
	@for part in "own -path console/vendor -prune -o" "vendored -path console/vendor/*"; do \
		set -f -- $$part; name=$$1; shift; \
		files=$$(find console "$$@" -type f \( -name '*.html' -o -name '*.css' -o -name '*.js' \) -print); \
		gzip=$$(for file in $$files; do gzip -9 -c "$$file"; done | wc -c); \
		echo "$$name: $$(echo "$$files" | wc -l) files, $$(cat $$files | wc -c) bytes, $$gzip with gzip"; \
	done

console-pictures: ## Write the pictures of the live page in docs/console/
	FOREBAY_TORTURE=1 FOREBAY_PICTURES=docs/console $(CARGO) test --test it -- console::pictures

wheel: ## Build the wheels of the Python package, with the program and without, and try both in fresh environments
	./scripts/wheel

test-clients: ## Run real agents through sessions and print their segments; fetches them from PyPI and npm, 5 GB; CLIENTS="codex openai_chat"
	$(CARGO) build --bin forebay
	$(CARGO) test --test clients -- $(CLIENTS)

endure: test-engines ## Run test-engines, and agents at an engine that needs 330 s for an answer; fetches them as test-clients does; an hour; CLIENTS="codex"
	$(CARGO) build --bin forebay
	$(CARGO) test --test clients -- --slow $(or $(CLIENTS),claude_code codex opencode qwen_code)

test-engines: ## Run sessions against a real vLLM on the CPU with tiny models and print what was checked; fetches it, 3 GB; needs Python 3.12; ENGINES="-k teacher"
	$(CARGO) build --bin forebay
	./scripts/test-engines -- $(ENGINES)

test-openhands: libtorch ## Train a step on a group of four OpenHands rollouts, as docs/connect.md does; fetches OpenHands and libtorch; needs Python 3.12
	$(CARGO) build --bin forebay
	$(CARGO) build -p forebay-trainer
	$(CARGO) test --test clients -- openhands_group

demo: NAME = demo
demo: example ## Train a small model from random weights with the service, an engine, an agent and the trainer; RUN="--profile lookup --seed 2"

example: libtorch ## Train an agent of examples/ with one command: NAME=generator_verifier, RUN="--seeds 1,2,3"
	$(CARGO) build --release -p forebay-trainer
	$(CARGO) build --release --bin forebay
	python=$$(./scripts/python-env examples) && FOREBAY_BIN=$${CARGO_TARGET_DIR:-target}/release/forebay PYTHONPATH=python \
		$$python -m forebay.run examples/$(or $(NAME),generator_verifier).toml $(RUN)

examples: libtorch ## Train all agents of examples/ one after the other and print a table: NAMES="memagent exam_swarm", SEEDS=1,2,3, RUN="--chaos agent:15"
	$(CARGO) build --release -p forebay-trainer
	$(CARGO) build --release --bin forebay
	python=$$(./scripts/python-env examples) && FOREBAY_BIN=$${CARGO_TARGET_DIR:-target}/release/forebay PYTHONPATH=python \
		$$python scripts/examples $(NAMES) --seeds $(or $(SEEDS),1) $(RUN)

simulate: ## Draw synchronous and asynchronous training of the same work to docs/async.svg; takes five minutes
	$(CARGO) build --release --bin forebay
	./scripts/simulate --seeds 5 --svg docs/async.svg

lint: ## Check formatting, run the lints and build the documentation of the code
	$(CARGO) fmt --all --check
	$(CARGO) clippy --all-targets --test clients -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --no-deps --document-private-items

lint-alone: ## Run the lints of each crate alone, which has only the features that it asks for
	for crate in crates/*; do $(CARGO) clippy --manifest-path $$crate/Cargo.toml --all-targets -- -D warnings || exit 1; done
	$(CARGO) clippy -p forebay --no-default-features --all-targets -- -D warnings

audit: ## Check licences and sources of dependencies, unused dependencies, container files and workflow; builds two tools once
	CARGO=$(CARGO) ./scripts/audit

fuzz: ## Fuzz every parser with libFuzzer, SECONDS=60 each; needs a nightly compiler and cargo-fuzz
	./scripts/fuzz $(or $(SECONDS),60)

fuzz-api: ## Fuzz the API against its OpenAPI document with schemathesis, SECONDS=180; needs Python 3 with pip
	./scripts/fuzz-api --seconds $(or $(SECONDS),180) --seed $(or $(SEED),1)

bench: ## Compare durable ingest with a handler that only reads; BENCH=--postgres, SLIME_URL and ATROPOS_URL add services
	$(CARGO) build --release --bins
	./scripts/bench $(BENCH)

bench-client: ## Measure how fast one Python process posts, with the package and with requests and JSON written by hand
	$(CARGO) build --release --bin forebay
	./scripts/bench-client

bench-export: ## Measure how fast forebay export writes each format, from the service and from its database, and its memory
	$(CARGO) build --release --bin forebay
	./scripts/bench-export

bench-facades: ## Compare the facades with their originals on the same bodies, and their memory; SLIME_SRC names a checkout of slime; BENCH="--minutes 10"
	$(CARGO) build --release --bins
	./scripts/bench-facades $(BENCH)

bench-growth: ## Compare operations on an empty ledger and on one with ten million rollouts, and time the queries of the live page on it; needs 6 GB of disk
	$(CARGO) build --release --bins
	./scripts/growth $(BENCH)

bench-instructions: ## Count instructions per token of parsing and packing, which do not depend on the load; READERS=--readers adds libraries; needs valgrind
	CARGO=$(CARGO) ./scripts/instructions $(READERS)

bench-overload: ## Measure goodput, leases and recovery with ten times the connections that reach the peak
	$(CARGO) bench --bench overload

torture: ## Run the long versions of the reliability tests and print a table of their counts; takes hours
	./scripts/torture --seed $(or $(SEED),7)

bench-sessions: ## Measure what recording adds to the calls of agents, the size of a turn on disk, and a finish
	$(CARGO) bench --bench sessions

bench-engines: ## Compare a call of a real vLLM with the same call through a session in both modes; fetches vLLM as test-engines does; BENCH="--agents 16"
	$(CARGO) build --release --bin forebay
	./scripts/test-engines --latency -- $(BENCH)

bench-batches: ## Measure how long a trainer in Python takes from a leased batch to tensors, as Arrow and as JSON; fetches PyTorch, 5 GB
	$(CARGO) build --release --bin forebay
	./scripts/bench-batches

bench-trainer: libtorch ## Compare the trainer's step with eager PyTorch, in turn on the same cores; fetches PyTorch, 3 GB
	$(CARGO) build --release -p forebay-trainer
	./scripts/bench-trainer

bench-serve: libtorch ## Compare tokens/s of forebay-trainer serve with transformers' generate, in turn on the same cores; fetches PyTorch, 3 GB
	$(CARGO) build --release -p forebay-trainer
	./scripts/bench-serve

parity-slime: libtorch ## Compare the trainer with slime's formulas in PyTorch, 45 configurations; fetches PyTorch, 3 GB
	$(CARGO) build -p forebay-trainer
	$(CARGO) build --bin forebay
	./scripts/parity-slime

libtorch:
	./scripts/libtorch > /dev/null

generate: ## Write what is generated: openapi/forebay.json from the routes, the types of Python from that, and the dashboard
	$(CARGO) run -q --bin forebay -- openapi > openapi/forebay.json
	./scripts/python-wire > python/forebay/_wire.py
	$(CARGO) run -q --example dashboard > configs/grafana-dashboard.json
