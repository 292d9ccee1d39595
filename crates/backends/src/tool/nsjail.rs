//! Mode `nsjail`: namespaces and mounts through nsjail, which reads a configuration in protobuf
//! text format. Its own limits, cgroups and filters are off: ours apply.

use std::{
    fmt::Write,
    io,
    path::{Path, PathBuf},
};

use codelia_policy::{Ids, Mount, Plan, SANDBOX_IDS, VolumeMode};
use codelia_sys::process;
use codelia_types::{Mode, NetworkMode};

use crate::{
    Backend, Error,
    isolation::{self, INIT, MAX_TERMINALS, utf8},
    mounts::{overlay, view},
};

use super::{
    backend::{InheritedFiles, Tool, ToolMode, ToolOptions},
    dirs,
};

/// Creates the backend of mode `nsjail`.
///
/// # Errors
/// `/proc` cannot be read.
pub fn nsjail(options: ToolOptions) -> Result<impl Backend + 'static, Error> {
    ToolMode::backend(Nsjail, options)
}

#[derive(Debug)]
struct Nsjail;

/// The user for which nsjail created a directory of this name, if only sandboxes use that user.
fn owner_of(directory: &str, is_sandbox_uid: &dyn Fn(u32) -> bool) -> Option<u32> {
    let uid = directory.strip_prefix("nsjail.")?;
    let uid = uid.strip_suffix(".root").or(uid.strip_suffix(".tmp"))?.parse().ok()?;
    is_sandbox_uid(uid).then_some(uid)
}

impl Tool for Nsjail {
    const MODE: Mode = Mode::Nsjail;
    const COPIES_FILES: bool = false;

    fn arguments(
        &self,
        plan: &Plan,
        init: &Path,
        inherited: &mut InheritedFiles,
    ) -> Result<Vec<String>, Error> {
        let config = config(plan, init)?;
        let descriptor = inherited.add("nsjail.cfg", config.as_bytes())?;
        Ok(vec!["--config".to_owned(), format!("/proc/self/fd/{descriptor}")])
    }

    /// None for the worker's own user: other programs of that user may be about to use them.
    fn directories(&self, ids: Ids) -> Vec<PathBuf> {
        if ids.uid == process::own_uid() {
            return Vec::new();
        }
        let uid = ids.uid;
        let prefixes = [
            format!("/run/user/{uid}/nsjail/"),
            format!("/run/user/nsjail.{uid}."),
            format!("/tmp/nsjail.{uid}."),
        ];
        prefixes
            .iter()
            .flat_map(|prefix| ["root", "tmp"].map(|name| PathBuf::from(format!("{prefix}{name}"))))
            .collect()
    }

    fn upkeep(&self, _: &Path, is_sandbox_uid: &dyn Fn(u32) -> bool) -> io::Result<usize> {
        let owner = |name: &str| owner_of(name, is_sandbox_uid);
        let parents = ["/run/user", "/tmp"].map(Path::new);
        parents.into_iter().map(|parent| dirs::remove_abandoned(parent, owner)).sum()
    }

    fn remedy(&self, message: Option<&str>) -> &'static str {
        match message {
            None => "install nsjail, or set sandbox.nsjail to its path",
            Some(text) if text.contains("CLONE_NEWUSER") || text.contains("clone") => {
                "allow user namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone)"
            }
            Some(text) if text.contains("Permission denied") => {
                "make the directories above codelia-init and the sessions traversable (mode 0711)"
            }
            Some(_) => "run nsjail manually to see what it lacks",
        }
    }
}

/// Options of every plan. `codelia-init` starts its own session first, creates the cgroup
/// namespace once it is in its cgroup, and drops its capabilities after it has locked the secure
/// bits, so that it cannot regain any.
const BASE_CONFIG: &str = "\
mode: ONCE
cwd: \"/\"
log_level: ERROR
time_limit: 0
nice_level: 0
disable_rl: true
skip_setsid: true
keep_env: false
keep_caps: false
cap: \"CAP_SETPCAP\"
cap: \"CAP_SYS_ADMIN\"
mount_proc: false
clone_newuser: true
clone_newns: true
clone_newpid: true
clone_newipc: true
clone_newuts: true
clone_newcgroup: false
";

/// The links of a minimal `/dev`.
const DEVICE_LINKS: [(&str, &str); 5] = [
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("ptmx", "pts/ptmx"),
];

const PROC: &str =
    "mount { dst: \"/proc\" fstype: \"proc\" rw: true nosuid: true nodev: true noexec: true }";
const BIND: &str = "is_bind: true nosuid: true nodev: true";
const TMPFS: &str = "fstype: \"tmpfs\" nosuid: true nodev: true";

fn config(plan: &Plan, init: &Path) -> Result<String, Error> {
    let ids = isolation::ids(plan)?;
    let inside = SANDBOX_IDS;
    let mut config = Config(BASE_CONFIG.to_owned());
    config.line(&format!("hostname: {}", quoted(plan.hostname.as_deref().unwrap_or_default())));
    config.line(&format!(
        "uidmap {{ inside_id: \"{}\" outside_id: \"{}\" count: 1 }}",
        inside.uid, ids.uid
    ));
    config.line(&format!(
        "gidmap {{ inside_id: \"{}\" outside_id: \"{}\" count: 1 }}",
        inside.gid, ids.gid
    ));
    // In network mode `proxy` codelia-init creates the namespace, as in every mode.
    config.line(&format!("clone_newnet: {}", plan.network == NetworkMode::None));
    if plan.network == NetworkMode::Proxy {
        config.line("cap: \"CAP_NET_ADMIN\"");
    }
    config.bind(init, Path::new(INIT), false)?;
    for (index, mount) in plan.mounts.iter().enumerate() {
        config.mount(mount, &view::place(plan, index))?;
    }
    config.line(&format!("exec_bin {{ path: {} }}", quoted(INIT)));
    Ok(config.0)
}

/// A configuration under construction.
struct Config(String);

impl Config {
    fn line(&mut self, line: &str) {
        self.0.push_str(line);
        self.0.push('\n');
    }

    fn mount(&mut self, mount: &Mount, place: &Path) -> Result<(), Error> {
        match mount {
            Mount::Bind { source, writable, .. } => self.bind(source, place, *writable),
            Mount::Runtime { path } => self.bind(path, place, false),
            Mount::Overlay { layer, .. } | Mount::Transaction { layer, .. } => {
                self.bind(&overlay::mount_point(layer), place, true)
            }
            Mount::Volume { layer, mode, .. } => {
                self.bind(&overlay::mount_point(layer), place, *mode != VolumeMode::ReadOnly)
            }
            Mount::Tmpfs { target, size_bytes } => {
                self.tmpfs(target, &format!("size={size_bytes},mode=1777"), true)
            }
            Mount::Proc => {
                self.line(PROC);
                Ok(())
            }
            Mount::Dev => self.dev(),
            Mount::Symlink { target, to } => self.link(utf8(to)?, utf8(target)?),
            Mount::File { text, .. } => {
                let target = quoted(utf8(place)?);
                let content = quoted(text);
                self.line(&format!(
                    "mount {{ dst: {target} src_content: {content} nosuid: true nodev: true }}"
                ));
                Ok(())
            }
            // codelia-init masks them.
            Mount::Hidden { .. } => Ok(()),
        }
    }

    fn bind(&mut self, source: &Path, target: &Path, writable: bool) -> Result<(), Error> {
        let source = quoted(utf8(source)?);
        let target = quoted(utf8(target)?);
        self.line(&format!("mount {{ src: {source} dst: {target} {BIND} rw: {writable} }}"));
        Ok(())
    }

    fn tmpfs(&mut self, target: &Path, options: &str, writable: bool) -> Result<(), Error> {
        let target = quoted(utf8(target)?);
        self.line(&format!(
            "mount {{ dst: {target} {TMPFS} options: \"{options}\" rw: {writable} }}"
        ));
        Ok(())
    }

    fn link(&mut self, to: &str, link: &str) -> Result<(), Error> {
        let to = quoted(to);
        let link = quoted(link);
        self.line(&format!("mount {{ src: {to} dst: {link} is_symlink: true }}"));
        Ok(())
    }

    /// nsjail makes it read-only after everything was mounted in it.
    fn dev(&mut self) -> Result<(), Error> {
        self.tmpfs(Path::new("/dev"), "size=65536,mode=0755", false)?;
        for name in view::DEVICES {
            self.line(&format!(
                "mount {{ src: \"/dev/{name}\" dst: \"/dev/{name}\" is_bind: true nosuid: true rw: true }}"
            ));
        }
        self.line(&format!(
            "mount {{ dst: \"/dev/pts\" fstype: \"devpts\" nosuid: true noexec: true rw: true \
             options: \"newinstance,ptmxmode=0666,mode=620,max={MAX_TERMINALS}\" }}",
        ));
        DEVICE_LINKS.into_iter().try_for_each(|(name, to)| self.link(to, &format!("/dev/{name}")))
    }
}

/// A string literal of the text format. Bytes that are not plain are written in octal.
fn quoted(text: &str) -> String {
    let mut quoted = String::from('"');
    for byte in text.bytes() {
        match byte {
            b' '..=b'~' if !matches!(byte, b'"' | b'\\' | b'\'') => quoted.push(byte.into()),
            // Writing to a string does not fail.
            _ => drop(write!(quoted, "\\{byte:03o}")),
        }
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probe;

    #[test]
    fn only_directories_of_sandbox_users_are_swept() {
        let owner = |name| owner_of(name, &|uid| (300..=399).contains(&uid));
        assert_eq!([owner("nsjail.300.root"), owner("nsjail.399.tmp")], [Some(300), Some(399)]);
        for name in
            ["nsjail.400.root", "nsjail.300.other", "nsjail.root", "jail.300.root", "nsjail.-1.tmp"]
        {
            assert_eq!(owner(name), None, "{name}");
        }
        assert_eq!(owner_of("nsjail.300.root", &|_| false), None);
    }

    #[test]
    fn text_cannot_end_its_quotes() {
        assert_eq!(quoted("a\" } mode: RERUN\n\\"), "\"a\\042 } mode: RERUN\\012\\134\"");
        assert_eq!(quoted("ü"), "\"\\303\\274\"");
    }

    #[test]
    fn mounts_keep_order_and_flags() {
        let mut plan =
            probe::isolated_plan(Mode::Nsjail, Path::new("/init"), Default::default(), None)
                .unwrap();
        plan.ids = Some(Ids { uid: 7, gid: 8 });
        plan.mounts = vec![
            Mount::Bind { source: "/s".into(), target: "/workspace".into(), writable: true },
            Mount::File { target: "/etc/x".into(), text: "a\n".into() },
        ];
        let config = config(&plan, Path::new("/init")).unwrap();
        let mounts: Vec<_> = config.lines().filter(|line| line.starts_with("mount {")).collect();
        assert_eq!(
            mounts,
            [
                r#"mount { src: "/init" dst: "/.codelia-init" is_bind: true nosuid: true nodev: true rw: false }"#,
                r#"mount { src: "/s" dst: "/workspace" is_bind: true nosuid: true nodev: true rw: true }"#,
                r#"mount { dst: "/etc/x" src_content: "a\012" nosuid: true nodev: true }"#,
            ]
        );
        assert!(config.contains(r#"uidmap { inside_id: "1000" outside_id: "7" count: 1 }"#));
        assert!(config.contains(r#"gidmap { inside_id: "1000" outside_id: "8" count: 1 }"#));
    }

    #[test]
    fn every_namespace_is_new_and_own_limits_are_off() {
        let mut plan =
            probe::isolated_plan(Mode::Nsjail, Path::new("/init"), Default::default(), None)
                .unwrap();
        for (network, is_new) in
            [(NetworkMode::None, true), (NetworkMode::Proxy, false), (NetworkMode::Host, false)]
        {
            plan.network = network;
            let config = config(&plan, Path::new("/init")).unwrap();
            assert!(config.contains(&format!("clone_newnet: {is_new}\n")), "{network}");
            assert_eq!(config.contains("CAP_NET"), network == NetworkMode::Proxy, "{network}");
        }
        for kind in ["user", "ns", "pid", "ipc", "uts"] {
            assert!(BASE_CONFIG.contains(&format!("clone_new{kind}: true")), "{kind}");
        }
        assert!(!BASE_CONFIG.contains("seccomp") && !BASE_CONFIG.contains("cgroup_"));
    }
}
