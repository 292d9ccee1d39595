//! Sessions that are closed or expire during the faults.

use std::time::Duration;

use anyhow::{Result, bail};
use codelia_proto::v1::{CreateSessionRequest, SandboxMode};
use sqlx::{PgConnection, Row};
use tokio::{sync::watch, time::sleep};
use tonic_types::StatusExt;
use uuid::Uuid;

use super::{
    Findings,
    load::{Callers, Observed, request},
    plan::ShortSession,
};

/// What a caller of a short session observed.
#[derive(Debug)]
pub(crate) struct ShortObserved {
    pub(crate) session: Uuid,
    pub(crate) is_closed: bool,
    /// Its accepted runs.
    pub(crate) runs: Vec<Observed>,
}

impl Callers {
    /// Creates a session, starts runs in it until it has ended, and closes it if it shall.
    pub(crate) async fn visit(
        &self,
        short: &ShortSession,
        mode: SandboxMode,
        mut round: watch::Receiver<usize>,
    ) -> Result<ShortObserved> {
        round.wait_for(|now| *now > short.round).await?;
        let ttl = if short.is_closed { Duration::from_secs(3600) } else { short.life };
        let session = self
            .create_session(
                short.number,
                CreateSessionRequest {
                    mode: mode.into(),
                    ttl: Some(ttl.try_into()?),
                    idempotency_key: format!("short-{}", short.number),
                    ..CreateSessionRequest::default()
                },
            )
            .await?;
        let pause = short.life / u32::try_from(short.jobs.len())?;
        let mut runs = Vec::new();
        for job in &short.jobs {
            let start = request(*job, &session.name);
            let started = self.retry_until("start a run in a short session", job.api, |client| {
                let start = start.clone();
                async move { client.start(start).await }
            });
            match started.await? {
                Ok(_) => runs.push(Observed { may_be_canceled: true, ..self.observed(*job) }),
                Err(status) => {
                    let details = status.get_error_details();
                    let reason = details.error_info().map(|info| info.reason.as_str());
                    if short.is_closed || reason != Some("SESSION_ENDED") {
                        bail!("a run in a short session: {status:?}");
                    }
                }
            }
            sleep(pause).await;
        }
        if short.is_closed {
            self.close(&session.name).await?;
        }
        Ok(ShortObserved { session: session.session_id.parse()?, is_closed: short.is_closed, runs })
    }
}

/// How a session ended, as recorded.
#[derive(Debug, Clone)]
pub(crate) struct SessionEnd {
    pub(crate) id: Uuid,
    pub(crate) reason: Option<String>,
    /// Whether it ended before it expired.
    pub(crate) is_early: bool,
}

pub(crate) async fn load_ends(connection: &mut PgConnection) -> Result<Vec<SessionEnd>> {
    let query = "SELECT id, end_reason, coalesce(ended_at < expires_at, false) FROM sessions";
    let rows = sqlx::query(query).fetch_all(connection).await?;
    let end = |row: sqlx::postgres::PgRow| {
        Ok(SessionEnd { id: row.try_get(0)?, reason: row.try_get(1)?, is_early: row.try_get(2)? })
    };
    rows.into_iter().map(end).collect()
}

/// Checks that each short session ended as its caller wanted, and no other session ended.
pub(crate) fn check_ends(short: &[ShortObserved], ends: &[SessionEnd], findings: &mut Findings) {
    for end in ends {
        let expected =
            short.iter().find(|short| short.session == end.id).map(|short| short.is_closed);
        let is_right = match (expected, end.reason.as_deref()) {
            (None, None) | (Some(true), Some("closed")) => true,
            (Some(false), Some("expired")) => !end.is_early,
            _ => false,
        };
        if !is_right {
            findings.lost.push(format!("{}: {end:?}, closed: {expected:?}", Findings::WRONG_END));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_that_end_wrongly_are_found() {
        let [open, closed, expired] = [Uuid::from_u128(1), Uuid::from_u128(2), Uuid::from_u128(3)];
        let short = |session, is_closed| ShortObserved { session, is_closed, runs: Vec::new() };
        let short = [short(closed, true), short(expired, false)];
        let end = |id, reason: Option<&str>, is_early| SessionEnd {
            id,
            reason: reason.map(ToOwned::to_owned),
            is_early,
        };
        let found = |ends: &[SessionEnd]| {
            let mut findings = Findings::default();
            check_ends(&short, ends, &mut findings);
            findings.lost.len()
        };
        let right = [
            end(open, None, false),
            end(closed, Some("closed"), true),
            end(expired, Some("expired"), false),
        ];
        assert_eq!(found(&right), 0);
        let wrong = [
            end(open, Some("expired"), false),
            end(closed, None, false),
            end(closed, Some("expired"), false),
            end(expired, Some("expired"), true),
            end(expired, None, false),
            end(expired, Some("data_lost"), true),
        ];
        assert_eq!(found(&wrong), wrong.len());
    }
}
