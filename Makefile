GENERATED = crds/jobrequests.yaml charts/jobrequest/files/crd.yaml
PROGRAM = $(or $(CARGO_TARGET_DIR),target)/debug/jobrequest

.DEFAULT_GOAL := help
.PHONY: help demo up down clean test bench verify generate

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

demo: ## Bring everything up and show one job of each kind, from apply to result
	@tests/cluster/demo

up: ## Start what isn't running of the local system; then: . .local/env
	@tests/cluster/local up

down: ## Stop the local system; its data stays
	@tests/cluster/local down

clean: ## Stop the local system and remove its data
	@tests/cluster/local clean

test: ## Run the tests against a real API server and Postgres; ARGS="--test NAME" chooses
	@tests/cluster/test $(ARGS)

bench: ## Measure the queue beside its peers, a table and PASS or MISS per bar; BENCH=quick shortens it
	@tests/cluster/bench

verify: ## Check format, lints, docs, and that what is generated is up to date
	@tests/cluster/dependencies seed
	cargo fmt --check
	cargo clippy --locked --all-targets -- -D warnings
	RUSTDOCFLAGS='-D warnings' cargo doc --locked --no-deps
	cargo build --locked --bin jobrequest
	@for file in $(GENERATED); do $(PROGRAM) crd | diff -u "$$file" - || { echo "$$file is out of date: make generate"; exit 1; }; done
	@tests/cluster/chart
	@tests/cluster/dependencies save

generate: ## Write what is made from the sources: the CRD, the chart's copy of it and its README
	cargo build --locked --bin jobrequest
	@for file in $(GENERATED); do mkdir -p "$$(dirname "$$file")" && $(PROGRAM) crd > "$$file.new" && mv "$$file.new" "$$file" || exit 1; done
	@tests/cluster/chart readme
