//! Whether a policy can be meant: every list bounded, every path absolute, nothing that contradicts
//! itself. A refusal names the field by its path in the document.

use std::path::{Component, Path, PathBuf};

use regex::{RegexSet, RegexSetBuilder};

use crate::{
    Ceilings, CommandPolicy, ContainerPolicy, EnvironmentMode, EnvironmentPolicy, FilesystemMode,
    FilesystemPolicy, IsolationLevel, Limit, NetworkPolicy, Policy, ProcessPolicy, ResourcePolicy,
    SyscallMode, SyscallPolicy, WORKSPACE, mounts::overlay_name, syscalls,
};
use codelia_types::{Mode, NetworkMode};

/// The most entries of a list.
const MAX_ENTRIES: usize = 1000;
/// The most patterns of a list; they are compiled for each run.
const MAX_PATTERNS: usize = 100;
/// The most bytes of a text.
const MAX_TEXT: usize = 4096;
/// The longest command there can be.
const MAX_COMMAND: u64 = 1024 * 1024;
/// The memory that a compiled list of patterns may take.
const MAX_COMPILED: usize = 1024 * 1024;
/// The longest name of a file.
const MAX_NAME: usize = 255;
/// The longest time that output may be held back.
const MAX_INTERVAL_MS: u64 = 60_000;
/// No kernel numbers more processors.
const MAX_CPU: u32 = 8191;
/// The most blocked system calls a run may survive.
const MAX_VIOLATIONS: u32 = 1000;

/// Places of the sandbox itself: no policy mounts over, above or below them.
const OWN: [&str; 8] = [WORKSPACE, "/proc", "/dev", "/sys", "/tmp", "/var/tmp", "/run", "/.codelia-init"];

/// A policy that cannot be meant.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {message}")]
pub struct PolicyError {
    /// Where in the document, such as `filesystem.denied_paths[2]`.
    pub field: String,
    /// What is wrong with it.
    pub message: String,
}

fn fail<T>(field: impl Into<String>, message: impl Into<String>) -> Result<T, PolicyError> {
    Err(PolicyError { field: field.into(), message: message.into() })
}

impl Policy {
    /// Checks all of it that does not depend on where it is used.
    ///
    /// # Errors
    /// Names the first field that cannot be meant.
    pub fn validate(&self, ceilings: &Ceilings) -> Result<(), PolicyError> {
        self.filesystem.validate()?;
        self.container.validate()?;
        self.process.validate()?;
        self.network.validate()?;
        self.check_resources(ceilings)?;
        self.resources.validate()?;
        self.syscalls.validate(self.process.debug == Some(true))?;
        self.environment.validate()?;
        self.command.validate()
    }

    /// Checks that the level can be had in this mode.
    ///
    /// # Errors
    /// Names the level.
    pub fn check_mode(&self, mode: Mode) -> Result<(), PolicyError> {
        match (self.isolation_level, mode) {
            (Some(IsolationLevel::Process | IsolationLevel::Full), Mode::Logical) => {
                fail("isolation_level", "mode logical isolates nothing")
            }
            (Some(IsolationLevel::None), Mode::Bwrap | Mode::Nsjail | Mode::Container) => {
                fail("isolation_level", format!("LEVEL_0 is mode logical, not {mode}"))
            }
            _ => Ok(()),
        }
    }

    /// Checks that it asks for nothing that the policy above it does not leave to it: no path of the host that is not
    /// open, no other image.
    ///
    /// # Errors
    /// Names what is not open.
    pub fn check_within(&self, upper: &Self) -> Result<(), PolicyError> {
        if let (Some(asked), Some(above)) = (&self.container.profile, &upper.container.profile)
            && asked != above
        {
            return fail("container.profile", format!("is not {above}, which was chosen above"));
        }
        let merged = upper.merge(self);
        let pairs = [
            (READ_ONLY, &self.filesystem.read_only_paths, merged.filesystem.read_only_paths),
            (READ_WRITE, &self.filesystem.read_write_paths, merged.filesystem.read_write_paths),
            (OVERLAY, &self.filesystem.overlay_paths, merged.filesystem.overlay_paths),
        ];
        for (field, asked, granted) in pairs {
            let granted = granted.unwrap_or_default();
            if let Some(at) = asked.iter().flatten().position(|path| !granted.contains(path)) {
                return fail(format!("{field}[{at}]"), "is not open to this session");
            }
        }
        Ok(())
    }

    fn check_resources(&self, ceilings: &Ceilings) -> Result<(), PolicyError> {
        // Each on its own: the two that become one limit must both be in range.
        let mut threads = Self::default();
        threads.resources.max_threads = self.resources.max_threads;
        let mut others = self.clone();
        others.resources.max_threads = None;
        for (policy, pids) in [(others, "process.max_processes"), (threads, "resources.max_threads")] {
            if let Err(error) = policy.caps().resolve(&ceilings.0, ceilings) {
                return fail(resource_field(error.limit(), pids), error.to_string());
            }
        }
        Ok(())
    }
}

const READ_ONLY: &str = "filesystem.read_only_paths";
const READ_WRITE: &str = "filesystem.read_write_paths";
const OVERLAY: &str = "filesystem.overlay_paths";
const DENIED: &str = "filesystem.denied_paths";

/// The policy field that caps a limit. `pids` is the field that caps [`Limit::Pids`], which has two.
fn resource_field(limit: Limit, pids: &'static str) -> &'static str {
    match limit {
        Limit::Timeout => "resources.max_wall_ms",
        Limit::MemoryBytes => "resources.max_memory_bytes",
        Limit::CpuMillis => "resources.max_cpu_millis",
        Limit::Pids => pids,
        Limit::OpenFiles => "resources.max_open_files",
        Limit::OutputBytes => "resources.max_output_bytes",
        Limit::CpuTime => "resources.max_cpu_ms",
        Limit::FileBytes => "filesystem.max_file_bytes",
        Limit::TmpBytes => "resources.max_tmp_bytes",
    }
}

impl FilesystemPolicy {
    fn validate(&self) -> Result<(), PolicyError> {
        if self.root_path.as_deref().is_some_and(|path| path != Path::new(WORKSPACE)) {
            return fail("filesystem.root_path", format!("is always {WORKSPACE}"));
        }
        let written = self.read_write_paths.as_ref().is_some_and(|paths| !paths.is_empty());
        if written && self.mode == Some(FilesystemMode::Static) {
            return fail(READ_WRITE, "nothing is written in mode static; use overlay_paths");
        }
        if self.max_total_bytes.is_some() {
            return fail("filesystem.max_total_bytes", "is not enforced yet");
        }
        for (field, paths) in self.lists() {
            check_entries(field, paths.len(), MAX_ENTRIES)?;
            for (at, path) in paths.iter().enumerate() {
                check_place(&format!("{field}[{at}]"), path)?;
            }
        }
        let overlays = self.overlay_paths.as_deref().unwrap_or_default();
        if let Some(at) = overlays.iter().position(|path| overlay_name(path).len() > MAX_NAME) {
            return fail(format!("{OVERLAY}[{at}]"), "is too long for an overlay");
        }
        self.check_conflicts()
    }

    fn lists(&self) -> [(&'static str, &[PathBuf]); 4] {
        [
            (READ_ONLY, self.read_only_paths.as_deref().unwrap_or_default()),
            (READ_WRITE, self.read_write_paths.as_deref().unwrap_or_default()),
            (OVERLAY, self.overlay_paths.as_deref().unwrap_or_default()),
            (DENIED, &self.denied_paths),
        ]
    }

    fn check_conflicts(&self) -> Result<(), PolicyError> {
        for (field, paths) in self.lists().into_iter().take(3) {
            let denied = |path: &&PathBuf| self.denied_paths.iter().any(|no| path.starts_with(no));
            if let Some(at) = paths.iter().position(|path| denied(&path)) {
                return fail(format!("{field}[{at}]"), "lies in a denied path");
            }
        }
        match self.below_writable() {
            Some((field, at)) => {
                fail(format!("{field}[{at}]"), "lies in a writable path: it could be replaced")
            }
            None => Ok(()),
        }
    }

    /// The first path that lies in one the command can write to. Its name could be made to lead elsewhere, so
    /// nothing can be mounted there.
    pub(crate) fn below_writable(&self) -> Option<(&'static str, usize)> {
        let [_, written, overlaid, _] = self.lists();
        let inside = |field, path: &PathBuf| {
            let within = |own, paths: &[PathBuf]| {
                paths.iter().any(|upper| path.starts_with(upper) && (field != own || path != upper))
            };
            within(READ_WRITE, written.1) || within(OVERLAY, overlaid.1)
        };
        self.lists().into_iter().find_map(|(field, paths)| {
            paths.iter().position(|path| inside(field, path)).map(|at| (field, at))
        })
    }
}

impl ContainerPolicy {
    fn validate(&self) -> Result<(), PolicyError> {
        let is_name = |name: &String| {
            (1..=63).contains(&name.len())
                && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
        };
        match &self.profile {
            Some(name) if !is_name(name) => fail("container.profile", "is no name: [a-z0-9-]{1,63}"),
            _ => Ok(()),
        }
    }
}

impl ResourcePolicy {
    fn validate(&self) -> Result<(), PolicyError> {
        let rates = [
            ("resources.max_read_bytes_per_second", self.max_read_bytes_per_second),
            ("resources.max_write_bytes_per_second", self.max_write_bytes_per_second),
            ("resources.max_reads_per_second", self.max_reads_per_second),
            ("resources.max_writes_per_second", self.max_writes_per_second),
        ];
        if let Some((field, _)) = rates.into_iter().find(|(_, rate)| *rate == Some(0)) {
            return fail(field, "must be more than zero");
        }
        if self.release_interval_ms.is_some_and(|interval| !(1..=MAX_INTERVAL_MS).contains(&interval)) {
            return fail("resources.release_interval_ms", format!("must be from 1 to {MAX_INTERVAL_MS}"));
        }
        let Some(cpus) = &self.cpus else { return Ok(()) };
        check_entries("resources.cpus", cpus.len(), MAX_ENTRIES)?;
        match cpus.iter().position(|cpu| *cpu > MAX_CPU) {
            Some(at) => fail(format!("resources.cpus[{at}]"), format!("is above {MAX_CPU}")),
            None if cpus.is_empty() => fail("resources.cpus", "names none; leave it out to allow all"),
            None => Ok(()),
        }
    }
}

impl ProcessPolicy {
    fn validate(&self) -> Result<(), PolicyError> {
        const FIELD: &str = "process.allowed_executables";
        let Some(programs) = &self.allowed_executables else { return Ok(()) };
        check_entries(FIELD, programs.len(), MAX_ENTRIES)?;
        if programs.is_empty() {
            return fail(FIELD, "names none; leave it out to allow all");
        }
        for (at, program) in programs.iter().enumerate() {
            check_path(&format!("{FIELD}[{at}]"), program)?;
        }
        Ok(())
    }
}

impl NetworkPolicy {
    fn validate(&self) -> Result<(), PolicyError> {
        if self.mode != Some(NetworkMode::Proxy) {
            let set = [
                ("network.allowed_hosts", self.allowed_hosts.is_some()),
                ("network.allowed_ports", self.allowed_ports.is_some()),
                ("network.max_connections", self.max_connections.is_some()),
            ];
            if let Some((field, _)) = set.into_iter().find(|(_, set)| *set) {
                return fail(field, "needs network.mode proxy");
            }
        }
        self.validate_lists()
    }

    fn validate_lists(&self) -> Result<(), PolicyError> {
        let hosts = self.allowed_hosts.as_deref().unwrap_or_default();
        check_entries("network.allowed_hosts", hosts.len(), MAX_ENTRIES)?;
        if let Some(at) = hosts.iter().position(|host| !is_host(host)) {
            return fail(format!("network.allowed_hosts[{at}]"), "is no host name, nor `*.` before one");
        }
        let ports = self.allowed_ports.as_deref().unwrap_or_default();
        check_entries("network.allowed_ports", ports.len(), MAX_ENTRIES)?;
        match ports.iter().position(|port| *port == 0) {
            Some(at) => fail(format!("network.allowed_ports[{at}]"), "must be more than zero"),
            None if self.max_connections == Some(0) => {
                fail("network.max_connections", "must be more than zero")
            }
            None => Ok(()),
        }
    }
}

impl SyscallPolicy {
    fn validate(&self, debug: bool) -> Result<(), PolicyError> {
        check_entries("syscalls.names", self.names.len(), MAX_ENTRIES)?;
        if self.mode.is_none() && !self.names.is_empty() {
            return fail("syscalls.names", "needs syscalls.mode: allow or deny");
        }
        if self.violation_limit.is_some_and(|limit| limit == 0 || limit > MAX_VIOLATIONS) {
            return fail("syscalls.violation_limit", format!("must be from 1 to {MAX_VIOLATIONS}"));
        }
        for (at, name) in self.names.iter().enumerate() {
            self.check_name(&format!("syscalls.names[{at}]"), name, debug)?;
        }
        Ok(())
    }

    fn check_name(&self, field: &str, name: &str, debug: bool) -> Result<(), PolicyError> {
        if !syscalls::is_known(name) {
            return fail(field, "is no system call");
        }
        if self.mode == Some(SyscallMode::Deny) || syscalls::is_allowed(name, debug) {
            return Ok(());
        }
        if syscalls::is_allowed(name, true) {
            return fail(field, format!("{name} needs process.debug"));
        }
        fail(field, format!("{name} is never allowed"))
    }
}

impl EnvironmentPolicy {
    fn validate(&self) -> Result<(), PolicyError> {
        if self.mode == Some(EnvironmentMode::Inherit) {
            return fail("environment.mode", "the worker's own environment is never passed on");
        }
        let names = self.names.as_deref().unwrap_or_default();
        check_entries("environment.names", names.len(), MAX_ENTRIES)?;
        if self.names.is_some() && self.mode != Some(EnvironmentMode::Explicit) {
            return fail("environment.names", "needs environment.mode explicit");
        }
        let bad = |name: &String| name.is_empty() || name.len() > MAX_TEXT || name.contains(['=', '\0']);
        match names.iter().position(bad) {
            Some(at) => fail(format!("environment.names[{at}]"), "is no name of a variable"),
            None => Ok(()),
        }
    }

    /// Whether a run may set this variable.
    #[must_use]
    pub fn allows(&self, name: &str) -> bool {
        self.mode != Some(EnvironmentMode::Explicit)
            || self.names.iter().flatten().any(|allowed| allowed == name)
    }
}

impl CommandPolicy {
    fn validate(&self) -> Result<(), PolicyError> {
        let allowed = self.allowed_patterns.as_deref();
        if allowed.is_some_and(<[_]>::is_empty) {
            return fail("command.allowed_patterns", "names none; leave it out to allow all");
        }
        if self.max_length.is_some_and(|length| length == 0 || length > MAX_COMMAND) {
            return fail("command.max_length", format!("must be from 1 to {MAX_COMMAND}"));
        }
        check_patterns("command.allowed_patterns", allowed.unwrap_or_default())?;
        check_patterns("command.blocked_patterns", &self.blocked_patterns)
    }

    /// Refuses a command early: its program and arguments, joined by spaces. Advice to the caller,
    /// not a boundary: what a command does is held by the sandbox alone.
    ///
    /// # Errors
    /// Names the rule that the command breaks.
    pub fn check(&self, argv: &[String]) -> Result<(), PolicyError> {
        let command = argv.join(" ");
        if self.max_length.is_some_and(|most| command.len() as u64 > most) {
            return fail("command.max_length", "the command is longer");
        }
        let matches = |field, patterns: &[String]| compile(field, patterns).map(|set| set.is_match(&command));
        // Nothing to compile is the usual case, for every run.
        if !self.blocked_patterns.is_empty() && matches("command.blocked_patterns", &self.blocked_patterns)? {
            return fail("command.blocked_patterns", "the command matches one of them");
        }
        match &self.allowed_patterns {
            Some(patterns) if !matches("command.allowed_patterns", patterns)? => {
                fail("command.allowed_patterns", "the command matches none of them")
            }
            _ => Ok(()),
        }
    }
}

fn check_patterns(field: &'static str, patterns: &[String]) -> Result<(), PolicyError> {
    check_entries(field, patterns.len(), MAX_PATTERNS)?;
    for (at, pattern) in patterns.iter().enumerate() {
        let field = format!("{field}[{at}]");
        if pattern.len() > MAX_TEXT {
            return fail(field, format!("is longer than {MAX_TEXT} bytes"));
        }
        if pattern.is_empty() || pattern.contains('\0') {
            return fail(field, "is empty or contains a null byte, which no command does");
        }
        compile(&field, std::slice::from_ref(pattern))?;
    }
    compile(field, patterns).map(|_| ())
}

fn compile(field: &str, patterns: &[String]) -> Result<RegexSet, PolicyError> {
    let set = RegexSetBuilder::new(patterns).size_limit(MAX_COMPILED).build();
    set.or_else(|error| fail(field, error.to_string()))
}

fn check_entries(field: &str, entries: usize, most: usize) -> Result<(), PolicyError> {
    if entries > most {
        return fail(field, format!("has more than {most} entries"));
    }
    Ok(())
}

/// Absolute and in its shortest form, so that comparing paths is comparing their parts.
fn check_path(field: &str, path: &Path) -> Result<(), PolicyError> {
    let text = path.as_os_str().as_encoded_bytes();
    if text.len() > MAX_TEXT {
        return fail(field, format!("is longer than {MAX_TEXT} bytes"));
    }
    if !path.is_absolute() {
        return fail(field, "is not absolute");
    }
    if text.contains(&0) || path.components().any(|part| part == Component::ParentDir) {
        return fail(field, "must not contain `..` or a null byte");
    }
    let shortest: PathBuf = path.components().collect();
    if shortest.as_os_str() != path.as_os_str() {
        return fail(field, format!("is not in its shortest form: {}", shortest.display()));
    }
    Ok(())
}

/// A path that something can be mounted over.
fn check_place(field: &str, path: &Path) -> Result<(), PolicyError> {
    check_path(field, path)?;
    match OWN.iter().find(|own| path.starts_with(own) || Path::new(own).starts_with(path)) {
        Some(own) => fail(field, format!("touches {own}, which is the sandbox's own")),
        None => Ok(()),
    }
}

/// A host name in lower case, or `*.` before one for all below it.
fn is_host(text: &str) -> bool {
    let name = text.strip_prefix("*.").unwrap_or(text);
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'_')
    };
    name.len() <= 253 && name.split('.').all(label)
}

/// Whether every host that `lower` names is named by `upper` too.
pub(crate) fn host_covers(upper: &str, lower: &str) -> bool {
    match upper.strip_prefix('*') {
        // `*.example.com` covers `a.example.com` and `*.a.example.com`, not `example.com`.
        Some(suffix) => {
            upper == lower
                || lower.strip_prefix('*').unwrap_or(lower).len() > suffix.len() && lower.ends_with(suffix)
        }
        None => upper == lower,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn field(yaml: &str) -> String {
        let policy = Policy::parse(yaml, crate::Format::Yaml).unwrap();
        policy.validate(&Ceilings::default()).unwrap_err().field
    }

    #[test]
    fn what_cannot_be_meant_is_refused_with_its_field() {
        for (yaml, expected) in [
            ("filesystem: {denied_paths: [/opt/a, /opt/b, opt/c]}", "filesystem.denied_paths[2]"),
            ("filesystem: {read_only_paths: [/opt/../etc]}", "filesystem.read_only_paths[0]"),
            ("filesystem: {read_only_paths: [/opt//a]}", "filesystem.read_only_paths[0]"),
            ("filesystem: {read_only_paths: [/]}", "filesystem.read_only_paths[0]"),
            ("filesystem: {read_write_paths: [/proc/sys]}", "filesystem.read_write_paths[0]"),
            ("filesystem: {denied_paths: [/workspace/x]}", "filesystem.denied_paths[0]"),
            (
                "filesystem: {read_only_paths: [/opt/a], denied_paths: [/opt]}",
                "filesystem.read_only_paths[0]",
            ),
            ("filesystem: {read_write_paths: [/opt], denied_paths: [/opt/a]}", "filesystem.denied_paths[0]"),
            ("filesystem: {read_write_paths: [/opt, /opt/a]}", "filesystem.read_write_paths[1]"),
            ("filesystem: {root_path: /home}", "filesystem.root_path"),
            ("filesystem: {max_total_bytes: 1}", "filesystem.max_total_bytes"),
            ("filesystem: {max_file_bytes: 0}", "filesystem.max_file_bytes"),
            ("process: {allowed_executables: [/bin/sh, git]}", "process.allowed_executables[1]"),
            ("process: {allowed_executables: []}", "process.allowed_executables"),
            ("process: {max_processes: 501}", "process.max_processes"),
            ("resources: {max_threads: 501}", "resources.max_threads"),
            ("resources: {max_memory_bytes: 99999999999}", "resources.max_memory_bytes"),
            ("resources: {max_cpu_ms: 600001}", "resources.max_cpu_ms"),
            ("network: {allowed_hosts: [a.example]}", "network.allowed_hosts"),
            ("network: {mode: none, allowed_ports: [80]}", "network.allowed_ports"),
            ("network: {mode: proxy, allowed_hosts: [a, 'B']}", "network.allowed_hosts[1]"),
            ("syscalls: {names: [read]}", "syscalls.names"),
            ("syscalls: {mode: allow, names: [read, raed]}", "syscalls.names[1]"),
            ("syscalls: {mode: allow, names: [mount]}", "syscalls.names[0]"),
            ("syscalls: {mode: allow, names: [ptrace]}", "syscalls.names[0]"),
            ("syscalls: {violation_limit: 0}", "syscalls.violation_limit"),
            ("environment: {mode: inherit}", "environment.mode"),
            ("environment: {names: [A]}", "environment.names"),
            ("environment: {mode: explicit, names: ['A=B']}", "environment.names[0]"),
            ("command: {allowed_patterns: ['(']}", "command.allowed_patterns[0]"),
            ("command: {blocked_patterns: ['a', '(a{1000}){1000}']}", "command.blocked_patterns[1]"),
            ("command: {max_length: 0}", "command.max_length"),
        ] {
            assert_eq!(field(yaml), expected, "{yaml}");
        }
    }

    #[test]
    fn huge_lists_and_texts_are_refused() {
        let many = vec!["/opt/a"; MAX_ENTRIES + 1].join(",");
        assert_eq!(field(&format!("filesystem: {{denied_paths: [{many}]}}")), "filesystem.denied_paths");
        let long = format!("/{}", "a".repeat(MAX_TEXT));
        assert_eq!(field(&format!("filesystem: {{denied_paths: [{long}]}}")), "filesystem.denied_paths[0]");
    }

    #[test]
    fn a_denied_path_in_a_readable_one_can_be_meant() {
        let yaml = "filesystem: {read_only_paths: [/opt], denied_paths: [/opt/a, /usr/share/doc]}";
        let policy = Policy::parse(yaml, crate::Format::Yaml).unwrap();
        assert_eq!(policy.validate(&Ceilings::default()), Ok(()));
    }

    #[test]
    fn a_level_goes_with_the_modes_that_give_it() {
        let of = |level| Policy { isolation_level: level, ..Policy::default() };
        assert!(of(Some(IsolationLevel::Full)).check_mode(Mode::Logical).is_err());
        assert!(of(Some(IsolationLevel::Process)).check_mode(Mode::Logical).is_err());
        assert!(of(Some(IsolationLevel::None)).check_mode(Mode::Bwrap).is_err());
        assert!(of(Some(IsolationLevel::None)).check_mode(Mode::Logical).is_ok());
        assert!(of(Some(IsolationLevel::Full)).check_mode(Mode::Nsjail).is_ok());
        assert!(of(None).check_mode(Mode::Logical).is_ok());
    }

    #[test]
    fn paths_that_the_policy_above_does_not_open_are_refused() {
        let mut asked = Policy::default();
        assert_eq!(asked.check_within(&Policy::installation()), Ok(()));
        asked.filesystem.read_only_paths = Some(vec!["/opt/a".into(), "/srv".into()]);
        let mut upper = Policy::installation();
        upper.filesystem.read_only_paths = Some(vec!["/opt".into()]);
        let error = asked.check_within(&upper).unwrap_err();
        assert_eq!(error.field, "filesystem.read_only_paths[1]");
    }

    #[test]
    fn a_wildcard_covers_what_is_below_it_and_not_itself() {
        assert!(host_covers("*.example.com", "a.b.example.com"));
        assert!(host_covers("*.example.com", "*.a.example.com"));
        assert!(host_covers("*.example.com", "*.example.com"));
        assert!(!host_covers("*.example.com", "example.com"));
        assert!(!host_covers("*.a.example.com", "*.example.com"));
        assert!(!host_covers("example.com", "a.example.com"));
    }

    #[test]
    fn a_command_is_refused_by_the_rule_it_breaks() {
        let rules = CommandPolicy {
            allowed_patterns: Some(vec!["^cargo (build|test)( |$)".into()]),
            blocked_patterns: vec!["--release".into()],
            max_length: Some(30),
        };
        let check = |command: &str| {
            let argv: Vec<_> = command.split(' ').map(str::to_owned).collect();
            rules.check(&argv).map_err(|error| error.field)
        };
        assert_eq!(check("cargo test"), Ok(()));
        assert_eq!(check("cargo run"), Err("command.allowed_patterns".into()));
        assert_eq!(check("cargo test --release"), Err("command.blocked_patterns".into()));
        assert_eq!(check(&format!("cargo test {}", "a".repeat(30))), Err("command.max_length".into()));
    }
}
