//! Profiles: names for the layout, policy, variables and limits of a kind of work, such as `cargo`.

use std::{collections::BTreeMap, sync::Arc};

use serde::{Deserialize, Serialize};

use crate::{
    Ceilings, EnvironmentPolicy, Format, LimitsRequest, ParseError, Policy, PolicyError, format,
};

/// Maximum number of profiles of an installation.
const MAX_PROFILES: usize = 100;
const MAX_DESCRIPTION: usize = 1000;
const MAX_NAME: usize = 63;
const MAX_VARIABLES: usize = 64;
const MAX_VARIABLE: usize = 4096;

/// The profiles of every installation.
const BUILT_IN: [(&str, &str); 4] = [
    ("cargo", include_str!("../../../profiles/cargo.yaml")),
    ("node", include_str!("../../../profiles/node.yaml")),
    ("python", include_str!("../../../profiles/python.yaml")),
    ("shell", include_str!("../../../profiles/shell.yaml")),
];

/// What a session of a kind of work starts with.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Profile {
    /// What it is for, in one line.
    pub description: String,
    /// Tightens the policy of the session.
    pub policy: Policy,
    /// Variables of its runs. Those of a run win.
    pub env: BTreeMap<String, String>,
    /// Default limits of its runs.
    pub limits: LimitsRequest,
    /// Whether it comes with Codelia.
    pub is_built_in: bool,
}

/// The profile of a session, as it was when the session was created.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionProfile {
    /// The name.
    pub name: String,
    /// See [`Profile::env`].
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
}

impl SessionProfile {
    /// Adds its variables to those of a run. A variable that the run sets, also as a secret one,
    /// keeps its value; one that the policy does not allow is left out.
    pub fn add_env(
        &self,
        env: &mut BTreeMap<String, String>,
        secret_names: &[String],
        policy: &EnvironmentPolicy,
    ) {
        for (name, value) in &self.env {
            if policy.first_refused([name]).is_none() && !secret_names.contains(name) {
                env.entry(name.clone()).or_insert_with(|| value.clone());
            }
        }
    }
}

/// A profile that is not valid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}{message}", if field.is_empty() { String::new() } else { format!("{field}: ") })]
pub struct ProfileError {
    /// The path of the field in the document. Empty for the document itself.
    pub field: String,
    /// What is wrong with it.
    pub message: String,
}

fn fail<T>(field: impl Into<String>, message: impl Into<String>) -> Result<T, ProfileError> {
    Err(ProfileError { field: field.into(), message: message.into() })
}

impl From<ParseError> for ProfileError {
    fn from(error: ParseError) -> Self {
        match error {
            ParseError::Field { field, message } => Self { field, message },
            ParseError::TooLarge(error) => {
                Self { field: String::new(), message: error.to_string() }
            }
        }
    }
}

impl From<PolicyError> for ProfileError {
    fn from(PolicyError { field, message }: PolicyError) -> Self {
        let field = if field.is_empty() { "policy".to_owned() } else { format!("policy.{field}") };
        Self { field, message }
    }
}

/// A profile as a file describes it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ProfileDocument {
    description: String,
    #[serde(default)]
    policy: Policy,
    #[serde(default)]
    env: BTreeMap<String, String>,
    #[serde(default)]
    limits: LimitsRequest,
}

impl Profile {
    /// Parses and checks a profile.
    ///
    /// # Errors
    /// Names the first field that is unknown or not valid.
    pub fn parse(text: &str, format: Format, ceilings: &Ceilings) -> Result<Self, ProfileError> {
        let document: ProfileDocument = format::parse(text, format)?;
        let profile = Self {
            description: document.description.trim().to_owned(),
            policy: document.policy,
            env: document.env,
            limits: document.limits,
            is_built_in: false,
        };
        let length = profile.description.len();
        if !(1..=MAX_DESCRIPTION).contains(&length) || profile.description.contains(['\n', '\0']) {
            return fail(
                "description",
                format!("must be one line of 1 to {MAX_DESCRIPTION} bytes"),
            );
        }
        profile.policy.validate(ceilings)?;
        profile.check_env()?;
        profile.check_limits()?;
        Ok(profile)
    }

    fn check_env(&self) -> Result<(), ProfileError> {
        if self.env.len() > MAX_VARIABLES {
            return fail(
                "env",
                format!("has {} variables, maximum is {MAX_VARIABLES}", self.env.len()),
            );
        }
        let is_valid = |(name, value): (&String, &String)| {
            let is_short = name.len() + value.len() <= MAX_VARIABLE;
            is_short && !name.is_empty() && !name.contains(['=', '\0']) && !value.contains('\0')
        };
        match self.env.iter().find(|variable| !is_valid(*variable)) {
            Some((name, _)) => fail(
                format!("env.{name}"),
                format!(
                    "must have a name without `=`, no null byte and at most {MAX_VARIABLE} bytes"
                ),
            ),
            None => Ok(()),
        }
    }

    /// A limit above its ceiling is lowered when a session is created; zero is never meant.
    fn check_limits(&self) -> Result<(), ProfileError> {
        let everything = Ceilings(self.limits.or_default(&Ceilings::default().0));
        match self.limits.resolve(&everything.0, &everything) {
            Err(error) => fail(error.field(), error.to_string()),
            Ok(_) => Ok(()),
        }
    }

    /// Its limits, lowered to these ceilings.
    #[must_use]
    pub fn limits_under(&self, ceilings: &Ceilings) -> LimitsRequest {
        self.limits.lowered_to(ceilings)
    }
}

/// The profiles of an installation, by name.
#[derive(Debug, Clone, Default)]
pub struct Profiles(BTreeMap<String, Arc<Profile>>);

impl Profiles {
    /// Those that come with Codelia.
    ///
    /// # Errors
    /// One of them is not valid. A test shows that all are.
    pub fn built_in() -> Result<Self, ProfileError> {
        let mut profiles = Self::default();
        for (name, text) in BUILT_IN {
            let profile = Profile::parse(text, Format::Yaml, &Ceilings::default())?;
            profiles.insert(name, Profile { is_built_in: true, ..profile })?;
        }
        Ok(profiles)
    }

    /// Adds a profile, or replaces the one with this name.
    ///
    /// # Errors
    /// The name is not valid, or there are too many.
    pub fn insert(&mut self, name: &str, profile: Profile) -> Result<(), ProfileError> {
        let is_plain =
            |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        if !(1..=MAX_NAME).contains(&name.len()) || !name.bytes().all(is_plain) {
            return fail("", format!("the name {name:?} must match `[a-z0-9-]{{1,{MAX_NAME}}}`"));
        }
        if self.0.len() >= MAX_PROFILES && !self.0.contains_key(name) {
            return fail("", format!("there are more than {MAX_PROFILES} profiles; remove some"));
        }
        self.0.insert(name.to_owned(), Arc::new(profile));
        Ok(())
    }

    /// The profile of this name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Arc<Profile>> {
        self.0.get(name)
    }

    /// All of them, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Profile)> {
        self.0.iter().map(|(name, profile)| (name.as_str(), &**profile))
    }

    /// All names, for messages.
    #[must_use]
    pub fn names(&self) -> String {
        self.0.keys().map(String::as_str).collect::<Vec<_>>().join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        Profile::parse(text, Format::Yaml, &Ceilings::default()).unwrap_err().field
    }

    #[test]
    fn built_in_profiles_are_valid() {
        let profiles = Profiles::built_in().unwrap();
        assert_eq!(profiles.names(), "cargo, node, python, shell");
        let cargo = profiles.get("cargo").unwrap();
        let sizes: Vec<_> =
            cargo.policy.layout.directories.iter().map(|one| one.max_bytes).collect();
        assert_eq!(sizes, [None, Some(5 << 30), Some(100 << 20), None]);
        assert_eq!(cargo.limits.disk_bytes, Some(10 << 30));
    }

    #[test]
    fn invalid_profile_is_refused_by_field() {
        for (text, field) in [
            ("description: ''", "description"),
            (
                "description: a\npolicy: {layout: {directories: [{path: /a}]}}",
                "policy.layout.directories[0].path",
            ),
            ("description: a\nlimits: {pids: 0}", "limits.pids"),
            ("description: a\nlimits: {timeout: 10}", "limits.timeout"),
            ("description: a\nenv: {A=B: c}", "env.A=B"),
        ] {
            assert_eq!(error(text), field, "{text}");
        }
        assert!(Profile::parse("policy: {}", Format::Yaml, &Ceilings::default()).is_err());
        assert!(Profiles::default().insert("A b", Profile::default()).is_err());
    }

    #[test]
    fn variables_of_the_run_win() {
        let variables =
            [("A", "1"), ("B", "2"), ("C", "3")].map(|(name, value)| (name.into(), value.into()));
        let profile = SessionProfile { name: "x".into(), env: variables.into() };
        let with = |policy: &EnvironmentPolicy| {
            let mut env = BTreeMap::from([("A".to_owned(), "own".to_owned())]);
            profile.add_env(&mut env, &["B".to_owned()], policy);
            env.into_iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>()
        };
        assert_eq!(with(&EnvironmentPolicy::default()), ["A=own", "C=3"]);
        let mode = Some(crate::EnvironmentMode::Explicit);
        assert_eq!(with(&EnvironmentPolicy { mode, names: Some(vec!["A".into()]) }), ["A=own"]);
    }
}
