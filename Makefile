# The way in: `make up` to use Codelia, `make test` and `make check` to change it.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.PHONY: help up down build test check bench chaos sqlx clean

# A rustup that was installed a moment ago is in no shell's PATH yet.
export PATH := $(PATH):$(HOME)/.cargo/bin

# dev is built in a third of the time and shares it with the tests; release runs faster.
PROFILE ?= dev

# Where scripts/install puts it.
CODELIA = "$$([ "$$(id -u)" -eq 0 ] && echo /usr/local/bin || echo "$$HOME/.local/bin")/codelia"

help: ## Show this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

up: ## Install what is needed, build, start everything on this machine in the background
	@scripts/install-deps up
	@scripts/install "$$(scripts/build $(PROFILE) | tail -n 1)"
	@# One that runs already makes way for the new build.
	@$(CODELIA) down >/dev/null
	@$(CODELIA) up --detach
	@echo "stop with   make down"

down: ## Stop what `make up` started; its data stays
	@$(CODELIA) down

build: ## Build codelia and codelia-init (PROFILE=dev or release)
	@scripts/install-deps up
	@scripts/build $(PROFILE)

test: ## Install what is needed, build, run every test (ARGS go to the test runner)
	@scripts/install-deps test
	@scripts/test $(ARGS)

check: ## Formatting, lints, docs, licences and advisories, dependency direction, protocol
	@scripts/install-deps check
	@scripts/check

bench: ## Measure against bare fork+exec and bare Postgres, in one run
	@scripts/install-deps up
	@scripts/bench $(ARGS)

chaos: ## Break it at random, count what is lost, doubled or left (SEEDS="7 8" RUNS=500 MODES=bwrap,container)
	@scripts/install-deps test
	@scripts/chaos

sqlx: ## Renew the checked queries in .sqlx after a change of migrations or SQL
	@scripts/install-deps up
	@scripts/sqlx

clean: ## Remove everything that was built
	@rm -rf target
