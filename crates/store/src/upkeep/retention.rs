//! How long rows are kept: by the installation, and by tenants that differ from it.

use std::time::Duration;

use codelia_types::{duration, option::InvalidOption};
use serde_json::{Value, json};

/// Rows of whole days are dropped at once from here on; below it they are deleted one by one.
pub(super) const DAY: Duration = Duration::from_secs(24 * 3600);

const MINIMUM: Duration = Duration::from_secs(60);
const MAXIMUM: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

codelia_types::options! {
    /// How long rows are kept: the section `retention` of the configuration.
    #[derive(Copy, PartialEq, Eq)]
    pub struct Retention {
        /// Records of runs and ended sessions, after their end.
        #[serde(with = "duration")]
        pub runs: Duration = DAY,
        /// Output of runs, after their end; at most as long as the records.
        #[serde(with = "duration")]
        pub output: Duration = DAY,
        /// The audit, approvals and their decisions.
        #[serde(with = "duration")]
        pub audit: Duration = 90 * DAY,
    }
}

impl Retention {
    /// Checks that every time is within bounds and the times fit each other.
    ///
    /// # Errors
    /// With the first key that does not.
    pub fn check(&self) -> Result<(), InvalidOption> {
        let times = [
            ("retention.runs", self.runs),
            ("retention.output", self.output),
            ("retention.audit", self.audit),
        ];
        if let Some((key, _)) =
            times.into_iter().find(|(_, time)| !(MINIMUM..=MAXIMUM).contains(time))
        {
            let least = duration::text(MINIMUM);
            let most = duration::text(MAXIMUM);
            return Err(InvalidOption::new(key, format!("must be from {least} to {most}")));
        }
        let runs = format!("{}, as long as retention.runs", duration::text(self.runs));
        if self.output > self.runs {
            return Err(InvalidOption::new("retention.output", format!("must be at most {runs}")));
        }
        if self.audit < self.runs {
            return Err(InvalidOption::new("retention.audit", format!("must be at least {runs}")));
        }
        Ok(())
    }
}

/// How long the rows of a tenant are kept. `None` is as long as those of the installation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TenantRetention {
    /// See [`Retention::runs`].
    pub runs: Option<Duration>,
    /// See [`Retention::output`].
    pub output: Option<Duration>,
    /// See [`Retention::audit`].
    pub audit: Option<Duration>,
}

impl TenantRetention {
    /// The retention with the installation's where the tenant has none.
    #[must_use]
    pub fn within(&self, installation: &Retention) -> Retention {
        Retention {
            runs: self.runs.unwrap_or(installation.runs),
            output: self.output.unwrap_or(installation.output),
            audit: self.audit.unwrap_or(installation.audit),
        }
    }

    pub(crate) fn detail(&self) -> Value {
        let seconds = |time: Option<Duration>| time.map(|time| time.as_secs());
        json!({
            "runs_seconds": seconds(self.runs),
            "output_seconds": seconds(self.output),
            "audit_seconds": seconds(self.audit),
        })
    }
}
