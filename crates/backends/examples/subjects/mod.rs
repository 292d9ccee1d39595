//! What the measurements have in common: sessions, plans, backends, and raw bubblewrap with the
//! same namespaces and mounts.

use std::{
    fs::{self, File},
    os::unix::fs::chown,
    path::{Path, PathBuf},
    sync::Arc,
};

use codelia_backends::{
    Backend, CgroupParent, HostOptions, NativeOptions, Stdio, ToolOptions, bwrap, find_init,
    native, nsjail,
};
use codelia_policy::{HostInfo, Ids, Limits, LimitsRequest, Plan, PlanTarget, Policy, RunSpec};
use codelia_types::{CommandSpec, Mode, NetworkMode, RunId, SessionId};

/// The command that is measured.
pub(crate) const PROGRAM: &str = "/usr/bin/true";
const FIRST_UID: u32 = 399_000;

// The namespaces and mounts of the default plan. The files of `/etc` are added at run time.
const RAW_BWRAP: &str = "--unshare-all --die-with-parent --as-pid-1 --cap-drop ALL --clearenv \
    --hostname codelia --uid 1000 --gid 1000 --ro-bind /usr /usr --symlink usr/bin /bin \
    --symlink usr/lib /lib --symlink usr/lib64 /lib64 --proc /proc --dev /dev --tmpfs /dev/shm \
    --tmpfs /tmp --tmpfs /var/tmp --tmpfs /run";

/// A session with a directory and a user.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) id: SessionId,
    pub(crate) directory: PathBuf,
    pub(crate) ids: Ids,
}

impl Session {
    /// Creates the session with this number below a directory.
    pub(crate) fn create(parent: &Path, number: u32) -> Self {
        let (directory, id) = (parent.join(number.to_string()), FIRST_UID + number);
        fs::create_dir(&directory).unwrap();
        chown(&directory, Some(id), Some(id)).unwrap();
        Self { id: SessionId::generate(), directory, ids: Ids { uid: id, gid: id } }
    }

    /// Plans a run in the session.
    pub(crate) fn plan(&self, mode: Mode, network: NetworkMode, host: &HostInfo) -> Plan {
        let spec = RunSpec {
            command: command(),
            mode,
            network: Some(network),
            limits: Limits { cpu_millicores: 2000, ..Limits::default() },
            requested_limits: LimitsRequest::default(),
            policy: Policy::default(),
            ends_with_caller: false,
            tool: None,
            transaction: None,
        };
        let target = PlanTarget {
            sandbox: RunId::generate(),
            session: self.id,
            root: self.directory.clone(),
        };
        Plan::isolated(target, &spec, host, self.ids).unwrap()
    }

    /// The arguments of raw bubblewrap. `etc` are the files of `/etc` that sandboxes see.
    pub(crate) fn raw_bwrap(&self, etc: &[PathBuf]) -> String {
        let etc: String =
            etc.iter().map(|path| format!("--ro-bind {0} {0} ", path.display())).collect();
        format!("{RAW_BWRAP} {etc} --bind {} /workspace {PROGRAM}", self.directory.display())
    }
}

pub(crate) fn command() -> CommandSpec {
    CommandSpec::new([PROGRAM])
}

pub(crate) fn null_stdio() -> Stdio {
    let null = || File::options().read(true).write(true).open("/dev/null").unwrap().into();
    Stdio::Files { stdin: null(), stdout: null(), stderr: null() }
}

/// The path of nsjail.
pub(crate) fn nsjail_program() -> PathBuf {
    std::env::var_os("CODELIA_NSJAIL").map_or("nsjail".into(), PathBuf::from)
}

/// The backends that make namespaces: bwrap, nsjail, native.
pub(crate) fn namespace_backends() -> [Arc<dyn Backend>; 3] {
    let options = NativeOptions { host: host_options(), max_zygotes: 8 };
    [
        Arc::new(bwrap(tool_options("bwrap".into())).unwrap()),
        Arc::new(nsjail(tool_options(nsjail_program())).unwrap()),
        Arc::new(native(options).unwrap()),
    ]
}

fn tool_options(program: PathBuf) -> ToolOptions {
    ToolOptions { host: host_options(), program, sandbox_uids: None }
}

fn host_options() -> HostOptions {
    HostOptions {
        init: find_init().unwrap(),
        cgroup_parent: CgroupParent::default(),
        engine_sockets: Vec::new(),
        watch_limits: false,
    }
}
