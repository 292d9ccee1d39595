//! Scopes of policies between the installation and a session: organisation, then project, then
//! user. A lower scope only tightens, except for fields that an upper one delegates. Nothing
//! exceeds the policy of the installation.

use std::{borrow::Cow, collections::BTreeMap};

use codelia_types::{NetworkMode, words};
use serde::{Deserialize, Serialize};

use crate::{Ceilings, Field, Policy, PolicyError, Source, validate::fail_at};

words! {
    /// Whom a stored policy restricts, from the widest.
    #[derive(Hash, PartialOrd, Ord)]
    pub enum PolicyScope {
        /// All sessions of a tenant.
        Organisation = "organisation",
        /// The sessions that name the project.
        Project = "project",
        /// The sessions that a key creates.
        User = "user",
    }
}

impl Policy {
    /// Merges the policy of a scope below into this one of a scope. Of the fields that this one
    /// delegates, those that the lower one sets have its value.
    fn over(&self, lower: &Self) -> Self {
        self.without(&self.delegated_to(lower)).merge(lower)
    }

    /// The fields that this policy delegates and the lower one sets.
    fn delegated_to(&self, lower: &Self) -> Vec<String> {
        let is_set = |path: &&String| {
            Field::find_delegable(path).is_some_and(|field| field.value(lower).is_set())
        };
        self.delegate.iter().filter(is_set).cloned().collect()
    }

    /// This policy without those of the fields that it delegates.
    #[must_use]
    pub fn without(&self, fields: &[String]) -> Cow<'_, Self> {
        let mut rest = Cow::Borrowed(self);
        for path in fields.iter().filter(|path| self.delegate.contains(path)) {
            if let Some(field) = Field::find_delegable(path) {
                field.clear(rest.to_mut());
            }
        }
        rest
    }

    /// Checks a policy of a scope like [`Policy::validate`], and what it delegates.
    ///
    /// # Errors
    /// Names the first field that is not valid.
    pub fn validate_scope(&self, ceilings: &Ceilings) -> Result<(), PolicyError> {
        self.check_size()?;
        let refused = self.delegate.iter().position(|path| Field::find_delegable(path).is_none());
        let delegable: Vec<_> = Field::delegable().map(|field| field.path).collect();
        let message = format!("cannot be delegated; these can: {}", delegable.join(", "));
        fail_at("delegate", refused, message)?;
        Self { delegate: Vec::new(), ..self.clone() }.validate(ceilings)
    }

    /// Checks that this policy of a project or user gives nothing that the installation and the
    /// organisation do not, except for fields that the organisation delegates. `network` is the
    /// installation's default network.
    ///
    /// # Errors
    /// Names the value that would give more.
    pub fn check_scope(
        &self,
        installation: &Self,
        organisation: Option<&Self>,
        network: Option<NetworkMode>,
    ) -> Result<(), PolicyError> {
        let Some(organisation) = organisation else {
            return self.check_tenant(installation, network);
        };
        let above = installation.merge(&organisation.without(&organisation.delegated_to(self)));
        self.check_tenant(&above, network)
    }
}

/// The policies of the scopes of a session.
#[derive(Debug, Clone, Copy, Default)]
pub struct Scopes<'a> {
    /// The organisation's: that of the tenant.
    pub organisation: Option<&'a Policy>,
    /// The project's.
    pub project: Option<&'a Policy>,
    /// The user's.
    pub user: Option<&'a Policy>,
}

/// Decisions of the scopes of a session when it was created.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SessionScopes {
    /// The project that the session named.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub project: Option<String>,
    /// Fields of the organisation that it delegated and a lower scope set.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub delegated: Vec<String>,
    /// The fields whose value is a project's or user's.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub sources: BTreeMap<String, Source>,
}

impl SessionScopes {
    /// Whether no project or user had a part in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl Scopes<'_> {
    /// The policy of all scopes within that of the installation. Without delegation it is that of
    /// [`Policy::merge`] from the top down.
    #[must_use]
    pub fn effective(&self, installation: &Policy) -> Policy {
        let lower = self.below_organisation();
        installation.merge(&match (self.organisation, lower) {
            (Some(organisation), Some(lower)) => organisation.over(&lower),
            (organisation, lower) => lower.or(organisation.cloned()).unwrap_or_default(),
        })
    }

    /// The policies of project and user together.
    fn below_organisation(&self) -> Option<Policy> {
        match (self.project, self.user) {
            (Some(project), Some(user)) => Some(project.over(user)),
            (project, user) => project.or(user).cloned(),
        }
    }

    /// Decisions of these scopes about a session of a project with this policy.
    #[must_use]
    pub fn decided(
        &self,
        installation: &Policy,
        session: &Policy,
        project: Option<String>,
    ) -> SessionScopes {
        let Some(lower) = self.below_organisation() else { return SessionScopes::default() };
        let fields = |scopes: Self| scopes.effective(installation).set_fields();
        let organisation = fields(Self { organisation: self.organisation, ..Self::default() });
        let projects = fields(Self { user: None, ..*self });
        let all = fields(*self);
        let source = |field: String, value| {
            let is_scoped = all.get(&field) == Some(&value);
            let is_above = organisation.get(&field) == Some(&value);
            let source =
                if projects.get(&field) == Some(&value) { Source::Project } else { Source::User };
            (is_scoped && !is_above).then_some((field, source))
        };
        SessionScopes {
            project,
            delegated: self
                .organisation
                .map(|upper| upper.delegated_to(&lower))
                .unwrap_or_default(),
            sources: session
                .set_fields()
                .into_iter()
                .filter_map(|(field, value)| source(field, value))
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Policy {
        Policy::parse(text, crate::Format::Yaml).unwrap()
    }

    fn memory(policy: &Policy) -> Option<u64> {
        policy.resources.max_memory_bytes
    }

    #[test]
    fn delegated_field_has_the_value_of_the_lower_scope() {
        let installation = parse("resources: {max_memory_bytes: 100}");
        let delegating =
            parse("resources: {max_memory_bytes: 10}\ndelegate: [resources.max_memory_bytes]");
        let strict = parse("resources: {max_memory_bytes: 10}");
        let (more, most) = (
            parse("resources: {max_memory_bytes: 50}"),
            parse("resources: {max_memory_bytes: 900}"),
        );
        let effective = |organisation, project, user| {
            let scopes = Scopes { organisation, project, user };
            memory(&scopes.effective(&installation))
        };
        assert_eq!(effective(Some(&strict), Some(&more), None), Some(10));
        assert_eq!(effective(Some(&delegating), Some(&more), None), Some(50));
        assert_eq!(
            effective(Some(&delegating), Some(&most), None),
            Some(100),
            "within the installation"
        );
        // The delegation reaches the user unless the project sets the field.
        assert_eq!(effective(Some(&delegating), None, Some(&more)), Some(50));
        assert_eq!(effective(Some(&delegating), Some(&strict), Some(&more)), Some(10));
        // A project that delegates cannot give more than its organisation.
        assert_eq!(effective(Some(&strict), Some(&delegating), Some(&more)), Some(10));
        assert_eq!(effective(None, Some(&delegating), Some(&more)), Some(50));
    }

    #[test]
    fn only_some_fields_can_be_delegated() {
        let field = |text: &str| {
            parse(text).validate_scope(&Ceilings::default()).map_err(|error| error.field)
        };
        assert_eq!(field("delegate: [process.debug]"), Ok(()));
        assert_eq!(field("delegate: [process.debug, network.mode]"), Err("delegate[1]".into()));
        assert_eq!(field("delegate: [filesystem.denied_paths]"), Err("delegate[0]".into()));
        let refused = parse("delegate: [process.debug]").validate(&Ceilings::default());
        assert_eq!(refused.map_err(|error| error.field), Err("delegate".into()));
    }

    #[test]
    fn scope_cannot_exceed_what_is_not_delegated() {
        let installation = parse("filesystem: {read_only_paths: [/opt, /srv]}").as_installation();
        let strict = parse("filesystem: {read_only_paths: [/opt]}");
        let delegating =
            parse("filesystem: {read_only_paths: [/opt]}\ndelegate: [filesystem.read_only_paths]");
        let project = parse("filesystem: {read_only_paths: [/srv]}");
        let check = |policy: &Policy, above| policy.check_scope(&installation, Some(above), None);
        assert_eq!(
            check(&project, &strict).map_err(|error| error.field),
            Err("filesystem.read_only_paths[0]".into())
        );
        assert_eq!(check(&project, &delegating), Ok(()));
        let outside = parse("filesystem: {read_only_paths: [/home]}");
        assert!(check(&outside, &delegating).is_err(), "outside of the installation");
    }

    #[test]
    fn session_knows_which_scope_set_a_value() {
        let installation = Policy::installation();
        let organisation = parse(
            "process: {allow_fork: false, max_processes: 9}\ndelegate: [process.max_processes]",
        );
        let project =
            parse("process: {max_processes: 20}\nresources: {max_open_files: 5, max_threads: 7}");
        let user = parse("resources: {max_threads: 6}");
        let scopes = Scopes {
            organisation: Some(&organisation),
            project: Some(&project),
            user: Some(&user),
        };
        let session =
            scopes.effective(&installation).merge(&parse("resources: {max_open_files: 4}"));
        let decided = scopes.decided(&installation, &session, Some("web".into()));
        assert_eq!(decided.delegated, ["process.max_processes"]);
        let source = |field: &str| decided.sources.get(field).copied();
        assert_eq!(source("process.max_processes"), Some(Source::Project));
        assert_eq!(source("resources.max_threads"), Some(Source::User));
        assert_eq!(
            (source("process.allow_fork"), source("resources.max_open_files")),
            (None, None)
        );
    }
}
