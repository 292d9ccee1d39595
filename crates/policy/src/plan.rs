//! A plan: policy made concrete for one sandbox. Plain data that a backend carries out whole or
//! refuses; it never carries out a part.

use std::{collections::BTreeMap, path::PathBuf};

use serde::{Deserialize, Serialize};

use crate::{Limits, LimitsRequest, Mode, NetworkMode, RunId, RunSpec, SessionId};

/// Everything a backend must set up around a command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// Names the sandbox: cgroups, sockets and containers carry it. Usually the run's id.
    pub sandbox: RunId,
    /// The session it belongs to.
    pub session: SessionId,
    /// Which backend carries it out.
    pub mode: Mode,
    /// The session's directory on the host; the only writable place of the host.
    pub root: PathBuf,
    /// Where that directory is inside. In mode `logical` the same.
    pub workspace: PathBuf,
    /// Mounts, in the order they are made. Empty in mode `logical`.
    pub mounts: Vec<Mount>,
    /// Who the command runs as; `None` keeps the worker's own ids (mode `logical`).
    pub ids: Option<Ids>,
    /// The whole environment of the command, before its own additions.
    pub env: BTreeMap<String, String>,
    /// Host name inside; `None` keeps the host's (mode `logical`).
    pub hostname: Option<String>,
    /// Limits that hold.
    pub limits: Limits,
    /// Names of limits the host cannot enforce. Only mode `logical` may have any, and says so.
    pub unenforced: Vec<String>,
    /// What the command may reach.
    pub network: NetworkMode,
    /// What holds the command inside; `None` in mode `logical` alone.
    pub security: Option<Security>,
}

/// One mount of a plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Mount {
    /// A directory or file of the host.
    Bind {
        /// On the host.
        source: PathBuf,
        /// Inside.
        target: PathBuf,
        /// Whether it may be written.
        writable: bool,
    },
    /// A private, size-limited temporary file system.
    Tmpfs {
        /// Inside.
        target: PathBuf,
        /// Its size.
        size_bytes: u64,
    },
    /// The sandbox's own `/proc`.
    Proc,
    /// A minimal `/dev`.
    Dev,
    /// A symbolic link.
    Symlink {
        /// The link, inside.
        target: PathBuf,
        /// Where it leads.
        to: PathBuf,
    },
    /// A small read-only file of our own.
    File {
        /// Inside.
        target: PathBuf,
        /// What it says.
        text: String,
    },
    /// A place where nothing can be read or reached.
    Hidden {
        /// Inside.
        target: PathBuf,
    },
}

/// What holds a command inside: enforced by the kernel, the same in every isolating mode.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Security {
    /// Which system calls it may make.
    pub syscalls: SyscallRules,
    /// This many blocked calls end the run.
    pub violation_limit: u32,
    /// Whether it may start processes; threads it always may.
    pub fork: bool,
    /// Whether it may execute another program.
    pub exec: bool,
    /// The only programs that may be executed; `None` for any it can see.
    pub executables: Option<Vec<PathBuf>>,
    /// Whether its processes may trace each other.
    pub debug: bool,
}

/// Who the command runs as, outside the sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ids {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

/// A syscall filter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "mode", content = "names")]
pub enum SyscallRules {
    /// Only these.
    Allow(Vec<String>),
    /// All but these.
    Deny(Vec<String>),
}

/// What a host can enforce in a mode, as far as a plan must know it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Enforceable {
    /// Memory of all processes together.
    pub memory: bool,
    /// CPU rate.
    pub cpu: bool,
    /// Processes and threads together.
    pub pids: bool,
    /// A network of its own.
    pub network: bool,
}

/// A plan that cannot be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("mode {mode} cannot enforce {field} on this host")]
pub struct PlanError {
    /// The field at fault, as in the API.
    pub field: &'static str,
    /// The mode that was to enforce it.
    pub mode: Mode,
}

impl Plan {
    /// The plan for a run in mode `logical`.
    ///
    /// What somebody asked for must be enforceable, or the plan is refused. A default that the
    /// host cannot enforce is listed in `unenforced`: this mode promises no isolation.
    ///
    /// # Errors
    /// Names the field that was asked for and cannot be enforced.
    pub fn logical(
        sandbox: RunId,
        session: SessionId,
        root: PathBuf,
        spec: &RunSpec,
        host: Enforceable,
    ) -> Result<Self, PlanError> {
        if matches!(spec.network, Some(NetworkMode::None | NetworkMode::Proxy)) && !host.network {
            return Err(PlanError { field: "network", mode: Mode::Logical });
        }
        let unenforced = unenforced(&spec.asked, host)?;
        Ok(Self {
            sandbox,
            session,
            mode: Mode::Logical,
            env: clean_env(&root),
            workspace: root.clone(),
            root,
            mounts: Vec::new(),
            ids: None,
            hostname: None,
            limits: spec.limits.clone(),
            unenforced,
            network: NetworkMode::Host,
            security: None,
        })
    }
}

fn unenforced(asked: &LimitsRequest, host: Enforceable) -> Result<Vec<String>, PlanError> {
    let checks = [
        ("limits.memory_bytes", host.memory, asked.memory_bytes.is_some()),
        ("limits.cpu_millis", host.cpu, asked.cpu_millis.is_some()),
        ("limits.pids", host.pids, asked.pids.is_some()),
    ];
    let mut missing = Vec::new();
    for (field, can, wanted) in checks {
        match (can, wanted) {
            (true, _) => {}
            (false, true) => return Err(PlanError { field, mode: Mode::Logical }),
            (false, false) => missing.push(field.to_owned()),
        }
    }
    Ok(missing)
}

/// The environment a command starts from: nothing of the worker's.
fn clean_env(home: &std::path::Path) -> BTreeMap<String, String> {
    [
        ("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".to_owned()),
        ("HOME", home.display().to_string()),
        ("LANG", "C.UTF-8".to_owned()),
    ]
    .into_iter()
    .map(|(key, value)| (key.to_owned(), value))
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CommandSpec;

    fn spec(asked: LimitsRequest, network: Option<NetworkMode>) -> RunSpec {
        RunSpec {
            command: CommandSpec {
                argv: vec!["true".into()],
                env: BTreeMap::new(),
                working_directory: String::new(),
                terminal: None,
                stdin: false,
            },
            mode: Mode::Logical,
            network,
            limits: Limits::default(),
            asked,
            ends_with_caller: false,
        }
    }

    fn plan(spec: &RunSpec, host: Enforceable) -> Result<Plan, PlanError> {
        Plan::logical(RunId::generate(), SessionId::generate(), "/s".into(), spec, host)
    }

    #[test]
    fn a_limit_that_was_asked_for_and_cannot_be_enforced_is_refused_by_name() {
        let asked = LimitsRequest { memory_bytes: Some(1), ..Default::default() };
        let error = plan(&spec(asked, None), Enforceable::default()).unwrap_err();
        assert_eq!(error.field, "limits.memory_bytes");
    }

    #[test]
    fn a_default_that_cannot_be_enforced_is_listed() {
        let plan = plan(&spec(LimitsRequest::default(), None), Enforceable::default()).unwrap();
        assert_eq!(plan.unenforced, ["limits.memory_bytes", "limits.cpu_millis", "limits.pids"]);
    }

    #[test]
    fn a_network_that_was_asked_for_is_refused_where_there_is_none() {
        let error = plan(&spec(LimitsRequest::default(), Some(NetworkMode::None)), Enforceable::default());
        assert_eq!(error.unwrap_err().field, "network");
    }
}
