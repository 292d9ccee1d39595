//! How long rows are kept.

use anyhow::Result;
use codelia_store::Retention;

use crate::config::Config;

/// The retention of the installation. Whichever process owns the upkeep applies its own.
pub(super) fn retention(config: &Config) -> Result<Retention> {
    let keep = &config.retention;
    let retention =
        Retention { runs: keep.runs, output: keep.output, events: keep.events, audit: keep.audit };
    retention.check()?;
    Ok(retention)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::options::tests::config;

    #[test]
    fn retention_is_configured() {
        let hours = |hours: u64| Duration::from_secs(hours * 3600);
        assert_eq!(retention(&config(&[])).unwrap(), Retention::default());
        let variables = [
            ("CODELIA_RETENTION_RUNS", "2h"),
            ("CODELIA_RETENTION_OUTPUT", "1h"),
            ("CODELIA_RETENTION_EVENTS", "3h"),
            ("CODELIA_RETENTION_AUDIT", "1d"),
        ];
        let expected = Retention { runs: hours(2), output: hours(1), events: hours(3), audit: hours(24) };
        assert_eq!(retention(&config(&variables)).unwrap(), expected);
    }

    #[test]
    fn impossible_retention_is_refused_by_key() {
        for (variable, value, key) in [
            ("CODELIA_RETENTION_RUNS", "10s", "retention.runs"),
            ("CODELIA_RETENTION_OUTPUT", "2d", "retention.output"),
            ("CODELIA_RETENTION_AUDIT", "1d", "retention.audit"),
        ] {
            let error = retention(&config(&[(variable, value)])).unwrap_err().to_string();
            assert!(error.starts_with(key), "{error}");
        }
        let error =
            crate::config::tests::loaded(None, &[], &[("CODELIA_RETENTION_RUNS", "long")]).unwrap_err();
        assert!(error.to_string().contains("retention.runs"), "{error}");
    }
}
