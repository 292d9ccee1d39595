//! Validation of policies: every path is absolute, no field contradicts another. An error names the
//! field by its path in the document.

mod command;
mod error;
mod field;
mod filesystem;
mod layout;
mod network;
mod process;

use std::collections::HashSet;

use codelia_types::{Mode, NetworkMode};

pub use self::error::PolicyError;
pub(crate) use self::{
    command::CommandRules,
    error::{fail, fail_at},
};
use self::{
    filesystem::{OVERLAY, READ_ONLY, READ_WRITE, VOLUMES},
    layout::{DIRECTORIES, EXECUTABLE_PATHS},
};
use crate::{Ceilings, IsolationLevel, Policy, hosts};

impl Policy {
    /// Checks everything that does not depend on the mode or on the policies above.
    ///
    /// # Errors
    /// Names the first field that is not valid.
    pub fn validate(&self, ceilings: &Ceilings) -> Result<(), PolicyError> {
        self.check_size()?;
        if !self.delegate.is_empty() {
            return fail(
                "delegate",
                "only the policy of an organisation or a project delegates; remove it",
            );
        }
        self.filesystem.validate()?;
        self.layout.validate()?;
        self.container.validate()?;
        self.process.validate()?;
        if self.network.mode == Some(NetworkMode::None)
            && let Some(field) = self.proxy_field()
        {
            return fail(field.path, "needs network.mode: proxy");
        }
        self.network.validate()?;
        self.check_caps(ceilings)?;
        self.resources.validate()?;
        self.syscalls.validate(self.process.debug == Some(true))?;
        self.environment.validate()?;
        self.command.validate()
    }

    /// Checks that the mode provides the isolation level.
    ///
    /// # Errors
    /// Names `isolation_level`.
    pub fn check_mode(&self, mode: Mode) -> Result<(), PolicyError> {
        match (self.isolation_level, mode) {
            (Some(IsolationLevel::Process | IsolationLevel::Full), Mode::Logical) => {
                fail("isolation_level", "mode logical provides LEVEL_0 only; use an isolating mode")
            }
            (
                Some(IsolationLevel::None),
                Mode::Bwrap | Mode::Nsjail | Mode::Native | Mode::Container,
            ) => fail(
                "isolation_level",
                format!("LEVEL_0 is only valid in mode logical, not in {mode}"),
            ),
            _ => Ok(()),
        }
    }

    /// Checks that the policy requests nothing that the policy above it does not allow: no other
    /// host path, image, network mode, host or credential. Of a pattern or set of hosts, a part may
    /// be left.
    ///
    /// # Errors
    /// Names the value that is not allowed.
    pub fn check_within(&self, upper: &Self) -> Result<(), PolicyError> {
        if let (Some(requested), Some(above)) = (&self.container.profile, &upper.container.profile)
            && requested != above
        {
            return fail(
                "container.profile",
                format!("must be {above:?}, which the policy above sets"),
            );
        }
        let merged = upper.merge(self);
        let granted = merged.filesystem.mounted_volumes();
        let volumes = self.filesystem.mounted_volumes();
        fail_at(
            VOLUMES,
            volumes.iter().position(|volume| !granted.contains(volume)),
            "is not allowed by the policy above; name volume, path and mode as it does, or leave it out",
        )?;
        let pairs = [
            (READ_ONLY, &self.filesystem.read_only_paths, merged.filesystem.read_only_paths),
            (READ_WRITE, &self.filesystem.read_write_paths, merged.filesystem.read_write_paths),
            (OVERLAY, &self.filesystem.overlay_paths, merged.filesystem.overlay_paths),
            (EXECUTABLE_PATHS, &self.layout.executable_paths, merged.layout.executable_paths),
        ];
        for (field, requested, granted) in pairs {
            let granted: HashSet<_> = granted.into_iter().flatten().collect();
            let refused = requested.iter().flatten().position(|path| !granted.contains(path));
            let message = "is not allowed by the policy above; ask an operator to open it";
            fail_at(field, refused, message)?;
        }
        if let Some(at) = self.layout.first_outside(&upper.layout) {
            return fail(
                format!("{DIRECTORIES}[{at}].path"),
                "is read-only in the policy above; name one of its layout.directories",
            );
        }
        self.check_network_within(upper)
    }

    /// Checks that this policy of a tenant gives nothing that the policy of the installation and
    /// the defaults do not, so that it can only restrict the tenant. `network` is the
    /// installation's default network.
    ///
    /// # Errors
    /// Names the value that would give more.
    pub fn check_tenant(
        &self,
        installation: &Self,
        network: Option<NetworkMode>,
    ) -> Result<(), PolicyError> {
        self.check_within(installation)?;
        let most = installation.network.mode.max(network).unwrap_or(NetworkMode::None);
        if self.network.mode.is_some_and(|mode| mode > most) {
            return fail(
                "network.mode",
                format!(
                    "must be at most {most}, as in the policy of the installation; leave it out"
                ),
            );
        }
        let above = installation.clone().with_defaults();
        if self.process.debug > above.process.debug {
            return fail("process.debug", "must be true in the policy of the installation first");
        }
        match (self.syscalls.violation_limit, above.syscalls.violation_limit) {
            (Some(limit), Some(most)) if limit > most => fail(
                "syscalls.violation_limit",
                format!("must be at most {most}, as in the policy of the installation"),
            ),
            _ => Ok(()),
        }
    }

    fn check_network_within(&self, upper: &Self) -> Result<(), PolicyError> {
        if let (Some(requested), Some(above)) = (self.network.mode, upper.network.mode)
            && requested > above
        {
            return fail(
                "network.mode",
                format!(
                    "must be at most {above}, which the policy above sets; ask an operator to open it"
                ),
            );
        }
        if let Some(above) = upper.network.permitted_hosts() {
            let [allowed, ask, _] = self.network.host_lists();
            for (field, list) in [allowed, ask] {
                let message = "is not allowed by the policy above; ask an operator to allow it";
                fail_at(field, hosts::first_outside(list, &above), message)?;
            }
        }
        let credentials = self.network.credentials.as_deref().unwrap_or_default();
        let above = upper.network.credentials.as_deref();
        let is_refused = |name: &String| above.is_some_and(|above| !above.contains(name));
        let refused = credentials.iter().position(is_refused);
        let message = "is not allowed by the policy above; ask an operator to list it";
        fail_at("network.credentials", refused, message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn field(yaml: &str) -> String {
        let policy = Policy::parse(yaml, crate::Format::Yaml).unwrap();
        policy.validate(&Ceilings::default()).unwrap_err().field
    }

    /// Policies that are not valid, each with the field that is refused.
    const INVALID: &[(&str, &str)] = &[
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
        (
            "filesystem: {read_write_paths: [/opt], denied_paths: [/opt/a]}",
            "filesystem.denied_paths[0]",
        ),
        ("filesystem: {read_write_paths: [/opt, /opt/a]}", "filesystem.read_write_paths[1]"),
        ("filesystem: {volumes: [{name: A, path: /cache}]}", "filesystem.volumes[0].name"),
        ("filesystem: {volumes: [{name: a, path: cache}]}", "filesystem.volumes[0].path"),
        ("filesystem: {volumes: [{name: a, path: /cache/../etc}]}", "filesystem.volumes[0].path"),
        ("filesystem: {volumes: [{name: a, path: /workspace/a}]}", "filesystem.volumes[0].path"),
        ("filesystem: {volumes: [{name: a, path: /usr/local}]}", "filesystem.volumes[0].path"),
        ("filesystem: {volumes: [{name: a, path: /}]}", "filesystem.volumes[0].path"),
        (
            "filesystem: {volumes: [{name: a, path: /c}, {name: a, path: /d}]}",
            "filesystem.volumes[1]",
        ),
        (
            "filesystem: {volumes: [{name: a, path: /c}, {name: b, path: /c/d}]}",
            "filesystem.volumes[1]",
        ),
        (
            "filesystem: {volumes: [{name: a, path: /c}], denied_paths: [/c/d]}",
            "filesystem.volumes[0]",
        ),
        ("filesystem: {max_total_bytes: 0}", "filesystem.max_total_bytes"),
        ("filesystem: {max_inodes: 10000001}", "filesystem.max_inodes"),
        ("filesystem: {max_file_bytes: 0}", "filesystem.max_file_bytes"),
        ("process: {allowed_executables: [/bin/sh, git]}", "process.allowed_executables[1]"),
        ("process: {allowed_executables: []}", "process.allowed_executables"),
        ("process: {max_processes: 501}", "process.max_processes"),
        ("resources: {max_threads: 501}", "resources.max_threads"),
        ("resources: {max_memory_bytes: 99999999999}", "resources.max_memory_bytes"),
        ("resources: {max_cpu_time: 86401s}", "resources.max_cpu_time"),
        ("network: {mode: none, allowed_hosts: [a.example]}", "network.allowed_hosts"),
        ("network: {mode: none, allowed_ports: [80]}", "network.allowed_ports"),
        ("network: {mode: proxy, allowed_hosts: [a, 'B']}", "network.allowed_hosts[1]"),
        ("network: {allowed_hosts: ['set:registries', 'set:nothing']}", "network.allowed_hosts[1]"),
        ("network: {ask_hosts: ['*', 'a.*']}", "network.ask_hosts[1]"),
        ("network: {blocked_hosts: ['127.1']}", "network.blocked_hosts[0]"),
        ("network: {allowed_ports: [443, 0]}", "network.allowed_ports[1]"),
        ("network: {max_connections: 4097}", "network.max_connections"),
        ("network: {max_connections_per_second: 0}", "network.max_connections_per_second"),
        ("network: {max_sent_bytes: 0}", "network.max_sent_bytes"),
        ("network: {max_received_bytes: 9223372036854775808}", "network.max_received_bytes"),
        ("network: {idle_timeout: 2h}", "network.idle_timeout"),
        ("network: {credentials: [ok, 'No']}", "network.credentials[1]"),
        ("network: {executables: [git]}", "network.executables[0]"),
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
    ];

    #[test]
    fn invalid_policy_is_refused_by_field() {
        for (yaml, expected) in INVALID {
            assert_eq!(field(yaml), *expected, "{yaml}");
        }
    }

    #[test]
    fn denied_path_below_readable_path_is_valid() {
        let yaml = "filesystem: {read_only_paths: [/opt], denied_paths: [/opt/a, /usr/share/doc]}";
        let policy = Policy::parse(yaml, crate::Format::Yaml).unwrap();
        assert_eq!(policy.validate(&Ceilings::default()), Ok(()));
    }

    #[test]
    fn isolation_level_must_match_mode() {
        let of = |level| Policy { isolation_level: level, ..Policy::default() };
        assert!(of(Some(IsolationLevel::Full)).check_mode(Mode::Logical).is_err());
        assert!(of(Some(IsolationLevel::Process)).check_mode(Mode::Logical).is_err());
        assert!(of(Some(IsolationLevel::None)).check_mode(Mode::Bwrap).is_err());
        assert!(of(Some(IsolationLevel::None)).check_mode(Mode::Logical).is_ok());
        assert!(of(Some(IsolationLevel::Full)).check_mode(Mode::Nsjail).is_ok());
        assert!(of(None).check_mode(Mode::Logical).is_ok());
    }

    #[test]
    fn path_not_opened_above_is_refused() {
        let mut requested = Policy::default();
        assert_eq!(requested.check_within(&Policy::installation()), Ok(()));
        requested.filesystem.read_only_paths = Some(vec!["/opt/a".into(), "/srv".into()]);
        let mut upper = Policy::installation();
        upper.filesystem.read_only_paths = Some(vec!["/opt".into()]);
        let error = requested.check_within(&upper).unwrap_err();
        assert_eq!(error.field, "filesystem.read_only_paths[1]");
    }

    #[test]
    fn network_not_allowed_above_is_refused() {
        let policy =
            |yaml: &str| Policy::parse(&format!("network: {yaml}"), crate::Format::Yaml).unwrap();
        let upper = policy(
            "{mode: proxy, allowed_hosts: ['*.example.com'], ask_hosts: [a.org], credentials: [npm]}",
        );
        for (lower, expected) in [
            (
                "{mode: proxy, allowed_hosts: [x.example.com, '*.com', a.org], credentials: [npm]}",
                None,
            ),
            ("{mode: none}", None),
            ("{mode: host}", Some("network.mode")),
            ("{allowed_hosts: [x.example.com, example.com]}", Some("network.allowed_hosts[1]")),
            ("{ask_hosts: ['set:registries']}", Some("network.ask_hosts[0]")),
            ("{credentials: [npm, other]}", Some("network.credentials[1]")),
        ] {
            let error = policy(lower).check_within(&upper).err().map(|error| error.field);
            assert_eq!(error.as_deref(), expected, "{lower}");
            assert_eq!(policy(lower).check_within(&Policy::default()), Ok(()), "{lower}");
        }
    }

    #[test]
    fn tenant_cannot_have_more_than_installation() {
        let parse = |text: &str| Policy::parse(text, crate::Format::Yaml).unwrap();
        let check = |tenant: &str, installation: &str, default| {
            let installation = parse(installation).as_installation();
            parse(tenant).check_tenant(&installation, default).map_err(|error| error.field)
        };
        for (tenant, installation, field) in [
            ("network: {mode: proxy}", "", "network.mode"),
            ("network: {mode: host}", "network: {mode: proxy}", "network.mode"),
            (
                "network: {allowed_hosts: [a.example, evil.test]}",
                "network: {allowed_hosts: ['*.example']}",
                "network.allowed_hosts[1]",
            ),
            ("network: {credentials: [npm]}", "", "network.credentials[0]"),
            ("filesystem: {read_only_paths: [/opt]}", "", "filesystem.read_only_paths[0]"),
            ("process: {debug: true}", "", "process.debug"),
            ("syscalls: {violation_limit: 51}", "", "syscalls.violation_limit"),
        ] {
            assert_eq!(check(tenant, installation, None), Err(field.to_owned()), "{tenant}");
        }
        for (tenant, installation) in [
            ("network: {mode: proxy}", "network: {mode: host}"),
            ("network: {mode: none}", ""),
            ("network: {allowed_hosts: [a.example]}", "network: {allowed_hosts: ['*.example']}"),
            ("process: {debug: true}", "process: {debug: true}"),
            ("syscalls: {violation_limit: 1}", ""),
        ] {
            assert_eq!(check(tenant, installation, None), Ok(()), "{tenant}");
        }
        assert_eq!(check("network: {mode: proxy}", "", Some(NetworkMode::Proxy)), Ok(()));
    }
}
