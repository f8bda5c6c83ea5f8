# The lines that people and CI run. `make run` and `make test` do all the set-up.

CARGO ?= cargo

.PHONY: run test check lint bench openapi help

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: ## Serve on 127.0.0.1:8080 from SQLite in data/; needs Rust and a C compiler
	$(CARGO) run --release -p forebay -- serve

test: lint ## Everything: lints, unit and integration tests on SQLite and Postgres (fetched when there is none)
	./scripts/postgres-bin > /dev/null
	$(CARGO) test -p forebay-client
	$(CARGO) test -p forebay

lint: ## Formatting and lints
	$(CARGO) fmt --all --check
	$(CARGO) clippy -p forebay-client --all-targets -- -D warnings
	$(CARGO) clippy -p forebay --all-targets -- -D warnings

bench: ## Durable ingest beside the drain-only ceiling; the figures of README.md
	$(CARGO) bench -p forebay --bench ingest

openapi: ## Write openapi/forebay.json from the routes
	$(CARGO) run -q -p forebay -- openapi > openapi/forebay.json
