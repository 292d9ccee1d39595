//! Connections that wait for a person's decision.

use std::{collections::HashMap, time::Duration};

use parking_lot::Mutex;
use tokio::{sync::watch, time::timeout};

use crate::{control::Decision, refusal::Reason, target::Target};

/// Lasting decisions of one sandbox. Further ones are not remembered: such a host is asked for
/// again.
const MAX_DECISIONS: usize = 4096;

/// The questions and decisions of one sandbox.
#[derive(Debug, Default)]
pub(crate) struct Asks(Mutex<HashMap<(String, u16), State>>);

#[derive(Debug)]
enum State {
    Allowed,
    Denied,
    /// The channel gets the decision.
    Waiting(watch::Sender<Option<Decision>>),
}

impl Asks {
    /// Waits until the target is decided. Calls `report` if nobody was asked yet.
    pub(crate) async fn wait(
        &self,
        target: &Target,
        max: Duration,
        report: impl FnOnce(),
    ) -> Result<(), Reason> {
        let Some(mut decision) = self.begin(target, report)? else { return Ok(()) };
        let decided = timeout(max, decision.wait_for(Option::is_some)).await;
        match decided.map(|decided| decided.ok().and_then(|decision| *decision)) {
            Ok(Some(Decision::Once | Decision::Always)) => Ok(()),
            Ok(Some(Decision::Deny) | None) => Err(Reason::Denied),
            Err(_) => Err(Reason::AskTimeout),
        }
    }

    fn begin(
        &self,
        target: &Target,
        report: impl FnOnce(),
    ) -> Result<Option<watch::Receiver<Option<Decision>>>, Reason> {
        let key = (target.host.clone(), target.port);
        let mut states = self.0.lock();
        match states.get(&key) {
            Some(State::Allowed) => Ok(None),
            Some(State::Denied) => Err(Reason::Denied),
            Some(State::Waiting(sender)) => Ok(Some(sender.subscribe())),
            // The worker does not answer; do not let a program fill the memory.
            None if states.len() >= 2 * MAX_DECISIONS => Err(Reason::Denied),
            None => {
                let (sender, receiver) = watch::channel(None);
                states.insert(key, State::Waiting(sender));
                report();
                Ok(Some(receiver))
            }
        }
    }

    /// Applies a decision to the connections that wait and, unless it is for once, to later ones.
    pub(crate) fn decide(&self, host: &str, port: u16, decision: Decision) {
        let key = (host.to_owned(), port);
        let mut states = self.0.lock();
        if let Some(State::Waiting(sender)) = states.remove(&key) {
            // An error means that no connection waits any more.
            let _ = sender.send(Some(decision));
        }
        let lasting = match decision {
            Decision::Once => return,
            Decision::Always => State::Allowed,
            Decision::Deny => State::Denied,
        };
        if states.len() < MAX_DECISIONS {
            states.insert(key, lasting);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    const MAX: Duration = Duration::from_secs(60);

    async fn decided_by(decision: Decision) -> (Result<(), Reason>, Result<(), Reason>, u32) {
        let (asks, asked) = (Asks::default(), AtomicU32::new(0));
        let target = Target::from_authority("a.example.com:443", None).unwrap();
        let report = || {
            asked.fetch_add(1, Ordering::Relaxed);
        };
        let (first, second, ()) =
            tokio::join!(asks.wait(&target, MAX, report), asks.wait(&target, MAX, report), async {
                tokio::task::yield_now().await;
                assert_eq!(asked.load(Ordering::Relaxed), 1, "one report for two connections");
                asks.decide("a.example.com", 443, decision);
            });
        assert_eq!(first, second);
        (first, asks.wait(&target, MAX, report).await, asked.into_inner())
    }

    #[tokio::test(start_paused = true)]
    async fn decisions_apply_once_or_to_later_connections() {
        assert_eq!(decided_by(Decision::Always).await, (Ok(()), Ok(()), 1));
        assert_eq!(decided_by(Decision::Deny).await, (Err(Reason::Denied), Err(Reason::Denied), 1));
        assert_eq!(
            decided_by(Decision::Once).await,
            (Ok(()), Err(Reason::AskTimeout), 2),
            "asked again"
        );
    }
}
