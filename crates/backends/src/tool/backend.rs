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

use codelia_init::{ExpectedEnvironment, Setup, View};
use codelia_policy::{Ids, Plan};
use codelia_sys::{fd, process, spawn::Program};
use codelia_types::Mode;

use crate::{
    Error, HostOptions, Prepared,
    host_mode::{Host, HostBackend, HostMode},
    isolation,
    mask::Masks,
    mounts::{overlay::Namespaces, view},
    probe,
    sandbox::{Sandbox, child::ChildProcess, prepared},
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
        init: &Path,
        inherited: &mut InheritedFiles,
    ) -> Result<Vec<String>, Error>;

    /// The directories that the tool creates on the host for a user and does not remove.
    fn directories(&self, _: Ids) -> Vec<PathBuf> {
        Vec::new()
    }

    /// Removes what killed tools and workers left for the users of sandboxes: unused directories,
    /// processes that wait for a dead tool. Returns how many items it removed.
    fn upkeep(&self, program: &Path, is_sandbox_uid: &dyn Fn(u32) -> bool) -> io::Result<usize>;

    /// How to install the tool (`None`), or how to fix what it reports.
    fn remedy(&self, message: Option<&str>) -> &'static str;
}

/// Configuration of a mode that starts a tool for each sandbox.
#[derive(Debug, Clone)]
pub struct ToolOptions {
    /// The part that all modes on the host have.
    pub host: HostOptions,
    /// Path of the tool, or its name to look up in `PATH`.
    pub program: PathBuf,
    /// User ids that only sandboxes use. The upkeep removes what killed tools left for them.
    pub sandbox_uids: Option<RangeInclusive<u32>>,
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

/// The mode of a tool.
#[derive(Debug)]
pub(super) struct ToolMode<T> {
    tool: T,
    /// Path of the tool.
    program: PathBuf,
    sandbox_uids: Option<RangeInclusive<u32>>,
}

impl<T: Tool> ToolMode<T> {
    /// Finds the tool and makes its backend.
    pub(super) fn backend(tool: T, options: ToolOptions) -> Result<HostBackend<Self>, Error> {
        let ToolOptions { host, program, sandbox_uids } = options;
        HostBackend::new(Self { tool, program: find_in_path(program), sandbox_uids }, host)
    }

    /// The tool runs as the session's user from its first instruction, without privileges.
    fn program(
        &self,
        plan: &Plan,
        init: &Path,
        control: OwnedFd,
        namespaces: Option<&Namespaces>,
        stderr: &File,
    ) -> Result<Program, Error> {
        let mut inherited = InheritedFiles::default();
        let arguments = self.tool.arguments(plan, init, &mut inherited)?;
        let streams =
            [control, fd::dev_null().map_err(io::Error::from)?, stderr.try_clone()?.into()];
        let program = Program::new(&self.program, arguments, streams).map_err(io::Error::from)?;
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
        let path = self.program.clone();
        match cause.kind() {
            io::ErrorKind::NotFound => Error::ToolMissing { path },
            _ => Error::ToolStart { path, cause },
        }
    }
}

impl<T: Tool> HostMode for ToolMode<T> {
    const MODE: Mode = T::MODE;

    fn view(
        &self,
        plan: &Plan,
        masks: &Masks,
        expected: &mut ExpectedEnvironment,
    ) -> Result<View, Error> {
        let mut view = view::in_tool(plan, masks, T::COPIES_FILES)?;
        view::expect_tool_mounts(expected, &mut view);
        Ok(view)
    }

    async fn start(
        &self,
        host: &Host,
        plan: &Plan,
        setup: Setup,
        overlays: Option<Arc<Namespaces>>,
    ) -> Result<Box<dyn Prepared>, Error> {
        let stderr = File::from(fd::memfd("stderr", b"").map_err(io::Error::from)?);
        let sandbox = Sandbox::start(host.cgroups.create(plan)?, |remote| {
            let ids = isolation::ids(plan)?;
            let dirs = ToolDirs::acquire(ids.uid, self.tool.directories(ids));
            let program = self.program(plan, &host.init, remote, overlays.as_deref(), &stderr)?;
            let process = ChildProcess::start(&program).map_err(|cause| self.start_error(cause))?;
            Ok(ToolProcess::new(process, plan, dirs, overlays))
        })?;
        let prepared = prepared::prepare(sandbox, plan, setup, None, None).await;
        prepared.map_err(|error| explain(T::MODE, error, &stderr))
    }

    fn upkeep(&self) -> io::Result<usize> {
        self.tool.upkeep(&self.program, &|uid| {
            self.sandbox_uids.as_ref().is_some_and(|uids| uids.contains(&uid))
                || probe::is_probe_uid(uid)
        })
    }

    fn remedy(&self, error: &Error) -> &'static str {
        match error {
            Error::Tool { message, .. } => self.tool.remedy(Some(message)),
            Error::ToolMissing { .. } => self.tool.remedy(None),
            Error::ToolStart { .. } => "make the tool executable for the worker's user",
            error => isolation::init_remedy(error),
        }
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
