//! Where each field of an effective policy comes from.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{Limit, Policy};

/// Who decided a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// Nobody said anything else.
    Default,
    /// The session's policy, which has the installation's in it.
    Session,
    /// The run's policy, or what it left of the session's.
    Run,
}

/// One field of an effective policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExplainedField {
    /// Its path in the document.
    pub field: String,
    /// What holds, as JSON; for a field that nobody set, in words.
    pub value: String,
    /// Who decided it.
    pub source: Source,
}

/// Every field, and what holds if nobody sets it.
const FIELDS: [(&str, &str); 41] = [
    ("isolation_level", "what the mode gives"),
    ("filesystem.mode", "what is opened for writing is written"),
    ("filesystem.root_path", "/workspace"),
    ("filesystem.read_only_paths", "none"),
    ("filesystem.read_write_paths", "none"),
    ("filesystem.overlay_paths", "none"),
    ("filesystem.denied_paths", "none"),
    ("filesystem.max_file_bytes", Limit::FileBytes.field()),
    ("filesystem.max_total_bytes", "no limit"),
    ("container.profile", "the worker's image"),
    ("process.max_processes", Limit::Pids.field()),
    ("process.allow_fork", "true"),
    ("process.allow_exec", "true"),
    ("process.allowed_executables", "any it can see"),
    ("process.debug", "false"),
    ("network.mode", "none; in mode logical the host's"),
    ("network.allowed_hosts", "none"),
    ("network.allowed_ports", "none"),
    ("network.max_connections", "none"),
    ("resources.max_cpu_ms", Limit::CpuTime.field()),
    ("resources.max_cpu_millis", Limit::CpuMillis.field()),
    ("resources.max_wall_ms", Limit::Timeout.field()),
    ("resources.max_memory_bytes", Limit::MemoryBytes.field()),
    ("resources.max_open_files", Limit::OpenFiles.field()),
    ("resources.max_threads", Limit::Pids.field()),
    ("resources.max_output_bytes", Limit::OutputBytes.field()),
    ("resources.max_tmp_bytes", Limit::TmpBytes.field()),
    ("resources.max_read_bytes_per_second", "no limit"),
    ("resources.max_write_bytes_per_second", "no limit"),
    ("resources.max_reads_per_second", "no limit"),
    ("resources.max_writes_per_second", "no limit"),
    ("resources.cpus", "any"),
    ("resources.release_interval_ms", "at once"),
    ("syscalls.mode", "the default list"),
    ("syscalls.names", "the default list"),
    ("syscalls.violation_limit", "50"),
    ("environment.mode", "clean"),
    ("environment.names", "any"),
    ("command.allowed_patterns", "any"),
    ("command.blocked_patterns", "none"),
    ("command.max_length", "any"),
];

impl Policy {
    /// Every field of this policy with `run` merged under it, and who decided it.
    #[must_use]
    pub fn explain(&self, run: &Self) -> Vec<ExplainedField> {
        let (session, merged) = (self.stated(), self.merge(run).stated());
        let usual = Self::default().with_defaults().stated();
        let field = |(field, default): (&str, &str)| match merged.get(field) {
            None => ExplainedField { field: field.into(), value: default.into(), source: Source::Default },
            Some(value) => {
                let source = match value {
                    value if usual.get(field) == Some(value) => Source::Default,
                    value if session.get(field) == Some(value) => Source::Session,
                    _ => Source::Run,
                };
                ExplainedField { field: field.into(), value: value.to_string(), source }
            }
        };
        FIELDS.into_iter().map(field).collect()
    }

    /// What this policy states, by path, with lists in order.
    fn stated(&self) -> BTreeMap<String, Value> {
        let mut stated = BTreeMap::new();
        // A policy is made of maps with text keys: it always has a JSON form.
        let Ok(Value::Object(groups)) = serde_json::to_value(self.merge(&Self::default())) else {
            return stated;
        };
        for (group, value) in groups {
            match value {
                Value::Object(fields) => {
                    stated.extend(fields.into_iter().map(|(name, value)| (format!("{group}.{name}"), value)));
                }
                value => {
                    stated.insert(group, value);
                }
            }
        }
        stated
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Default => "default",
            Self::Session => "session",
            Self::Run => "run",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_field_has_its_value_and_who_decided_it() {
        let (mut session, mut run) = (Policy::default(), Policy::default());
        session.process.allow_fork = Some(false);
        session.filesystem.denied_paths = vec!["/opt/a".into()];
        run.process.allow_fork = Some(true);
        run.filesystem.denied_paths = vec!["/opt/b".into()];
        let explained = session.explain(&run);
        let of = |name: &str| {
            let found = explained.iter().find(|one| one.field == name).unwrap();
            (found.value.as_str(), found.source)
        };
        assert_eq!(of("process.allow_fork"), ("false", Source::Session));
        assert_eq!(of("filesystem.denied_paths"), (r#"["/opt/a","/opt/b"]"#, Source::Run));
        assert_eq!(of("process.debug"), ("false", Source::Default));
    }
}
