//! Mode `nsjail`: namespaces and mounts through nsjail, which is given a configuration in the text
//! form of its protocol buffers. Its own limits, groups and filters are off: ours hold.

use std::{
    fmt::Write,
    io,
    ops::RangeInclusive,
    path::{Path, PathBuf},
};

use codelia_policy::{Ids, Mount, Plan, SANDBOX_IDS};
use codelia_sys::process;
use codelia_types::Mode;

use crate::{
    Backend, Error, probe,
    tool::mask::{self, Hidden},
    tool::overlay,
    tool::tool_backend::{self, INIT, Inherited, Tool, ToolBackend, ToolOptions, ToolPaths},
    tool::tool_dirs,
};

/// Mode `nsjail`.
///
/// # Errors
/// `/proc` cannot be read.
pub fn nsjail(options: ToolOptions) -> Result<impl Backend + 'static, Error> {
    ToolBackend::new(Nsjail { sandbox_uids: options.sandbox_uids.clone() }, options)
}

#[derive(Debug)]
struct Nsjail {
    sandbox_uids: Option<RangeInclusive<u32>>,
}

impl Nsjail {
    /// Whose directory one of this name is, if it is one that a sandbox of ours had.
    fn user_of(&self, name: &str) -> Option<u32> {
        let uid = name.strip_prefix("nsjail.")?;
        let uid = uid.strip_suffix(".root").or(uid.strip_suffix(".tmp"))?.parse().ok()?;
        let is_ours =
            self.sandbox_uids.as_ref().is_some_and(|uids| uids.contains(&uid)) || probe::is_nobody(uid);
        is_ours.then_some(uid)
    }
}

impl Tool for Nsjail {
    const MODE: Mode = Mode::Nsjail;

    fn arguments(
        &self,
        plan: &Plan,
        host: &ToolPaths,
        inherited: &mut Inherited,
    ) -> Result<Vec<String>, Error> {
        let config = config(plan, &host.init)?;
        let descriptor = inherited.add("nsjail.cfg", config.as_bytes())?;
        Ok(vec!["--config".to_owned(), format!("/proc/self/fd/{descriptor}")])
    }

    /// It makes them for each user and leaves them. Those of our own user stay: other programs of
    /// that user may be about to use them.
    fn scratch(&self, ids: Ids) -> Vec<PathBuf> {
        if ids.uid == process::own_uid() {
            return Vec::new();
        }
        let uid = ids.uid;
        let base = [
            format!("/run/user/{uid}/nsjail/"),
            format!("/run/user/nsjail.{uid}."),
            format!("/tmp/nsjail.{uid}."),
        ];
        base.iter()
            .flat_map(|base| ["root", "tmp"].map(|name| PathBuf::from(format!("{base}{name}"))))
            .collect()
    }

    fn sweep(&self, _: &ToolPaths) -> io::Result<usize> {
        let places = ["/run/user", "/tmp"].map(Path::new);
        places.into_iter().map(|place| tool_dirs::remove_abandoned(place, |name| self.user_of(name))).sum()
    }

    fn remedy(&self, complaint: &str) -> String {
        match complaint {
            "" => "install nsjail, or give its path",
            text if text.contains("CLONE_NEWUSER") || text.contains("clone") => {
                "allow user namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone)"
            }
            text if text.contains("Permission denied") => {
                "let sandboxes pass through the directories above codelia-init and the sessions (mode 0711)"
            }
            _ => "run nsjail by hand to see what it lacks",
        }
        .to_owned()
    }
}

/// The same for every plan. `codelia-init` begins a session of its own before it does anything, and
/// gives up the one capability it gets once it has locked the way back to any.
const BASE: &str = "\
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
mount_proc: false
clone_newuser: true
clone_newns: true
clone_newpid: true
clone_newnet: true
clone_newipc: true
clone_newuts: true
clone_newcgroup: true
";

/// What a minimal `/dev` has.
const DEVICES: [&str; 6] = ["null", "zero", "full", "random", "urandom", "tty"];
const DEVICE_LINKS: [(&str, &str); 5] = [
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("ptmx", "pts/ptmx"),
];

const BIND: &str = "is_bind: true nosuid: true nodev: true";
const TMPFS: &str = "fstype: \"tmpfs\" nosuid: true nodev: true";

fn config(plan: &Plan, init: &Path) -> Result<String, Error> {
    let ids = tool_backend::ids(plan)?;
    let mut config = Config(BASE.to_owned());
    config.line(&format!("hostname: {}", quoted(plan.hostname.as_deref().unwrap_or_default())));
    config.line(&format!(
        "uidmap {{ inside_id: \"{}\" outside_id: \"{}\" count: 1 }}",
        SANDBOX_IDS.uid, ids.uid
    ));
    config.line(&format!(
        "gidmap {{ inside_id: \"{}\" outside_id: \"{}\" count: 1 }}",
        SANDBOX_IDS.gid, ids.gid
    ));
    config.bind(init, Path::new(INIT), false)?;
    for (index, mount) in plan.mounts.iter().enumerate() {
        config.mount(mount, &plan.mounts[..index])?;
    }
    config.line(&format!("exec_bin {{ path: {} }}", quoted(INIT)));
    Ok(config.0)
}

/// The configuration as it grows.
struct Config(String);

impl Config {
    fn line(&mut self, line: &str) {
        self.0.push_str(line);
        self.0.push('\n');
    }

    fn mount(&mut self, mount: &Mount, made: &[Mount]) -> Result<(), Error> {
        match mount {
            Mount::Bind { source, target, writable } => self.bind(source, target, *writable),
            Mount::Overlay { target, layer, .. } => self.bind(&overlay::place(layer), target, true),
            Mount::Tmpfs { target, size_bytes } => {
                self.tmpfs(target, &format!("size={size_bytes},mode=1777"), true)
            }
            Mount::Proc => {
                self.line("mount { dst: \"/proc\" fstype: \"proc\" rw: true nosuid: true nodev: true noexec: true }");
                Ok(())
            }
            Mount::Dev => self.dev(),
            Mount::Symlink { target, to } => self.link(text(to)?, text(target)?),
            Mount::File { target, text: content } => {
                let (target, content) = (quoted(text(target)?), quoted(content));
                self.line(&format!(
                    "mount {{ dst: {target} src_content: {content} nosuid: true nodev: true }}"
                ));
                Ok(())
            }
            Mount::Hidden { target, even_if_absent } => match mask::find(made, target, *even_if_absent)? {
                Hidden::Directory(place) => self.tmpfs(&place, "size=4096,mode=0000", false),
                // A device that may not be opened.
                Hidden::File(place) => self.bind(Path::new("/dev/null"), &place, false),
                Hidden::Nothing => Ok(()),
            },
        }
    }

    fn bind(&mut self, source: &Path, target: &Path, writable: bool) -> Result<(), Error> {
        let (source, target) = (quoted(text(source)?), quoted(text(target)?));
        self.line(&format!("mount {{ src: {source} dst: {target} {BIND} rw: {writable} }}"));
        Ok(())
    }

    fn tmpfs(&mut self, target: &Path, options: &str, writable: bool) -> Result<(), Error> {
        let target = quoted(text(target)?);
        self.line(&format!("mount {{ dst: {target} {TMPFS} options: \"{options}\" rw: {writable} }}"));
        Ok(())
    }

    fn link(&mut self, to: &str, link: &str) -> Result<(), Error> {
        self.line(&format!("mount {{ src: {} dst: {} is_symlink: true }}", quoted(to), quoted(link)));
        Ok(())
    }

    /// It becomes read-only when everything is in it.
    fn dev(&mut self) -> Result<(), Error> {
        self.tmpfs(Path::new("/dev"), "size=65536,mode=0755", false)?;
        for name in DEVICES {
            self.line(&format!(
                "mount {{ src: \"/dev/{name}\" dst: \"/dev/{name}\" is_bind: true nosuid: true rw: true }}"
            ));
        }
        self.line(
            "mount { dst: \"/dev/pts\" fstype: \"devpts\" options: \"newinstance,ptmxmode=0666,mode=620\" \
             nosuid: true noexec: true rw: true }",
        );
        DEVICE_LINKS.into_iter().try_for_each(|(name, to)| self.link(to, &format!("/dev/{name}")))
    }
}

fn text(path: &Path) -> Result<&str, Error> {
    path.to_str().ok_or(Error::Unenforceable { field: "mounts" })
}

/// A string of the text form: what is not plain is written as octal bytes.
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

    #[test]
    fn only_directories_of_its_users_are_its_own() {
        let tool = Nsjail { sandbox_uids: Some(300..=399) };
        let own = |name| tool.user_of(name);
        assert_eq!([own("nsjail.300.root"), own("nsjail.399.tmp")], [Some(300), Some(399)]);
        for name in ["nsjail.400.root", "nsjail.300.other", "nsjail.root", "jail.300.root", "nsjail.-1.tmp"] {
            assert_eq!(own(name), None, "{name}");
        }
        assert_eq!(Nsjail { sandbox_uids: None }.user_of("nsjail.300.root"), None);
    }

    #[test]
    fn text_cannot_end_its_quotes() {
        assert_eq!(quoted("a\" } mode: RERUN\n\\"), "\"a\\042 } mode: RERUN\\012\\134\"");
        assert_eq!(quoted("ü"), "\"\\303\\274\"");
    }

    #[test]
    fn a_plan_becomes_mounts_in_its_order_with_flags() {
        let mut plan = probe::isolated(Mode::Nsjail, Default::default(), None).unwrap();
        plan.ids = Some(Ids { uid: 7, gid: 8 });
        plan.mounts = vec![
            Mount::Bind { source: "/s".into(), target: "/workspace".into(), writable: true },
            Mount::File { target: "/etc/x".into(), text: "a\n".into() },
            Mount::Hidden { target: "/workspace/secret".into(), even_if_absent: true },
        ];
        let config = config(&plan, Path::new("/init")).unwrap();
        let mounts: Vec<_> = config.lines().filter(|line| line.starts_with("mount {")).collect();
        assert_eq!(
            mounts,
            [
                r#"mount { src: "/init" dst: "/.codelia-init" is_bind: true nosuid: true nodev: true rw: false }"#,
                r#"mount { src: "/s" dst: "/workspace" is_bind: true nosuid: true nodev: true rw: true }"#,
                r#"mount { dst: "/etc/x" src_content: "a\012" nosuid: true nodev: true }"#,
                r#"mount { dst: "/workspace/secret" fstype: "tmpfs" nosuid: true nodev: true options: "size=4096,mode=0000" rw: false }"#,
            ]
        );
        assert!(config.contains(r#"uidmap { inside_id: "1000" outside_id: "7" count: 1 }"#));
        assert!(config.contains(r#"gidmap { inside_id: "1000" outside_id: "8" count: 1 }"#));
    }

    #[test]
    fn every_namespace_is_new_and_nothing_of_its_own_limits() {
        for kind in ["user", "ns", "pid", "net", "ipc", "uts", "cgroup"] {
            assert!(BASE.contains(&format!("clone_new{kind}: true")), "{kind}");
        }
        assert!(!BASE.contains("seccomp") && !BASE.contains("cgroup_"));
    }
}
