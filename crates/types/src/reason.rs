//! Reason words: the stable, upper-case words that say why a call or a run was refused, each with
//! its gRPC code, its cause and its remedy.
//!
//! The words are part of the public API and never change. `docs/errors.md` is generated from this
//! file: after a change, run `CODELIA_BLESS=1 cargo test -p codelia-types`.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A code of gRPC, with its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
#[expect(missing_docs, reason = "the names are those of gRPC")]
pub enum GrpcCode {
    InvalidArgument = 3,
    DeadlineExceeded = 4,
    NotFound = 5,
    AlreadyExists = 6,
    PermissionDenied = 7,
    ResourceExhausted = 8,
    FailedPrecondition = 9,
    Aborted = 10,
    Internal = 13,
    Unavailable = 14,
    DataLoss = 15,
    Unauthenticated = 16,
}

macro_rules! reasons {
    ($($name:ident = $word:literal, $code:ident, $cause:literal, $remedy:literal;)+) => {
        /// Why a call or a run was refused.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[serde(into = "&'static str", from = "String")]
        pub enum Reason {
            $(
                #[doc = $cause]
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

            /// The code of a call that is refused for this reason.
            #[must_use]
            pub const fn code(self) -> GrpcCode {
                match self {
                    $(Self::$name => GrpcCode::$code,)+
                    Self::Unknown => GrpcCode::Internal,
                }
            }

            /// The cause, for people.
            #[must_use]
            pub const fn cause(self) -> &'static str {
                match self {
                    $(Self::$name => $cause,)+
                    Self::Unknown => "a reason of another version of Codelia",
                }
            }

            /// The remedy, for people.
            #[must_use]
            pub const fn remedy(self) -> &'static str {
                match self {
                    $(Self::$name => $remedy,)+
                    Self::Unknown => "read the message",
                }
            }
        }
    };
}

reasons! {
    // Any call.
    InvalidField = "INVALID_FIELD", InvalidArgument,
        "a field of the request is missing, malformed or not allowed; `field` names it",
        "correct the field as the message says";
    NotFound = "NOT_FOUND", NotFound,
        "the resource does not exist or belongs to another tenant; `ResourceInfo` names it",
        "check the name and the tenant of the API key";
    KeyInvalid = "KEY_INVALID", Unauthenticated,
        "the API key is missing, unknown or revoked",
        "send `authorization: Bearer <key>` with a valid key of this installation";
    KeyExpired = "KEY_EXPIRED", Unauthenticated,
        "the API key has expired",
        "create a new key";
    ScopeMissing = "SCOPE_MISSING", PermissionDenied,
        "the API key has none of the scopes that would do; `scopes` names them",
        "use a key with one of these scopes";
    QuotaExceeded = "QUOTA_EXCEEDED", ResourceExhausted,
        "a quota of the tenant is exhausted; `quota` names it",
        "reduce the usage, or ask an operator to raise the quota";
    RateLimited = "RATE_LIMITED", ResourceExhausted,
        "too many requests; `quota` names the limit",
        "retry after the delay in `RetryInfo`";
    TooManyFailedKeys = "TOO_MANY_FAILED_KEYS", ResourceExhausted,
        "too many invalid API keys from this address",
        "check the key and retry after the delay in `RetryInfo`";
    TooManyCalls = "TOO_MANY_CALLS", ResourceExhausted,
        "the API key has too many open calls; `limit` names the limit",
        "finish some calls, or ask an operator to raise the limit";
    IdempotencyKeyReused = "IDEMPOTENCY_KEY_REUSED", AlreadyExists,
        "the idempotency key was used for a different request",
        "use a new key, or repeat the first request unchanged";
    DeadlineExceeded = "DEADLINE_EXCEEDED", DeadlineExceeded,
        "the deadline of the call passed before it completed",
        "retry with a later deadline";
    ShuttingDown = "SHUTTING_DOWN", Unavailable,
        "the server is shutting down",
        "retry; another server may answer";
    Unavailable = "UNAVAILABLE", Unavailable,
        "a part of the service is temporarily unavailable",
        "retry after the delay in `RetryInfo`";
    QueryTimeout = "QUERY_TIMEOUT", Unavailable,
        "the database took too long for the call, usually a list",
        "retry, or ask for less: a smaller page, one session, a filter";
    Internal = "INTERNAL", Internal,
        "the service failed; its log has the cause",
        "report the `x-request-id` of the response to the operator";
    // Tenants and sessions.
    TenantSuspended = "TENANT_SUSPENDED", PermissionDenied,
        "an operator suspended the tenant",
        "ask an operator to resume it";
    WorkerDrainsItself = "WORKER_DRAINS_ITSELF", FailedPrecondition,
        "the worker drains by itself: it shuts down, or a sandbox left something behind",
        "restart the worker";
    TenantNotEmpty = "TENANT_NOT_EMPTY", FailedPrecondition,
        "the tenant has open sessions",
        "close them, or force its deletion";
    TenantDeleted = "TENANT_DELETED", FailedPrecondition,
        "the tenant is being deleted",
        "use another tenant; a deletion cannot be undone";
    TenantExists = "TENANT_EXISTS", AlreadyExists,
        "a tenant with this id exists",
        "choose another id";
    AliasInUse = "ALIAS_IN_USE", AlreadyExists,
        "an open session has this alias",
        "close that session or choose another alias";
    SessionEnded = "SESSION_ENDED", FailedPrecondition,
        "the session has ended; `end_reason` and `end_time` say why and when",
        "create a new session, with a longer `ttl` or `idle_ttl` if it expired";
    SessionDataLost = "SESSION_DATA_LOST", FailedPrecondition,
        "the session's files are lost or their worker is unavailable",
        "create a new session, with `allow_data_loss` if it may continue empty";
    SessionQuarantined = "SESSION_QUARANTINED", FailedPrecondition,
        "the session is quarantined after an attempt to escape: it takes no runs and no changes of its files",
        "look at the reason (`codelia session show`); an administrator releases it (`codelia session release`)";
    OutputExpired = "OUTPUT_EXPIRED", FailedPrecondition,
        "the output of the run was deleted after its retention",
        "read the result with `GetRun`; ask an operator to keep output for longer";
    OutputDataLost = "OUTPUT_DATA_LOST", DataLoss,
        "an object that holds output of the run is missing or too short; `object` names it",
        "report the object to the operator, who can look for it in `output.store`";
    RunNotRunning = "RUN_NOT_RUNNING", FailedPrecondition,
        "the run is queued or has ended, and the call needs its command",
        "watch the run for its start, or start it again";
    // Whether a run is admitted.
    ModeNotAllowed = "MODE_NOT_ALLOWED", FailedPrecondition,
        "this installation does not allow the sandbox mode",
        "choose another mode, or ask an operator to allow it";
    IsolationFloor = "ISOLATION_FLOOR", FailedPrecondition,
        "the sandbox mode isolates less than the tenant's floor",
        "choose a stronger mode, or ask an operator to lower the floor";
    ModeUnavailable = "MODE_UNAVAILABLE", FailedPrecondition,
        "no worker that could take the run supports the sandbox mode",
        "choose another mode, or start a worker that supports it (`codelia doctor`)";
    QueueTimeout = "QUEUE_TIMEOUT", FailedPrecondition,
        "no worker took the run within its queue timeout; the message says why",
        "retry later or with a longer `queue_timeout`, or ask an operator for more workers";
    ApprovalDenied = "APPROVAL_DENIED", FailedPrecondition,
        "the run needed an approval, and someone denied it; the message names the approval and says why",
        "leave out what needs an approval, or talk to the decider and start the run again";
    ApprovalExpired = "APPROVAL_EXPIRED", FailedPrecondition,
        "the run needed an approval, and nobody decided in time; the message names the approval",
        "start the run again while someone watches (`codelia approvals watch`)";
    TooManyApprovals = "TOO_MANY_APPROVALS", ResourceExhausted,
        "the run, its session or the tenant has as many approvals as it may; the message says which",
        "decide about pending approvals, or revoke some that hold for later runs";
    ApprovalDecided = "APPROVAL_DECIDED", FailedPrecondition,
        "the approval was decided or has expired; `state` and `decided_by` say how and by which key",
        "read the decision; the run must be started again for another one";
    ApprovalOwnRequest = "APPROVAL_OWN_REQUEST", PermissionDenied,
        "the API key requested the approval, so it may not decide",
        "decide with another key that has the scope `approve`";
    TooManyFlags = "TOO_MANY_FLAGS", ResourceExhausted,
        "the installation has as many mode flags as it may",
        "use one again that is off";
    PolicyChanged = "POLICY_CHANGED", Aborted,
        "another version of the policy is in effect than the call expected; `version` names it",
        "read the policy again (`codelia policy diff`), and repeat the change on it";
    TooManyPolicies = "TOO_MANY_POLICIES", ResourceExhausted,
        "the tenant has as many projects or users with a policy as it may",
        "use the name of one again whose policy is not needed any more";
    FlagOff = "FLAG_OFF", FailedPrecondition,
        "the mode flag is off, so there is no rule to roll back",
        "name a revision to restore";
    ApprovalNotGranted = "APPROVAL_NOT_GRANTED", FailedPrecondition,
        "the approval does not hold for later runs, so it cannot be revoked; `state` says what it is",
        "list what can be revoked (`codelia approvals list --granted`)";
    ApprovalNotPermitted = "APPROVAL_NOT_PERMITTED", FailedPrecondition,
        "the installation or the tenant does not permit any more what the approval is about, or what the run asks for",
        "deny it or leave it out, or ask an operator to permit it again";
    ToolQuarantined = "TOOL_QUARANTINED", FailedPrecondition,
        "the tool that the run names is quarantined; the message says why",
        "look at the reason (`codelia tools show`); an administrator releases it (`codelia tools release`)";
    ToolNotApproved = "TOOL_NOT_APPROVED", FailedPrecondition,
        "the tool declares less isolation than LEVEL_2, and no operator approved this version of it",
        "ask an operator to approve it (`codelia tools approve`), or declare LEVEL_2";
    ToolChanged = "TOOL_CHANGED", Aborted,
        "the tool has another version than the call expects, or was changed or deleted while the run waited",
        "read the tool (`codelia tools show`) and repeat the call";
    TooManyTools = "TOO_MANY_TOOLS", ResourceExhausted,
        "the tenant has as many tools as it may",
        "delete tools that are not used";
    VolumeExists = "VOLUME_EXISTS", AlreadyExists,
        "the tenant has a volume with this name",
        "use it, or choose another name";
    VolumeInUse = "VOLUME_IN_USE", FailedPrecondition,
        "a session mounts the volume, or writes to it and no other session may; `session` names it",
        "close that session, or mount the volume with mode `copy` or `read_only`";
    TooManyVolumes = "TOO_MANY_VOLUMES", ResourceExhausted,
        "the tenant has as many volumes as it may",
        "delete volumes that are not used (`codelia volume rm`)";
    VolumeUnavailable = "VOLUME_UNAVAILABLE", FailedPrecondition,
        "a volume of the run is not among those that its session mounted, or is on the disk of another worker",
        "create another session with the volume";
    CommandNotAllowed = "COMMAND_NOT_ALLOWED", FailedPrecondition,
        "the policy does not allow the command; `rule` names the rule",
        "change the command, or the policy of the session";
    Unenforceable = "UNENFORCEABLE", FailedPrecondition,
        "the worker's host cannot enforce a limit or a policy field; the message names it",
        "leave the field out, choose another mode, or change the host as `codelia doctor` says";
    SecretsUnavailable = "SECRETS_UNAVAILABLE", FailedPrecondition,
        "`secret_env` cannot be encrypted or decrypted: api or worker has no key for secrets, or another one",
        "ask an operator to set the same `secrets.key_file` for every api and worker";
    // Whether a run starts.
    SessionBusy = "SESSION_BUSY", Unavailable,
        "a transactional run is alone in its session, and another run or file call did not end in time",
        "retry when it has ended, or use another session";
    SessionHoldsChanges = "SESSION_HOLDS_CHANGES", FailedPrecondition,
        "the session holds changes of a run that wait for a decision, and nothing may change its files until then",
        "apply or discard them (`codelia apply RUN`, `codelia discard RUN`), or use another session";
    ChangesNotHeld = "CHANGES_NOT_HELD", FailedPrecondition,
        "the run has no changes that wait for a decision; `changes.state` says what became of them",
        "look at the run (`codelia diff RUN`); start one with `codelia run --hold` to decide about its changes";
    ExecutableNotFound = "EXECUTABLE_NOT_FOUND", FailedPrecondition,
        "the program was not found in the sandbox",
        "check `argv[0]` and `PATH`, or choose an image or a policy with the program";
    ExecutableNotPermitted = "EXECUTABLE_NOT_PERMITTED", FailedPrecondition,
        "the program may not be executed: it is not executable, or the policy does not allow it",
        "set its permission bits, or change `process.allowed_executables`";
    WorkingDirectoryInvalid = "WORKING_DIRECTORY_INVALID", FailedPrecondition,
        "the working directory does not exist, cannot be entered or is outside the session",
        "create the directory, or name one that exists";
    ImageMissing = "IMAGE_MISSING", FailedPrecondition,
        "the worker's container engine does not have the image",
        "ask an operator to pull the image, or choose another `container.profile`";
    LaunchFailed = "LAUNCH_FAILED", FailedPrecondition,
        "the command could not be started; the message names the step and the error",
        "read the message; report it to the operator if it is not about the command";
    SandboxFailed = "SANDBOX_FAILED", FailedPrecondition,
        "the worker could not create the sandbox; its log has the cause",
        "retry; report the run's id to the operator if it fails again";
    // File calls.
    FileNotFound = "FILE_NOT_FOUND", NotFound,
        "the file or directory does not exist",
        "check the path; it is relative to the session's workspace";
    FileExists = "FILE_EXISTS", AlreadyExists,
        "a file or directory with this path exists",
        "choose another path, or allow the call to overwrite it";
    IsADirectory = "IS_A_DIRECTORY", FailedPrecondition,
        "the path is a directory, and the call needs a file",
        "name a file";
    NotADirectory = "NOT_A_DIRECTORY", FailedPrecondition,
        "the path is not a directory, or one of its components is not",
        "name a directory";
    DirectoryNotEmpty = "DIRECTORY_NOT_EMPTY", FailedPrecondition,
        "the directory is not empty",
        "remove it recursively";
    SpecialFile = "SPECIAL_FILE", FailedPrecondition,
        "the path is a FIFO, a socket or a device, which file calls never open",
        "use it from a command";
    PathLeadsOut = "PATH_LEADS_OUT", PermissionDenied,
        "the path or a symbolic link in it leaves the session's workspace",
        "name a path in the workspace";
    PathDenied = "PATH_DENIED", PermissionDenied,
        "the session's policy denies access to the path; `rule` names the rule",
        "choose another path, or create a session with another policy";
    FilePermission = "FILE_PERMISSION", PermissionDenied,
        "the permissions of the file or its directory deny access to the session's user",
        "change the permissions with a command";
    FileTooLarge = "FILE_TOO_LARGE", ResourceExhausted,
        "the file is, or would become, larger than the limit",
        "raise the session's `limits.file_bytes`, or split the file";
    DiskFull = "DISK_FULL", ResourceExhausted,
        "the worker's disk is full, or has less free than `worker.disk_reserve`: no run starts and no call writes files",
        "remove files or close sessions, or ask an operator for space";
    SessionDiskFull = "SESSION_DISK_FULL", ResourceExhausted,
        "the session's files use, or would use, more than its limit; `limit`, `used` and `max` say which and how much",
        "remove files of the session, or create one with a higher `limits.disk_bytes` or `limits.inodes`";
    FileChanged = "FILE_CHANGED", FailedPrecondition,
        "the file was changed or replaced since its etag was read",
        "read the file again and repeat the call with its new etag";
    TextNotFound = "TEXT_NOT_FOUND", FailedPrecondition,
        "the text to replace is not in the file",
        "read the file and give its exact text";
    TextAmbiguous = "TEXT_AMBIGUOUS", FailedPrecondition,
        "the text to replace occurs more than once",
        "give more context, or set `replace_all`";
    ArchiveInvalid = "ARCHIVE_INVALID", InvalidArgument,
        "the archive is malformed, incomplete, or not a tar archive (plain or compressed with zstd)",
        "pack it again, without sparse files";
    ArchiveTooLarge = "ARCHIVE_TOO_LARGE", ResourceExhausted,
        "the archive or directory exceeds a limit on entries, bytes, depth, names or compression",
        "split it; compress without `--long` or `--ultra`";
    WatchLimit = "WATCH_LIMIT", ResourceExhausted,
        "too many directories are watched: 4096 for a watch, 8 watches for a session, 16 for a tenant, or a limit of the worker",
        "end other watches, watch a smaller directory, or without `recursive`";
    TooManyFileCalls = "TOO_MANY_FILE_CALLS", ResourceExhausted,
        "too many file calls are open on the worker",
        "retry after the delay in `RetryInfo`";
    FileCallTimeout = "FILE_CALL_TIMEOUT", DeadlineExceeded,
        "the file call took longer than the worker allows",
        "split the work into smaller calls";
    StreamStalled = "STREAM_STALLED", Aborted,
        "the client did not send its request, or the data of a file stream, in time",
        "send the request again, without pauses";
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
# Errors

A client that handles errors should decide by the *reason*: a stable, upper-case word. A refused
call carries it as the `reason` of `google.rpc.ErrorInfo` (domain `codelia.dev`). The metadata of
`ErrorInfo` names the field, quota, scopes or rule at fault, `ResourceInfo` the object that was not
found. A run that was accepted and could not be started carries the reason as
`outcome.refused.reason`; the call itself succeeds then. The text of a message may change at any
time; the words in this table do not. Treat a word that is not in the table like the gRPC status
code it came with.

<!-- Generated from crates/types/src/reason.rs: CODELIA_BLESS=1 cargo test -p codelia-types -->

";

    fn catalogue() -> String {
        let mut text = INTRODUCTION.to_owned();
        text.push_str("| reason | gRPC code | cause | remedy |\n|---|---|---|---|\n");
        for reason in Reason::ALL {
            let code = reason.code();
            writeln!(text, "| `{reason}` | {code:?} | {} | {} |", reason.cause(), reason.remedy())
                .unwrap();
        }
        text
    }

    #[test]
    fn documented_catalogue_is_current() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/errors.md");
        if std::env::var_os("CODELIA_BLESS").is_some_and(|value| value == "1") {
            fs::write(&path, catalogue()).unwrap();
        }
        let documented = fs::read_to_string(&path).unwrap();
        assert!(
            documented == catalogue(),
            "docs/errors.md is out of date: run `CODELIA_BLESS=1 cargo test -p codelia-types`"
        );
    }

    #[test]
    fn every_reason_has_cause_and_remedy() {
        for reason in Reason::ALL.iter().chain(&[Reason::Unknown]) {
            for text in [reason.cause(), reason.remedy()] {
                let is_sentence = text.ends_with('.') || text.starts_with(char::is_uppercase);
                assert!(
                    text.len() > 5 && !is_sentence && !text.contains('|'),
                    "{reason}: {text:?}"
                );
            }
        }
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
        let stored =
            r#"{"kind":"refused","detail":{"reason":"FROM_THE_FUTURE","message":"later"}}"#;
        let refusal = Refusal { reason: Reason::Unknown, message: "later".to_owned() };
        assert_eq!(serde_json::from_str::<Outcome>(stored).unwrap(), Outcome::Refused(refusal));
    }
}
