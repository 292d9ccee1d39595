//! Signs that a command or a caller tries to leave a sandbox: how severe each is, and what the
//! operator has done about it.

use std::{fmt, path::PathBuf, str::FromStr};

use codelia_types::option::{self, text};
use secrecy::{ExposeSecret, SecretString};

use crate::syscalls;

/// How severe a sign is, least first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// An unusual call that was blocked.
    Low,
    /// A path that leaves the workspace, or a connection attempt past the proxy.
    High,
    /// A dangerous call, or a program that may not be executed. Ordinary programs try these, too.
    Critical,
    /// Critical, and nothing that an ordinary program does.
    Hostile,
}

impl Severity {
    /// The severity of a system call that was blocked.
    #[must_use]
    pub fn of_call(name: &str) -> Self {
        match name {
            name if syscalls::is_hostile(name) => Self::Hostile,
            "execve" | "execveat" => Self::Critical,
            name if syscalls::is_dangerous(name) => Self::Critical,
            _ => Self::Low,
        }
    }

    /// The word in events and metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Low => "low",
            Self::High => "high",
            Self::Critical | Self::Hostile => "critical",
        }
    }
}

/// Actions that answer a sign.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EscapeResponse {
    /// End the run at once.
    pub terminate: bool,
    /// Quarantine the tool that the run names.
    pub quarantine_tool: bool,
    /// Quarantine the session.
    pub quarantine_session: bool,
    /// Record an event, and tell the webhook if there is one.
    pub alert: bool,
}

impl EscapeResponse {
    /// Whether anything is done.
    #[must_use]
    pub fn is_none(self) -> bool {
        self == Self::default()
    }

    /// The actions of either of two.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self {
            terminate: self.terminate || other.terminate,
            quarantine_tool: self.quarantine_tool || other.quarantine_tool,
            quarantine_session: self.quarantine_session || other.quarantine_session,
            alert: self.alert || other.alert,
        }
    }
}

impl fmt::Display for EscapeResponse {
    /// Writes the words with commas between them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = [
            (self.terminate, "terminate"),
            (self.quarantine_tool, "quarantine_tool"),
            (self.quarantine_session, "quarantine_session"),
            (self.alert, "alert"),
        ];
        let words: Vec<&str> =
            words.into_iter().filter_map(|(is_set, word)| is_set.then_some(word)).collect();
        f.write_str(if words.is_empty() { "none".to_owned() } else { words.join(",") }.as_str())
    }
}

/// A word that is not a response.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "unknown response {0:?} (expected none, or some of terminate, quarantine_tool, quarantine_session, alert, with commas)"
)]
pub struct UnknownResponse(String);

impl FromStr for EscapeResponse {
    type Err = UnknownResponse;

    fn from_str(text: &str) -> Result<Self, UnknownResponse> {
        let mut response = Self::default();
        for word in text.split(',').map(str::trim) {
            match word {
                "none" | "" => {}
                "terminate" => response.terminate = true,
                "quarantine_tool" => response.quarantine_tool = true,
                "quarantine_session" => response.quarantine_session = true,
                "alert" => response.alert = true,
                other => return Err(UnknownResponse(other.to_owned())),
            }
        }
        Ok(response)
    }
}

const ALERT: EscapeResponse = EscapeResponse {
    terminate: false,
    quarantine_tool: false,
    quarantine_session: false,
    alert: true,
};

codelia_types::options! {
    /// The responses to attempts to leave a sandbox, by severity: the section `escape` of the
    /// configuration.
    pub struct EscapeOptions {
        /// In addition, to critical signs that no ordinary program gives: `none`, or some of
        /// `terminate`, `quarantine_tool`, `quarantine_session`, `alert` with commas between them.
        #[serde(with = "text")]
        pub hostile: EscapeResponse = EscapeResponse { terminate: true, quarantine_tool: true, ..ALERT },
        /// To critical signs.
        #[serde(with = "text")]
        pub critical: EscapeResponse = ALERT,
        /// To signs of high severity.
        #[serde(with = "text")]
        pub high: EscapeResponse = ALERT,
        /// To signs of low severity.
        #[serde(with = "text")]
        pub low: EscapeResponse = EscapeResponse::default(),
        /// Whether sandboxes have decoys: opening one is a sign of an attempt to leave.
        pub canary_files: bool = false,
        /// Where alerts are sent, `https://…`. Default: no webhook.
        #[serde(serialize_with = "option::masked")]
        pub webhook_url: Option<SecretString> = None,
        /// File with the secret that signs alerts. Default: required with a webhook.
        pub webhook_secret_file: Option<PathBuf> = None,
    }
}

impl EscapeOptions {
    /// The response to a sign.
    #[must_use]
    pub fn response(&self, severity: Severity) -> EscapeResponse {
        match severity {
            Severity::Low => self.low,
            Severity::High => self.high,
            Severity::Critical => self.critical,
            Severity::Hostile => self.critical.or(self.hostile),
        }
    }

    /// Where alerts are sent; `None` if nowhere.
    #[must_use]
    pub fn webhook_url(&self) -> Option<&str> {
        self.webhook_url.as_ref().map(ExposeSecret::expose_secret).filter(|url| !url.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn responses_are_words_with_commas() {
        let all = EscapeResponse {
            terminate: true,
            quarantine_tool: true,
            quarantine_session: true,
            alert: true,
        };
        assert_eq!("terminate, quarantine_tool,quarantine_session,alert".parse(), Ok(all));
        assert_eq!("none".parse(), Ok(EscapeResponse::default()));
        for text in ["none", "alert", "terminate,quarantine_tool,quarantine_session,alert"] {
            assert_eq!(text.parse::<EscapeResponse>().unwrap().to_string(), text);
        }
        assert!("terminate,ignore".parse::<EscapeResponse>().is_err());
    }

    #[test]
    fn only_calls_of_no_ordinary_program_are_hostile() {
        for (call, severity) in [
            ("mount", Severity::Hostile),
            ("init_module", Severity::Hostile),
            ("execveat", Severity::Critical),
            ("unshare", Severity::Critical),
            ("ptrace", Severity::Critical),
            ("sysfs", Severity::Low),
        ] {
            assert_eq!(Severity::of_call(call), severity, "{call}");
        }
        let parse = |text: &str| text.parse::<EscapeResponse>().unwrap();
        let options = EscapeOptions {
            critical: parse("quarantine_session"),
            hostile: parse("terminate"),
            ..EscapeOptions::default()
        };
        assert_eq!(options.response(Severity::Critical), parse("quarantine_session"));
        assert_eq!(options.response(Severity::Hostile), parse("quarantine_session,terminate"));
    }
}
