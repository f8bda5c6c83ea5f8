# The commands that people and CI run. `make run` and `make test` need no other set-up.

CARGO ?= cargo
PYTHON_ENV = python=$$(./scripts/python-env
RELEASE = $${CARGO_TARGET_DIR:-target}/release
# Tests of the service wait for the disk, another process or a browser during half of their time.
TWO_TESTS_PER_CORE = RUST_TEST_THREADS=$${RUST_TEST_THREADS:-$$((2 * $$(getconf _NPROCESSORS_ONLN)))}
# Only values on the command line count, because shells have variables with these names, such as NAME in WSL.
$(foreach variable,NAME ONLY TESTS SEED,$(if $(filter environment,$(origin $(variable))),$(eval $(variable) :=)))

.PHONY: help run check test endure demo examples lint generate docs bench outside fuzz audit wheel release
.PHONY: cost test-all test-service test-console test-python test-trainer programs trainer-program libtorch fuzz-parsers fuzz-api

help: ## Print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: ## Serve on 127.0.0.1:8080 with an SQLite database in data/; needs Rust and a C compiler
	$(CARGO) run --release --bin forebay -- serve

check: ## Check an edit in two minutes: formatting, lints, unit tests, and the fast integration tests on SQLite; TESTS="facades::" runs those instead
	$(CARGO) fmt --all --check
	$(CARGO) clippy --all-targets -- -D warnings
	CARGO="$(CARGO)" ./scripts/check $(TESTS)

test: test-$(or $(ONLY),all) ## Run all lints and tests, and download what is missing; ONLY=service, console, python or trainer runs a part

# The trainer alone needs libtorch.
test-all: test-service test-python test-trainer

test-service: lint test-console
	./scripts/postgres-bin > /dev/null
	./scripts/pgbouncer-bin > /dev/null
	./scripts/chromium-bin > /dev/null
	./scripts/python-env snippets > /dev/null
	./scripts/python-env openapi > /dev/null
	./scripts/python-env moto > /dev/null
	./scripts/template-fixtures --check
	$(TWO_TESTS_PER_CORE) $(CARGO) test

test-console:
	./scripts/test-console

test-python:
	$(CARGO) build --bin forebay
	./scripts/python-env trackers > /dev/null
	./scripts/helm-bin > /dev/null
	./scripts/proxy-bin nginx > /dev/null
	./scripts/proxy-bin haproxy > /dev/null
	./scripts/python-env site > /dev/null
	$(PYTHON_ENV) package) && \
	$$python -m ruff format --check && $$python -m ruff check && $$python -m basedpyright --warnings && $$python -m pytest
	$(PYTHON_ENV) oldest) && cd python/tests && $$python -m pytest test_http.py test_tls.py test_bodies.py test_service.py

test-trainer: libtorch
	$(CARGO) clippy -p forebay-trainer --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --no-deps --document-private-items -p forebay-trainer
	./scripts/python-env wandb > /dev/null
	./scripts/python-env openai > /dev/null
	$(CARGO) test -p forebay-trainer

endure: ## Run the long versions of the tests and print a table of their counts: kills, power cuts, histories, the model, growth; hours; SEED=7, TESTS="model::"
	CARGO="$(CARGO)" ./scripts/endure --seed $(or $(SEED),7) $(TESTS)

demo: cost trainer-program ## Train a small model from random weights with the service, an engine, an agent and the trainer; NAME=exam_swarm trains another agent of examples/, RUN="--seed 2" are options
	$(CARGO) build --release --bin forebay
	$(PYTHON_ENV) examples) && FOREBAY_BIN=$(RELEASE)/forebay PYTHONPATH=python \
		$$python -m forebay.run examples/$(or $(NAME),demo).toml $(RUN)

examples: cost trainer-program ## Train all agents of examples/ and print a table; NAMES="memagent exam_swarm", SEEDS=1,2,3, RUN="--chaos agent:15"
	$(CARGO) build --release --bin forebay
	$(PYTHON_ENV) examples) && FOREBAY_BIN=$(RELEASE)/forebay PYTHONPATH=python \
		$$python scripts/examples $(NAMES) --seeds $(or $(SEEDS),1) $(RUN)

# The wheel of the trainer that is installed serves as well as one that is built here.
trainer-program:
	@command -v forebay-trainer > /dev/null || { ./scripts/libtorch > /dev/null && \
		$(CARGO) build --release -p forebay-trainer; }

# What the first build costs is said before it begins.
cost:
	@[ -x $(RELEASE)/forebay-trainer ] || command -v forebay-trainer > /dev/null || printf '%s\n' \
		'The first time, this builds the service and the trainer for release. It needs Rust, a C and a C++ compiler and' \
		'Python 3.10 or newer with venv, fetches 535 MB (libtorch), and took 48 minutes on two cores that were busy as well.' \
		'`forebay demo` shows agents and learners at work without the trainer, libtorch and Python.'

lint: ## Check formatting, run the lints and build the documentation of the code
	$(CARGO) fmt --all --check
	$(CARGO) clippy --all-targets --test clients -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --no-deps --document-private-items

generate: ## Write what is generated: openapi/forebay.json from the routes, the types of Python from that, and the dashboard
	$(CARGO) run -q --bin forebay -- openapi > openapi/forebay.json
	./scripts/python-wire > python/forebay/_wire.py
	$(CARGO) run -q --example dashboard > configs/grafana-dashboard.json

docs: ## Build the site of the documents, with search, in target/docs
	./scripts/site

bench: bench-$(or $(NAME),ingest) ## Measure NAME=ingest, sessions, columns, overload, growth, judges, capacity, export, client, batches, facades, engines, instructions, trainer, serve or simulation; BENCH="--rounds 3" are options of its script

# Durable ingest beside a handler that only reads; SLIME_URL and ATROPOS_URL add services.
bench-ingest: programs
	./scripts/bench $(BENCH)

# What recording adds to the calls of agents, the size of a turn on disk, and a finish.
bench-sessions:
	$(CARGO) bench --bench sessions

# Uploads beside the same bytes appended and synced, and reading them by range.
bench-columns:
	$(CARGO) bench --bench columns

# Goodput, leases and recovery with ten times the connections that reach the peak.
bench-overload:
	$(CARGO) bench --bench overload

# Operations on an empty ledger and on one with ten million rollouts, and the queries of the live page; 6 GB of disk.
bench-growth: programs
	./scripts/growth $(BENCH)

# Judges that lease and score while few and while a million rollouts wait, on SQLite and Postgres.
bench-judges: programs
	./scripts/bench-judges $(BENCH)

# What a rollout costs for 1, 2 and 4 replicas on Postgres: processor time, WAL, database, objects.
bench-capacity: programs
	./scripts/capacity $(BENCH)

bench-export: programs
	./scripts/bench-export $(BENCH)

# One Python process that posts with the package, and with requests and JSON written by hand.
bench-client: programs
	./scripts/bench-client $(BENCH)

# From a leased batch to tensors in Python, as Arrow and as JSON; fetches PyTorch, 5 GB.
bench-batches: programs
	./scripts/bench-batches $(BENCH)

# The facades and their originals on the same bodies; SLIME_SRC names a checkout of slime.
bench-facades: programs
	./scripts/bench-facades $(BENCH)

# A call of a real vLLM, and the same call through a session in both modes; fetches vLLM, 3 GB.
bench-engines: programs
	./scripts/test-engines --latency -- $(BENCH)

# Instructions per token of parsing and packing, which do not depend on the load; BENCH=--readers adds libraries; needs valgrind.
bench-instructions:
	CARGO=$(CARGO) ./scripts/instructions $(BENCH)

# The trainer's step and eager PyTorch, in turn on the same cores; fetches PyTorch, 3 GB.
bench-trainer: libtorch
	$(CARGO) build --release -p forebay-trainer
	./scripts/bench-trainer $(BENCH)

# Tokens/s of forebay-trainer serve and transformers' generate, in turn on the same cores; fetches PyTorch, 3 GB.
bench-serve: libtorch
	$(CARGO) build --release -p forebay-trainer
	./scripts/bench-serve $(BENCH)

# Synchronous and asynchronous training of the same work, drawn to docs/async.svg, and what becomes of slow tasks with each
# way to deal with stale ones; twenty minutes.
bench-simulation: programs
	./scripts/simulate --seeds 5 --svg docs/async.svg $(BENCH)
	./scripts/simulate --compare staleness --seeds 5 --scale 20 $(BENCH)
	./scripts/simulate --compare staleness --seeds 5 --scale 20 --staleness 4 $(BENCH)

programs:
	$(CARGO) build --release --bins

outside: outside-$(or $(NAME),clients) ## Try the service with what others made: NAME=clients (agents), engines (vLLM), frameworks, facades, openhands or parity; fetches 3 to 6 GB each

# Real agents through sessions; CLIENTS="codex openai_chat". With CLIENTS="--slow codex" the engine needs 330 s for an answer.
outside-clients:
	$(CARGO) build --bin forebay
	$(CARGO) test --test clients -- $(CLIENTS)

# Sessions against a real vLLM on the CPU with tiny models; needs Python 3.12; ENGINES="-k teacher".
outside-engines:
	$(CARGO) build --bin forebay
	./scripts/test-engines -- $(ENGINES)

# The Python package with PyTorch, TRL, slime (a checkout in SLIME_SRC), verl and Tinker, exports in the oldest and newest
# readers of Parquet, and imports with checkouts in NEMO_GYM_SRC and VERIFIERS_SRC; FRAMEWORKS="trl".
outside-frameworks:
	$(CARGO) build --bin forebay
	./scripts/test-frameworks $(FRAMEWORKS)

# The clients of other rollout buffers against the facades: slime's (SLIME_SRC), Atropos' (ATROPOS_SRC); FACADES="slime".
outside-facades:
	$(CARGO) build --bin forebay
	./scripts/test-facades $(FACADES)

# A step on a group of four OpenHands rollouts, as docs/connect.md does; needs Python 3.12.
outside-openhands: libtorch
	$(CARGO) build --bin forebay
	$(CARGO) build -p forebay-trainer
	$(CARGO) test --test clients -- openhands_group

# The trainer's numbers and slime's formulas in PyTorch, 45 configurations.
outside-parity: libtorch
	$(CARGO) build -p forebay-trainer
	$(CARGO) build --bin forebay
	./scripts/parity-slime

fuzz: fuzz-$(or $(NAME),parsers) ## Fuzz every parser with libFuzzer (a nightly compiler and cargo-fuzz), SECONDS=60 each; NAME=api fuzzes the API against its OpenAPI document

fuzz-parsers:
	./scripts/fuzz $(or $(SECONDS),60)

fuzz-api:
	CARGO=$(CARGO) ./scripts/fuzz-api --seconds $(or $(SECONDS),180) --seed $(or $(SEED),1)

audit: ## Check licences, sources and use of dependencies, container files and the workflow; builds two tools once
	CARGO=$(CARGO) ./scripts/audit

wheel: ## Build the wheels of the Python package, with the program and without, and try both in fresh environments
	./scripts/wheel

release: ## Build what a release consists of into dist/, for Linux on x86-64 and ARM, and try it; RELEASE_OPTIONS="--processor x86_64"
	./scripts/release $(RELEASE_OPTIONS)

libtorch:
	./scripts/libtorch > /dev/null
