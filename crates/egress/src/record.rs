//! One connection while it is served, and its record at the end.

use std::{
    net::IpAddr,
    sync::atomic::{AtomicU64, Ordering},
    time::Instant,
};

use crate::{
    control::{Connection, Via},
    refusal::{Reason, Refusal},
    sandbox::{Direction, Sandbox},
    target::Target,
};

/// The longest host in a record.
const MAX_HOST: usize = 255;

/// A connection that is served.
#[derive(Debug)]
pub(crate) struct Record {
    pub(crate) via: Via,
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) address: Option<IpAddr>,
    pub(crate) rule: Option<String>,
    started: Instant,
    sent: AtomicU64,
    received: AtomicU64,
}

impl Record {
    pub(crate) fn new(via: Via) -> Self {
        Self {
            via,
            host: String::new(),
            port: 0,
            address: None,
            rule: None,
            started: Instant::now(),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
        }
    }

    pub(crate) fn with_target(via: Via, target: &Target) -> Self {
        Self { host: target.host.clone(), port: target.port, ..Self::new(via) }
    }

    pub(crate) fn set_target(&mut self, target: &Target) {
        (self.host, self.port) = (target.host.clone(), target.port);
    }

    /// Remembers a host that could not be parsed.
    pub(crate) fn set_raw_host(&mut self, host: &str) {
        self.host = clean(host);
    }

    /// Counts bytes of the connection.
    pub(crate) fn count(&self, direction: Direction, bytes: u64) {
        let count = match direction {
            Direction::Sent => &self.sent,
            Direction::Received => &self.received,
        };
        count.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Sends the record to the worker, unless the program asked for nothing.
    pub(crate) fn finish(self, sandbox: &Sandbox, refusal: Option<Refusal>) {
        if refusal.is_none() && self.host.is_empty() {
            return;
        }
        let (reason, rule, address) = match refusal {
            Some(refusal) => {
                (Some(refusal.reason), refusal.rule.or(self.rule), refusal.address.or(self.address))
            }
            None => (None, self.rule, self.address),
        };
        sandbox.count_connection(reason.is_some());
        sandbox.proxy.reports.record(Connection {
            sandbox: sandbox.id,
            via: self.via,
            host: self.host,
            port: self.port,
            address,
            refused: reason.map(|reason| reason.code().to_owned()),
            rule,
            sent: self.sent.into_inner(),
            received: self.received.into_inner(),
            millis: u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX),
            count: 1,
        });
    }
}

/// Sends the record of an attempt that was refused before it was read.
pub(crate) fn refused(sandbox: &Sandbox, via: Via, target: Option<&Target>, reason: Reason) {
    let record = target.map_or_else(|| Record::new(via), |target| Record::with_target(via, target));
    record.finish(sandbox, Some(reason.into()));
}

/// Text of a program for a record: printable ASCII, not too long.
fn clean(text: &str) -> String {
    let printable = |char: char| if char.is_ascii_graphic() { char } else { '?' };
    text.chars().take(MAX_HOST).map(printable).collect()
}
