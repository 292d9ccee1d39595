//! Explains an effective policy: the value and the source of each field.

use std::collections::BTreeMap;

use codelia_types::words;
use serde_json::Value;

use crate::{FIELDS, Field, Policy};

words! {
    /// The policy that a value of a field comes from.
    pub enum Source {
        /// The default. No policy sets the field.
        Default = "default",
        /// The policy of the tenant, or the one above or below after the tenant's tightened it.
        Tenant = "tenant",
        /// The policy of the session's project.
        Project = "project",
        /// The policy of the user that created the session.
        User = "user",
        /// The session's policy, which includes the installation's.
        Session = "session",
        /// The run's policy, or the session's after the run's tightened it.
        Run = "run",
    }
}

/// One field of an effective policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExplainedField {
    /// The path of the field in the document.
    pub field: String,
    /// The effective value as JSON. For a default, a description of it.
    pub value: String,
    /// Where the value comes from.
    pub source: Source,
}

impl Policy {
    /// Every field of the policy that results from merging `run` into this policy of a session,
    /// with its source. `upper` are the policies of the installation and of the tenant, if it has
    /// one.
    #[must_use]
    pub fn explain(&self, upper: Option<(&Self, &Self)>, run: &Self) -> Vec<ExplainedField> {
        let session = self.set_fields();
        let tightened = upper.map(|(_, tenant)| tenant.merge(self));
        let merged = tightened.as_ref().unwrap_or(self).merge(run).set_fields();
        let tightened = tightened.map(|policy| policy.set_fields()).unwrap_or_default();
        let installation =
            upper.map(|(installation, _)| installation.set_fields()).unwrap_or_default();
        let above = upper.map(|(installation, tenant)| installation.merge(tenant).set_fields());
        let above = above.unwrap_or_default();
        let is_of_tenant = |field: &str, value: &Value| {
            above.get(field) == Some(value) && installation.get(field) != Some(value)
        };
        let defaults = Self::default().with_defaults().set_fields();
        let explain = |field: &Field| {
            let path = field.path;
            let (value, source) = match merged.get(path) {
                None => (field.default.to_owned(), Source::Default),
                Some(value) => {
                    let source = match value {
                        value if defaults.get(path) == Some(value) => Source::Default,
                        value if is_of_tenant(path, value) => Source::Tenant,
                        value if session.get(path) == Some(value) => Source::Session,
                        value if tightened.get(path) == Some(value) => Source::Tenant,
                        _ => Source::Run,
                    };
                    (value.to_string(), source)
                }
            };
            ExplainedField { field: path.to_owned(), value, source }
        };
        FIELDS.iter().map(explain).collect()
    }

    /// The fields that this policy sets, by path, with sorted lists.
    #[must_use]
    pub fn set_fields(&self) -> BTreeMap<String, Value> {
        let mut set = BTreeMap::new();
        // Serializing cannot fail: a policy consists of maps with text keys.
        let Ok(Value::Object(groups)) = serde_json::to_value(self.merge(&Self::default())) else {
            return set;
        };
        for (group, value) in groups {
            match value {
                Value::Object(fields) => {
                    set.extend(
                        fields.into_iter().map(|(name, value)| (format!("{group}.{name}"), value)),
                    );
                }
                value => {
                    set.insert(group, value);
                }
            }
        }
        set
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn explain_names_value_and_source() {
        let (mut session, mut run) = (Policy::default(), Policy::default());
        session.process.allow_fork = Some(false);
        session.filesystem.denied_paths = vec!["/opt/a".into()];
        run.process.allow_fork = Some(true);
        run.filesystem.denied_paths = vec!["/opt/b".into()];
        let explained = session.explain(None, &run);
        let of = |name: &str| {
            let found = explained.iter().find(|one| one.field == name).unwrap();
            (found.value.as_str(), found.source)
        };
        assert_eq!(of("process.allow_fork"), ("false", Source::Session));
        assert_eq!(of("filesystem.denied_paths"), (r#"["/opt/a","/opt/b"]"#, Source::Run));
        assert_eq!(of("process.debug"), ("false", Source::Default));
    }

    #[test]
    fn explain_names_what_the_tenant_tightened() {
        let parse = |text: &str| Policy::parse(text, crate::Format::Yaml).unwrap();
        let installation =
            parse("network: {allowed_hosts: ['*.example'], blocked_hosts: [x.example]}");
        let tenant = parse(
            "network: {allowed_hosts: [a.example, b.example], blocked_hosts: [y.example]}\nprocess: {allow_fork: false}",
        );
        let source = |session: &Policy, run: &str, name: &str| {
            let explained = session.explain(Some((&installation, &tenant)), &parse(run));
            explained.into_iter().find(|one| one.field == name).unwrap().source
        };
        // Created under the policy of the tenant, and before it.
        let under = installation.merge(&tenant);
        let before =
            parse("network: {allowed_hosts: [a.example, c.example]}\nprocess: {max_processes: 3}");
        let before = installation.merge(&before);
        for (session, name, expected) in [
            (&under, "network.allowed_hosts", Source::Tenant),
            (&under, "network.blocked_hosts", Source::Tenant),
            (&under, "process.allow_fork", Source::Tenant),
            (&before, "network.allowed_hosts", Source::Tenant),
            (&before, "process.max_processes", Source::Session),
            (&before, "process.allow_fork", Source::Tenant),
            (&before, "resources.cpus", Source::Default),
        ] {
            assert_eq!(source(session, "", name), expected, "{name}");
        }
        let run = "network: {allowed_hosts: [a.example]}";
        assert_eq!(source(&under, run, "network.allowed_hosts"), Source::Run);
    }
}
