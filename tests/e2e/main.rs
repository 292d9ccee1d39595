//! End-to-end tests: from a caller to a command and back, with real processes. One file per topic;
//! each test has its own installation.

#![forbid(unsafe_code)]
#![allow(clippy::expect_used, reason = "all of this is test code")]

mod admin;
mod cancel;
mod chaos;
mod cli;
mod clients;
mod collector;
mod completion;
mod configuration;
mod connections;
mod documents;
mod endpoints;
mod exec;
mod fairness;
mod files;
mod guides;
mod hostile;
mod idempotency;
mod info;
mod instances;
mod interactive;
mod isolation;
mod keys;
mod kills;
mod labels;
mod listing;
mod load;
mod logs;
mod malformed;
mod names;
mod operators;
mod ordinary_user;
mod outages;
mod output;
mod policy;
mod policy_load;
mod processes;
mod protocol;
mod queueing;
mod quotas;
mod run_cli;
mod run_terminal;
mod secrets;
mod service;
mod sessions;
mod tables;
mod tenants;
mod time_limits;
mod tls;
mod undrain;
mod up;
mod update;
mod web;
mod workers;
