//! The command that a run executes.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Serialize};

/// Program, arguments, environment and terminal of one command. Its `Debug` output has the names of
/// the variables, not their values.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandSpec {
    /// Program and arguments. The program is looked up in `PATH`.
    pub argv: Vec<String>,
    /// Environment variables added to the clean environment.
    pub env: BTreeMap<String, String>,
    /// Working directory, relative to the session's root. Empty means the root.
    pub working_directory: String,
    /// Allocate a terminal of this size.
    pub terminal: Option<TerminalSize>,
    /// Keep stdin open. Otherwise stdin is empty.
    pub stdin: bool,
    /// Names of the variables in the run's [`SecretEnv`], sorted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub secret_env_names: Vec<String>,
}

impl fmt::Debug for CommandSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { argv, env, working_directory, terminal, stdin, secret_env_names } = self;
        f.debug_struct("CommandSpec")
            .field("argv", argv)
            .field("env", &env.keys())
            .field("working_directory", working_directory)
            .field("terminal", terminal)
            .field("stdin", stdin)
            .field("secret_env_names", secret_env_names)
            .finish()
    }
}

/// Environment variables whose values must not be stored, logged or returned in plain text.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SecretEnv(pub BTreeMap<String, String>);

impl fmt::Debug for SecretEnv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SecretEnv").field(&self.0.keys()).finish()
    }
}

impl CommandSpec {
    /// A command with this argv and defaults for everything else.
    #[must_use]
    pub fn new<I, S>(argv: I) -> Self
    where
        I: IntoIterator<Item = S>,
        S: Into<String>,
    {
        Self { argv: argv.into_iter().map(Into::into).collect(), ..Self::default() }
    }
}

/// The size of a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalSize {
    /// Columns.
    pub columns: u16,
    /// Rows.
    pub rows: u16,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_output_has_no_values() {
        let env = BTreeMap::from([("NAME".to_owned(), "hush".to_owned())]);
        let command = CommandSpec { env: env.clone(), ..CommandSpec::new(["true"]) };
        for text in [format!("{command:?}"), format!("{:?}", SecretEnv(env))] {
            assert!(text.contains("NAME") && !text.contains("hush"), "{text}");
        }
    }
}
