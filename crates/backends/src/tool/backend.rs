//! A mode whose sandboxes are created by a tool. The tool creates the namespaces and mounts of a
//! plan and then executes `codelia-init`, which does the rest. Only the way to instruct the tool
//! differs between modes.

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
use codelia_policy::{Ids, Plan};
use codelia_sys::{
    cgroup::{CgroupParent, Group},
    fd, process, rlimit,
    spawn::Program,
};
use codelia_types::Mode;

use crate::{
    Backend, Capabilities, Error, Gap, Prepared, alias, isolation,
    mask::Masks,
    mounts::{
        layout,
        overlay::{Namespaces, Overlays},
        view,
    },
    probe::{self, Probed},
    sandbox::{Sandbox, cgroups::Cgroups, child::ChildProcess, control::Control, prepared, setup},
};

use super::{dirs::ToolDirs, process::ToolProcess};

/// How much of a tool's error output is reported.
const MAX_STDERR: usize = 4096;

/// A program that creates namespaces and mounts.
pub(super) trait Tool: Send + Sync + std::fmt::Debug {
    /// The mode it implements.
    const MODE: Mode;
    /// Whether it copies files of the runtime, so that only directories are mounted.
    const COPIES_FILES: bool;

    /// The arguments with which the tool carries out the plan and executes `codelia-init`.
    fn arguments(
        &self,
        plan: &Plan,
        paths: &ToolPaths,
        inherited: &mut InheritedFiles,
    ) -> Result<Vec<String>, Error>;

    /// The directories that the tool creates on the host for a user and does not remove.
    fn directories(&self, _: Ids) -> Vec<PathBuf> {
        Vec::new()
    }

    /// Removes what killed tools and workers left: unused directories, processes that wait for a
    /// dead tool. Returns how many items it removed.
    fn sweep(&self, paths: &ToolPaths) -> io::Result<usize>;

    /// How to install the tool (`None`), or how to fix what it reports.
    fn remedy(&self, message: Option<&str>) -> &'static str;
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
    /// Sockets of container engines, which no sandbox shows.
    pub engine_sockets: Vec<PathBuf>,
    /// Whether limits that no control group enforces are watched. Otherwise the mode is not usable
    /// without control groups.
    pub watch_limits: bool,
}

/// The programs of a mode on the host.
#[derive(Debug)]
pub(super) struct ToolPaths {
    /// Path of `codelia-init`.
    pub(super) init: PathBuf,
    /// Path of the tool.
    pub(super) program: PathBuf,
}

/// Files in memory that a tool inherits as descriptors.
#[derive(Debug, Default)]
pub(super) struct InheritedFiles(Vec<OwnedFd>);

impl InheritedFiles {
    /// Adds a file and returns its descriptor's number.
    pub(super) fn add(&mut self, name: &str, content: &[u8]) -> Result<String, Error> {
        Ok(self.add_open(fd::memfd(name, content).map_err(io::Error::from)?))
    }

    /// Adds an open file and returns its descriptor's number.
    pub(super) fn add_open(&mut self, file: OwnedFd) -> String {
        let number = file.as_raw_fd().to_string();
        self.0.push(file);
        number
    }
}

/// The backend of a tool.
#[derive(Debug)]
pub(super) struct ToolBackend<T> {
    tool: T,
    paths: ToolPaths,
    cgroups: Cgroups,
    overlays: Overlays,
    /// The sockets of engines, under their configured and their real paths.
    secrets: Vec<PathBuf>,
    watch_limits: bool,
}

impl<T: Tool> ToolBackend<T> {
    /// Finds the tool and detects the control groups of this host.
    pub(super) fn new(tool: T, options: ToolOptions) -> Result<Self, Error> {
        // If this fails, every sandbox fails with the step, and the probe shows the remedy.
        if let Err(errno) = rlimit::permit_core_limit() {
            tracing::warn!(%errno, "hard limit of core dumps is 0 and cannot be raised");
        }
        let paths = ToolPaths { init: options.init, program: find_in_path(options.program) };
        let cgroups = Cgroups::detect(&options.cgroup_parent)?;
        let real = options.engine_sockets.iter().filter_map(|socket| socket.canonicalize().ok());
        let secrets = real.chain(options.engine_sockets.iter().cloned()).collect();
        let watch_limits = options.watch_limits;
        Ok(Self { tool, paths, cgroups, overlays: Overlays::default(), secrets, watch_limits })
    }

    async fn create(&self, plan: &Plan) -> Result<Box<dyn Prepared>, Error> {
        let plan = &*alias::hide(plan, &self.secrets).await?;
        let mut setup = setup::of(plan)?;
        if let Some(security) = &mut setup.security {
            let mut view = view::of(plan, &Masks::of(&plan.mounts).await?, T::COPIES_FILES)?;
            view::expect_tool_mounts(&mut security.expected, &mut view);
            security.view = Some(view);
        }
        let stderr = File::from(fd::memfd("stderr", b"").map_err(io::Error::from)?);
        let namespaces = self.overlays.mount(&self.paths.init, plan).await?;
        let sandbox = self.start(plan, self.cgroups.create(plan)?, namespaces, &stderr)?;
        let prepared = prepared::prepare(sandbox, plan, setup, None, None).await;
        prepared.map_err(|error| explain(T::MODE, error, &stderr))
    }

    /// Starts the tool. Removes the group if that fails; the sandbox removes it otherwise.
    fn start(
        &self,
        plan: &Plan,
        mut group: Option<Group>,
        namespaces: Option<Arc<Namespaces>>,
        stderr: &File,
    ) -> Result<Sandbox, Error> {
        let ids = isolation::ids(plan)?;
        let dirs = ToolDirs::acquire(ids.uid, self.tool.directories(ids));
        let started = Control::pair().and_then(|(control, remote)| {
            let program = self.program(plan, remote, namespaces.as_deref(), stderr)?;
            let process = ChildProcess::start(&program).map_err(|cause| self.start_error(cause))?;
            Ok((control, process))
        });
        match started {
            Ok((control, process)) => {
                let process = ToolProcess::new(process, plan, dirs, namespaces);
                Ok(Sandbox::new(control, Box::new(process), group))
            }
            Err(error) => {
                group.as_mut().map(Group::remove).transpose()?;
                Err(error)
            }
        }
    }

    /// The tool runs as the session's user from its first instruction, without privileges.
    fn program(
        &self,
        plan: &Plan,
        control: OwnedFd,
        namespaces: Option<&Namespaces>,
        stderr: &File,
    ) -> Result<Program, Error> {
        let mut inherited = InheritedFiles::default();
        let arguments = self.tool.arguments(plan, &self.paths, &mut inherited)?;
        let streams =
            [control, fd::dev_null().map_err(io::Error::from)?, stderr.try_clone()?.into()];
        let program =
            Program::new(&self.paths.program, arguments, streams).map_err(io::Error::from)?;
        let program = program.new_process_group().inherit_fds(inherited.0).enter_namespaces(
            namespaces.map(Namespaces::try_clone_fds).transpose()?.unwrap_or_default(),
        );
        // Only root can change users. For others the plan has their own ids.
        if process::own_uid() != 0 {
            return Ok(program);
        }
        let Ids { uid, gid } = isolation::ids(plan)?;
        Ok(program.as_user(uid, gid))
    }

    fn start_error(&self, cause: io::Error) -> Error {
        let path = self.paths.program.clone();
        match cause.kind() {
            io::ErrorKind::NotFound => Error::ToolMissing { path },
            _ => Error::ToolStart { path, cause },
        }
    }

    fn gap(&self, error: &Error) -> Gap {
        let remedy = match error {
            Error::Tool { message, .. } => self.tool.remedy(Some(message)),
            Error::ToolMissing { .. } => self.tool.remedy(None),
            Error::ToolStart { .. } => "make the tool executable for the worker's user",
            error => isolation::init_remedy(error),
        };
        probe::sandbox_gap(error, remedy.to_owned())
    }
}

#[async_trait]
impl<T: Tool> Probed for ToolBackend<T> {
    const MODE: Mode = T::MODE;

    fn init(&self) -> &Path {
        &self.paths.init
    }

    async fn create(&self, plan: &Plan) -> Result<Box<dyn Prepared>, Error> {
        self.create(plan).await
    }

    fn gap(&self, error: &Error) -> Gap {
        self.gap(error)
    }
}

#[async_trait]
impl<T: Tool> Backend for ToolBackend<T> {
    fn mode(&self) -> Mode {
        T::MODE
    }

    async fn probe(&self) -> Capabilities {
        probe::capabilities(self, &self.cgroups, self.watch_limits).await
    }

    async fn sweep(&self) -> Result<usize, Error> {
        Ok(self.cgroups.remove_orphans()? + self.tool.sweep(&self.paths).map_err(Error::Sweep)?)
    }

    fn shutdown(&self) {
        self.cgroups.shutdown();
    }

    async fn prepare(&self, plan: &Plan) -> Result<Box<dyn Prepared>, Error> {
        isolation::require_isolating(plan, T::MODE, self.watch_limits)?;
        layout::create_directories(plan)?;
        self.create(plan).await
    }
}

/// Looks a bare name up in `PATH`. A program that is not found fails when it is started.
fn find_in_path(program: PathBuf) -> PathBuf {
    if program.components().count() != 1 {
        return program;
    }
    let path = env::var_os("PATH").unwrap_or_default();
    let found = env::split_paths(&path).map(|dir| dir.join(&program)).find(|path| path.is_file());
    found.unwrap_or(program)
}

/// Replaces the symptom, that `codelia-init` does not respond, by the tool's own error output.
fn explain(mode: Mode, error: Error, stderr: &File) -> Error {
    let mut text = vec![0; MAX_STDERR];
    let count = stderr.read_at(&mut text, 0).unwrap_or_default();
    match (error, String::from_utf8_lossy(&text[..count]).trim()) {
        (Error::InitExited | Error::Control(_), message) if !message.is_empty() => {
            Error::Tool { mode, message: message.to_owned() }
        }
        (error, _) => error,
    }
}
