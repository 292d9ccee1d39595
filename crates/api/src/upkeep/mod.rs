//! Loops that run next to the services: `installation` does the periodic work of the installation,
//! `health` reports whether the server can answer. Each pass reads the store again.

pub(crate) mod alerts;
mod health;
mod installation;

pub(crate) use self::{health::HealthMonitor, installation::keep_up};
