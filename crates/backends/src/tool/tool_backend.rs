//! A mode that isolates by namespaces: a tool makes them and the mounts of a plan, and becomes
//! `codelia-init`, which does the rest. What differs between tools is only how they are asked.

use std::{
    env,
    fs::File,
    io,
    ops::RangeInclusive,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::FileExt,
    },
    path::{Path, PathBuf},
    sync::Arc,
};

use async_trait::async_trait;
use codelia_policy::{Enforceable, Ids, Mount, Plan};
use codelia_sys::{
    cgroup::{CgroupParent, Group},
    fd, process,
    spawn::Program,
};
use codelia_types::{Mode, NetworkMode};

use crate::{
    Backend, Capabilities, Error, Gap, Prepared, probe,
    sandbox::control::Control,
    sandbox::groups::Groups,
    sandbox::prepared,
    sandbox::process::Process,
    sandbox::sandbox::Sandbox,
    sandbox::setup,
    tool::overlay::{self, Overlays, Spaces},
    tool::tool_dirs::Scratch,
    tool::tool_process::ToolProcess,
};

/// Where `codelia-init` is inside every sandbox.
pub(crate) const INIT: &str = "/.codelia-init";

/// As much of what a tool complains is told.
const MOST_COMPLAINT: usize = 4096;

/// A program that makes namespaces and mounts.
pub(crate) trait Tool: Send + Sync + std::fmt::Debug {
    /// The mode it serves.
    const MODE: Mode;

    /// The arguments that have it carry out the plan and become `codelia-init`.
    fn arguments(
        &self,
        plan: &Plan,
        host: &ToolPaths,
        inherited: &mut Inherited,
    ) -> Result<Vec<String>, Error>;

    /// The directories it makes on the host for a user.
    fn scratch(&self, _: Ids) -> Vec<PathBuf> {
        Vec::new()
    }

    /// Removes what killed tools and workers left: directories that nobody is left to use, processes that wait
    /// for ever. Answers how much.
    fn sweep(&self, host: &ToolPaths) -> io::Result<usize>;

    /// How to get it, and how to get what it complains of.
    fn remedy(&self, complaint: &str) -> String;
}

/// Configuration of a mode that starts a tool for each sandbox.
#[derive(Debug, Clone)]
pub struct ToolOptions {
    /// Path of `codelia-init`.
    pub init: PathBuf,
    /// Path of the tool, or its name to look up in `PATH`.
    pub program: PathBuf,
    /// Where the control groups of sandboxes are created.
    pub cgroup_parent: CgroupParent,
    /// User ids that only sandboxes use. The sweep removes what killed tools left for them.
    pub sandbox_uids: Option<RangeInclusive<u32>>,
}

/// What is the same for every sandbox of a mode.
#[derive(Debug)]
pub(crate) struct ToolPaths {
    /// Where `codelia-init` is.
    pub(crate) init: PathBuf,
    /// Where the tool is.
    pub(crate) program: PathBuf,
}

/// Content that a tool gets as descriptors.
#[derive(Debug, Default)]
pub(crate) struct Inherited(Vec<OwnedFd>);

impl Inherited {
    /// Adds a file; answers the number of its descriptor.
    pub(crate) fn add(&mut self, name: &str, content: &[u8]) -> Result<String, Error> {
        let file = fd::memfd(name, content).map_err(io::Error::from)?;
        let number = file.as_raw_fd().to_string();
        self.0.push(file);
        Ok(number)
    }
}

/// A mode, by its tool.
#[derive(Debug)]
pub(crate) struct ToolBackend<T> {
    tool: T,
    host: ToolPaths,
    groups: Groups,
    overlays: Overlays,
}

impl<T: Tool> ToolBackend<T> {
    /// Looks for the control groups of this host.
    pub(crate) fn new(tool: T, options: ToolOptions) -> Result<Self, Error> {
        let host = ToolPaths { init: options.init, program: locate(options.program) };
        let groups = Groups::detect(&options.cgroup_parent)?;
        Ok(Self { tool, host, groups, overlays: Overlays::default() })
    }

    async fn carry_out(&self, plan: &Plan) -> Result<Box<dyn Prepared>, Error> {
        let setup = setup::of(plan)?;
        let complaints = File::from(fd::memfd("complaints", b"").map_err(io::Error::from)?);
        let overlays = self.overlays.hold(&self.host.init, plan).await?;
        let sandbox = self.start(plan, self.groups.create(plan)?, overlays, &complaints)?;
        let prepared = prepared::prepare(sandbox, plan, setup, None).await;
        prepared.map_err(|error| explain(T::MODE, error, &complaints))
    }

    /// From here on the sandbox takes itself down.
    fn start(
        &self,
        plan: &Plan,
        mut group: Option<Group>,
        overlays: Option<Arc<Spaces>>,
        complaints: &File,
    ) -> Result<Sandbox, Error> {
        let ids = ids(plan)?;
        let scratch = Scratch::enter(ids.uid, self.tool.scratch(ids));
        let started = Control::pair().and_then(|(control, there)| {
            let program = self.program(plan, there, overlays.as_deref(), complaints)?;
            let process = Process::start(&program).map_err(|source| self.not_started(source))?;
            Ok((control, process))
        });
        match started {
            Ok((control, process)) => {
                Ok(Sandbox::new(control, Box::new(ToolProcess::new(process, plan, scratch, overlays)), group))
            }
            Err(error) => {
                group.as_mut().map(Group::remove).transpose()?;
                Err(error)
            }
        }
    }

    /// The tool runs as the session's user from its first instruction: it has nothing to lose.
    fn program(
        &self,
        plan: &Plan,
        control: OwnedFd,
        overlays: Option<&Spaces>,
        complaints: &File,
    ) -> Result<Program, Error> {
        let mut inherited = Inherited::default();
        let arguments = self.tool.arguments(plan, &self.host, &mut inherited)?;
        let streams = [control, fd::dev_null().map_err(io::Error::from)?, complaints.try_clone()?.into()];
        let program = Program::new(&self.host.program, arguments, streams).map_err(io::Error::from)?;
        let program = program
            .new_process_group()
            .inherit_fds(inherited.0)
            .enter_namespaces(overlays.map(Spaces::copies).transpose()?.unwrap_or_default());
        // Nobody else may choose, and the plan names no other.
        if process::own_uid() != 0 {
            return Ok(program);
        }
        let Ids { uid, gid } = ids(plan)?;
        Ok(program.as_user(uid, gid))
    }

    fn not_started(&self, source: io::Error) -> Error {
        let path = self.host.program.clone();
        match source.kind() {
            io::ErrorKind::NotFound => Error::ToolMissing { path },
            _ => Error::ToolStart { path, source },
        }
    }

    fn gap(&self, error: &Error) -> Gap {
        Gap {
            missing: format!("a working sandbox: {error}"),
            remedy: match error {
                Error::Tool { complaint, .. } => self.tool.remedy(complaint),
                Error::ToolMissing { .. } => self.tool.remedy(""),
                _ => "run codelia doctor".to_owned(),
            },
        }
    }

    /// Runs a command that does nothing through a whole sandbox.
    async fn try_sandbox(&self, host: Enforceable, only: Option<&Path>) -> Result<(), Error> {
        let prepared = self.carry_out(&probe::isolated(T::MODE, host, only)?).await?;
        probe::run(prepared, Path::new(INIT)).await
    }

    /// The same with an overlay of the host's programs.
    async fn try_overlay(&self, host: Enforceable) -> Result<(), Error> {
        let mut plan = probe::isolated(T::MODE, host, None)?;
        let layers = env::temp_dir().join(plan.sandbox.to_string());
        plan.mounts.push(Mount::Overlay {
            source: "/usr".into(),
            target: "/usr".into(),
            layer: layers.join("usr"),
        });
        let tried = match self.carry_out(&plan).await {
            Ok(prepared) => probe::run(prepared, Path::new(INIT)).await,
            Err(error) => Err(error),
        };
        let removed = overlay::remove(&layers);
        tried.and(Ok(removed?))
    }
}

#[async_trait]
impl<T: Tool> Backend for ToolBackend<T> {
    fn mode(&self) -> Mode {
        T::MODE
    }

    async fn probe(&self) -> Capabilities {
        let mut gaps = Vec::new();
        let limits = Enforceable { violations: true, ..self.groups.probe(&mut gaps) };
        if let Err(error) = self.try_sandbox(limits, None).await {
            gaps.push(self.gap(&error));
            return Capabilities { mode: T::MODE, usable: false, enforceable: limits, gaps };
        }
        let executables = match self.try_sandbox(limits, Some(Path::new(INIT))).await {
            Ok(()) => true,
            Err(error) => {
                gaps.push(no_list_of_executables(&error));
                false
            }
        };
        let overlays = match self.try_overlay(limits).await {
            Ok(()) => true,
            Err(error) => {
                gaps.push(no_overlays(&error));
                false
            }
        };
        let enforceable = Enforceable { network: true, syscalls: true, executables, overlays, ..limits };
        Capabilities { mode: T::MODE, usable: true, enforceable, gaps }
    }

    async fn sweep(&self) -> Result<usize, Error> {
        Ok(self.groups.remove_orphans()? + self.tool.sweep(&self.host).map_err(Error::Sweep)?)
    }

    fn shutdown(&self) {
        self.groups.leave();
    }

    async fn prepare(&self, plan: &Plan) -> Result<Box<dyn Prepared>, Error> {
        refuse_what_does_not_isolate(plan, T::MODE)?;
        self.carry_out(plan).await
    }
}

/// A name is looked up as a shell does; what is not found is told when it is used.
fn locate(program: PathBuf) -> PathBuf {
    if program.components().count() != 1 {
        return program;
    }
    let path = env::var_os("PATH").unwrap_or_default();
    let found = env::split_paths(&path).map(|dir| dir.join(&program)).find(|path| path.is_file());
    found.unwrap_or(program)
}

fn no_overlays(error: &Error) -> Gap {
    Gap {
        missing: error.to_string(),
        remedy: "use a kernel that mounts overlays for the worker (5.19 or later as root, 5.11 or later for other \
                 users), with programs and temporary files on a file system of their own (ext4, xfs, btrfs)"
            .to_owned(),
    }
}

pub(crate) fn no_list_of_executables(error: &Error) -> Gap {
    Gap {
        missing: format!("a list of the only executables: {error}"),
        remedy: "use a kernel with Landlock (5.13 or later, landlock among its security modules)".to_owned(),
    }
}

pub(crate) fn refuse_what_does_not_isolate(plan: &Plan, mode: Mode) -> Result<(), Error> {
    let own = process::own_uid();
    let checks = [
        ("mode", plan.mode == mode),
        // Nobody is root outside of a sandbox, and only root may choose who to be.
        ("ids", plan.ids.is_some_and(|ids| ids.uid != 0 && (own == 0 || ids.uid == own))),
        ("hostname", plan.hostname.is_some()),
        ("network", plan.network == NetworkMode::None),
        ("security", plan.security.is_some()),
        ("limits", plan.unenforced.is_empty()),
    ];
    match checks.into_iter().find(|(_, holds)| !holds) {
        Some((field, _)) => Err(Error::Unenforceable { field }),
        None => Ok(()),
    }
}

/// Who the command is outside: an isolating plan says so.
pub(crate) fn ids(plan: &Plan) -> Result<Ids, Error> {
    plan.ids.ok_or(Error::Unenforceable { field: "ids" })
}

/// A tool that failed says why; all that is seen otherwise is that `codelia-init` does not answer.
fn explain(mode: Mode, error: Error, complaints: &File) -> Error {
    let mut text = vec![0; MOST_COMPLAINT];
    let count = complaints.read_at(&mut text, 0).unwrap_or_default();
    match (error, String::from_utf8_lossy(&text[..count]).trim()) {
        (Error::InitEnded | Error::Control(_), complaint) if !complaint.is_empty() => {
            Error::Tool { mode, complaint: complaint.to_owned() }
        }
        (error, _) => error,
    }
}
