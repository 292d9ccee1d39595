//! Reason words: the stable, upper-case words that say why a call or a run was refused.
//!
//! The words are part of the public API and never change. `docs/reasons.md` is generated from this
//! file: after a change, run `CODELIA_BLESS=1 cargo test -p codelia-types`.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! reasons {
    ($($name:ident = $word:literal, $description:literal;)+) => {
        /// Why a call or a run was refused.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[serde(into = "&'static str", from = "String")]
        pub enum Reason {
            $(
                #[doc = $description]
                $name,
            )+
            /// A word that this version does not know, stored or sent by another version.
            Unknown,
        }

        impl Reason {
            /// Every reason except [`Reason::Unknown`], grouped by subject.
            pub const ALL: &[Self] = &[$(Self::$name),+];

            /// The word, as clients see it.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$name => $word,)+
                    Self::Unknown => "UNKNOWN",
                }
            }

            /// What the reason means and, where the caller can act, what to do.
            #[must_use]
            pub const fn description(self) -> &'static str {
                match self {
                    $(Self::$name => $description,)+
                    Self::Unknown => "a reason of another version of Codelia; see the message",
                }
            }
        }
    };
}

reasons! {
    // Any call.
    InvalidField = "INVALID_FIELD",
        "a field of the request is missing, malformed or not allowed; `field` names it";
    NotFound = "NOT_FOUND",
        "the resource does not exist or belongs to another tenant";
    KeyInvalid = "KEY_INVALID",
        "the API key is missing, unknown or revoked";
    KeyExpired = "KEY_EXPIRED",
        "the API key has expired; create a new one";
    ScopeMissing = "SCOPE_MISSING",
        "the API key lacks the scope that `scope` names";
    QuotaExceeded = "QUOTA_EXCEEDED",
        "a quota of the tenant is exhausted; `quota` names it";
    RateLimited = "RATE_LIMITED",
        "too many requests; retry after the delay in `RetryInfo`";
    TooManyFailedKeys = "TOO_MANY_FAILED_KEYS",
        "too many invalid API keys from this address; retry after the delay in `RetryInfo`";
    TooManyCalls = "TOO_MANY_CALLS",
        "the API key has too many open calls; `limit` names the limit";
    IdempotencyKeyReused = "IDEMPOTENCY_KEY_REUSED",
        "the idempotency key was used for a different request; use a new key";
    DeadlineExceeded = "DEADLINE_EXCEEDED",
        "the deadline of the call passed before it completed";
    ShuttingDown = "SHUTTING_DOWN",
        "the server is shutting down; retry, another server may answer";
    Unavailable = "UNAVAILABLE",
        "a part of the service is temporarily unavailable; retry after the delay in `RetryInfo`";
    Internal = "INTERNAL",
        "the service failed; its log has the cause";
    // Tenants and sessions.
    TenantSuspended = "TENANT_SUSPENDED",
        "an operator suspended the tenant; ask them to resume it";
    WorkerDrainsItself = "WORKER_DRAINS_ITSELF",
        "the worker shuts down or a sandbox left something behind; restart it instead of taking back its drain";
    TenantExists = "TENANT_EXISTS",
        "a tenant with this id exists; choose another id";
    AliasInUse = "ALIAS_IN_USE",
        "an open session has this alias; close it or choose another alias";
    SessionEnded = "SESSION_ENDED",
        "the session was closed or has expired; create a new one";
    SessionDataLost = "SESSION_DATA_LOST",
        "the session's files are lost or their worker is unavailable; create a new session";
    // Whether a run is admitted.
    ModeNotAllowed = "MODE_NOT_ALLOWED",
        "this installation does not allow the sandbox mode";
    IsolationFloor = "ISOLATION_FLOOR",
        "the sandbox mode isolates less than the tenant's floor; only an operator can lower the floor";
    ModeUnavailable = "MODE_UNAVAILABLE",
        "no worker that could take the run supports the sandbox mode";
    CommandNotAllowed = "COMMAND_NOT_ALLOWED",
        "the policy does not allow the command; `rule` names the rule";
    Unenforceable = "UNENFORCEABLE",
        "the worker's host cannot enforce a limit or a policy field; the message names it";
    SecretsUnavailable = "SECRETS_UNAVAILABLE",
        "`secret_env` cannot be encrypted or decrypted: api or worker has no key for secrets, or another one";
    // Whether a run starts.
    ExecutableNotFound = "EXECUTABLE_NOT_FOUND",
        "the program was not found in the sandbox; check `argv[0]` and `PATH`";
    ExecutableNotPermitted = "EXECUTABLE_NOT_PERMITTED",
        "the program may not be executed: it is not executable, or the policy does not allow it";
    WorkingDirectoryInvalid = "WORKING_DIRECTORY_INVALID",
        "the working directory does not exist, cannot be entered or is outside the session";
    ImageMissing = "IMAGE_MISSING",
        "the worker's container engine does not have the image; an operator must pull it";
    LaunchFailed = "LAUNCH_FAILED",
        "the command could not be started; the message names the step and the error";
    SandboxFailed = "SANDBOX_FAILED",
        "the worker could not create the sandbox; its log has the cause";
    // File calls.
    FileNotFound = "FILE_NOT_FOUND",
        "the file or directory does not exist";
    FileExists = "FILE_EXISTS",
        "a file or directory with this path exists";
    IsADirectory = "IS_A_DIRECTORY",
        "the path is a directory, and the call needs a file";
    NotADirectory = "NOT_A_DIRECTORY",
        "the path is not a directory, or one of its components is not";
    DirectoryNotEmpty = "DIRECTORY_NOT_EMPTY",
        "the directory is not empty; remove it recursively";
    SpecialFile = "SPECIAL_FILE",
        "the path is a FIFO, a socket or a device, which file calls never open";
    PathLeadsOut = "PATH_LEADS_OUT",
        "the path or a symbolic link in it leaves the session's workspace";
    PathDenied = "PATH_DENIED",
        "the session's policy denies access to the path; `rule` names the rule";
    FilePermission = "FILE_PERMISSION",
        "the permissions of the file or its directory deny access to the session's user";
    FileTooLarge = "FILE_TOO_LARGE",
        "the file is, or would become, larger than the limit";
    DiskFull = "DISK_FULL",
        "the worker's disk is full";
    FileChanged = "FILE_CHANGED",
        "the file was changed or replaced since its etag was read; read it again";
    TextNotFound = "TEXT_NOT_FOUND",
        "the text to replace is not in the file";
    TextAmbiguous = "TEXT_AMBIGUOUS",
        "the text to replace occurs more than once; give more context or replace all occurrences";
    TooManyFileCalls = "TOO_MANY_FILE_CALLS",
        "too many file calls are open on the worker; retry after the delay in `RetryInfo`";
    FileCallTimeout = "FILE_CALL_TIMEOUT",
        "the file call took longer than the worker allows; split the work into smaller calls";
    StreamStalled = "STREAM_STALLED",
        "the client did not send its request, or the data of a file stream, in time";
}

impl Reason {
    /// The reason with this word, or [`Reason::Unknown`].
    #[must_use]
    pub fn parse(word: &str) -> Self {
        Self::ALL.iter().copied().find(|reason| reason.as_str() == word).unwrap_or(Self::Unknown)
    }
}

impl From<String> for Reason {
    fn from(word: String) -> Self {
        Self::parse(&word)
    }
}

impl From<Reason> for &'static str {
    fn from(reason: Reason) -> Self {
        reason.as_str()
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::HashSet, fmt::Write, fs, path::Path};

    use super::*;
    use crate::{Outcome, Refusal};

    const INTRODUCTION: &str = "\
# Reasons of refusals

A client that handles refusals should decide by the *reason*: a stable, upper-case word. A refused
call carries it as the `reason` of `google.rpc.ErrorInfo` (domain `codelia`), whose metadata also
names the field, quota, scope or rule at fault. A run that was accepted and could not be started
carries it as `outcome.refused.reason`. The text of a message may change at any time; the words in
this table do not. Treat a word that is not in the table like the gRPC status code it came with.

<!-- Generated from crates/types/src/reason.rs: CODELIA_BLESS=1 cargo test -p codelia-types -->

";

    fn catalogue() -> String {
        let mut text = INTRODUCTION.to_owned();
        text.push_str("| reason | meaning |\n|---|---|\n");
        for reason in Reason::ALL {
            writeln!(text, "| `{reason}` | {} |", reason.description()).unwrap();
        }
        text
    }

    #[test]
    fn documented_catalogue_is_current() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reasons.md");
        if std::env::var_os("CODELIA_BLESS").is_some_and(|value| value == "1") {
            fs::write(&path, catalogue()).unwrap();
        }
        let documented = fs::read_to_string(&path).unwrap();
        assert!(
            documented == catalogue(),
            "docs/reasons.md is out of date: run `CODELIA_BLESS=1 cargo test -p codelia-types`"
        );
    }

    #[test]
    fn words_are_distinct_and_upper_case() {
        let words: HashSet<_> = Reason::ALL.iter().map(|reason| reason.as_str()).collect();
        assert_eq!(words.len(), Reason::ALL.len());
        for word in words {
            assert!(word.bytes().all(|b| b.is_ascii_uppercase() || b == b'_'), "{word}");
            assert_ne!(Reason::parse(word), Reason::Unknown);
        }
    }

    #[test]
    fn reason_round_trips_as_its_word() {
        for &reason in Reason::ALL {
            let json = serde_json::to_value(reason).unwrap();
            assert_eq!(json, reason.as_str());
            assert_eq!(serde_json::from_value::<Reason>(json).unwrap(), reason);
        }
    }

    #[test]
    fn unknown_word_does_not_make_outcome_unreadable() {
        let stored = r#"{"kind":"refused","detail":{"reason":"FROM_THE_FUTURE","message":"later"}}"#;
        let refusal = Refusal { reason: Reason::Unknown, message: "later".to_owned() };
        assert_eq!(serde_json::from_str::<Outcome>(stored).unwrap(), Outcome::Refused(refusal));
    }
}
