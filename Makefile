# `make up` starts Codelia on this machine; `make test` and `make check` verify a change.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.PHONY: help up down build dist images test check fuzz bench chaos skew sqlx clean

# A freshly installed rustup is not in the PATH of this shell yet.
export PATH := $(PATH):$(HOME)/.cargo/bin

# dev builds three times faster and shares its build with the tests; release runs faster.
PROFILE ?= dev

# Where scripts/install puts the program.
CODELIA = "$$([ "$$(id -u)" -eq 0 ] && echo /usr/local/bin || echo "$$HOME/.local/bin")/codelia"

help: ## Show this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

up: ## Install dependencies, build, and start everything on this machine in the background
	@scripts/install-deps up
	@scripts/install "$$(scripts/build $(PROFILE) | tail -n 1)"
	@# Stop the old build if it runs.
	@$(CODELIA) down >/dev/null
	@$(CODELIA) up --detach
	@echo "stop with   make down"

down: ## Stop what `make up` started; keep its data
	@$(CODELIA) down

build: ## Build codelia and codelia-init (PROFILE=dev or release)
	@scripts/install-deps up
	@scripts/build $(PROFILE)

dist: ## Pack the release programs, units, manifests and documents into target/dist
	@scripts/install-deps dist
	@scripts/dist

images: ## Build the images of mode container: base, node, python, rust (PROFILES=…)
	@scripts/sandbox-images $(PROFILES)

test: ## Install dependencies, build, and run every test (ARGS go to the test runner)
	@scripts/install-deps test
	@scripts/test $(ARGS)

check: ## Check format, lints, docs, licences, dependency direction, queries and protocol
	@scripts/install-deps check
	@scripts/check

# How long each fuzz target runs.
SECONDS ?= 60

fuzz: ## Fuzz the parsers of what sandboxes and callers send (SECONDS=60 TARGETS="tar socks")
	@scripts/install-deps fuzz
	@scripts/fuzz $(SECONDS) $(TARGETS)

bench: ## Measure against raw fork+exec, raw tools and raw Postgres, in one run
	@scripts/install-deps bench
	@scripts/bench $(ARGS)

chaos: ## Inject random faults; count runs lost or doubled and leaks (SEEDS="7 8" RUNS=500 MODES=native)
	@scripts/install-deps test
	@scripts/chaos

skew: ## Replace a running installation of a release with this one (REV=tag, from the first release on)
	@scripts/install-deps test
	@CODELIA_TEST_PREVIOUS="$$(scripts/previous-build $(REV) | tail -n 1)" scripts/test -E 'test(rolling_restart)'

sqlx: ## Regenerate the checked queries in .sqlx after a change of migrations or SQL
	@scripts/install-deps up
	@scripts/sqlx

clean: ## Remove everything that was built
	@cargo clean
