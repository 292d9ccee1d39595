//! Profiles: names for the layout, policy, variables and limits of a kind of work, such as `cargo`.

use std::{collections::BTreeMap, sync::Arc};

use codelia_types::is_label;
use serde::{Deserialize, Serialize};

use crate::{
    Ceilings, DeclarationError, EnvironmentPolicy, Format, LimitsRequest, Policy,
    declaration_error::fail, format,
};

/// Maximum number of profiles of an installation.
const MAX_PROFILES: usize = 100;
const MAX_DESCRIPTION: usize = 1000;
const MAX_VARIABLES: usize = 64;
const MAX_VARIABLE: usize = 4096;

/// The profiles of every installation.
const BUILT_IN: [(&str, &str); 4] = [
    ("cargo", include_str!("../../../profiles/cargo.yaml")),
    ("node", include_str!("../../../profiles/node.yaml")),
    ("python", include_str!("../../../profiles/python.yaml")),
    ("shell", include_str!("../../../profiles/shell.yaml")),
];

/// The settings that a session of a kind of work starts with.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// The purpose of the profile, in one line.
    pub description: String,
    /// Tightens the policy of the session.
    #[serde(default)]
    pub policy: Policy,
    /// Variables of its runs. Those of a run win.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Default limits of its runs.
    #[serde(default)]
    pub limits: LimitsRequest,
    /// Whether it comes with Codelia. No file says so.
    #[serde(skip)]
    pub is_built_in: bool,
}

/// The profile of a session, as it was when the session was created.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionProfile {
    /// The name that the session asked for.
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

impl Profile {
    /// Parses and checks a profile.
    ///
    /// # Errors
    /// Names the first field that is unknown or not valid.
    pub fn parse(
        text: &str,
        format: Format,
        ceilings: &Ceilings,
    ) -> Result<Self, DeclarationError> {
        let mut profile: Self = format::parse(text, format)?;
        profile.description = profile.description.trim().to_owned();
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

    fn check_env(&self) -> Result<(), DeclarationError> {
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
    fn check_limits(&self) -> Result<(), DeclarationError> {
        let everything = Ceilings(self.limits.or_default(&Ceilings::default().0));
        match self.limits.resolve(&everything.0, &everything) {
            Err(error) => fail(error.field(), error.to_string()),
            Ok(_) => Ok(()),
        }
    }

    /// The limits of the profile, lowered to these ceilings.
    #[must_use]
    pub fn limits_under(&self, ceilings: &Ceilings) -> LimitsRequest {
        self.limits.lowered_to(ceilings)
    }
}

/// The profiles of an installation, by name.
#[derive(Debug, Clone, Default)]
pub struct Profiles(BTreeMap<String, Arc<Profile>>);

impl Profiles {
    /// The profiles that come with Codelia.
    ///
    /// # Errors
    /// One of them is not valid. A test shows that all are.
    pub fn built_in() -> Result<Self, DeclarationError> {
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
    pub fn insert(&mut self, name: &str, profile: Profile) -> Result<(), DeclarationError> {
        if !is_label(name) {
            return fail("", format!("the name {name:?} must match `[a-z0-9-]{{1,63}}`"));
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
