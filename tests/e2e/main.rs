//! The whole path, from a caller to a command and back, against real processes. One file for each
//! topic; each test has an installation of its own.

#![forbid(unsafe_code)]
#![allow(clippy::expect_used, reason = "all of this is test code")]

mod admin;
mod cancel;
mod chaos;
mod cli;
mod clients;
mod collector;
mod configuration;
mod exec;
mod fairness;
mod files;
mod idempotency;
mod interactive;
mod isolation;
mod kills;
mod listing;
mod load;
mod malformed;
mod outages;
mod output;
mod policy;
mod quotas;
mod service;
mod sessions;
mod tenants;
mod tls;
mod up;
mod workers;
