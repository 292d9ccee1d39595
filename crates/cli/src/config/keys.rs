//! The keys of the configuration: the fields of [`Config`], and their variables.

use std::sync::LazyLock;

use codelia_types::option;
use figment::value::{Dict, Value};

use super::schema::Config;

/// Variable that names the configuration file.
pub(super) const FILE_VARIABLE: &str = "CODELIA_CONFIG";

/// Prefix of variables that only tests use.
const TEST_PREFIX: &str = "CODELIA_TEST_";

/// Variables that are not named after their keys, and the unit of a value that is only a number.
const ALIASES: [(&str, &str, &str); 8] = [
    ("sandbox.ttl", "CODELIA_SANDBOX_TTL_SECONDS", "s"),
    ("sandbox.memory_limit", "CODELIA_SANDBOX_MEMORY_LIMIT_MB", "MiB"),
    ("sandbox.bwrap", "CODELIA_BWRAP", ""),
    ("sandbox.nsjail", "CODELIA_NSJAIL", ""),
    ("sandbox.init", "CODELIA_INIT", ""),
    ("client.context", "CODELIA_CONTEXT", ""),
    ("client.endpoint", "CODELIA_ENDPOINT", ""),
    ("client.api_key", "CODELIA_API_KEY", ""),
];

/// All keys, section by section.
pub(crate) static KEYS: LazyLock<Vec<Key>> = LazyLock::new(|| {
    let mut keys = Vec::new();
    let defaults = Value::from(defaults());
    for &(section, options) in Config::SECTIONS {
        for option in options {
            let path = if section.is_empty() {
                option.name.to_owned()
            } else {
                format!("{section}.{}", option.name)
            };
            // Some options cannot be configured.
            if defaults.find_ref(&path).is_none() {
                continue;
            }
            let alias = ALIASES.iter().find(|(aliased, _, _)| *aliased == path);
            let variable = match alias {
                Some((_, variable, _)) => (*variable).to_owned(),
                None => format!("CODELIA_{}", path.replace('.', "_").to_uppercase()),
            };
            keys.push(Key { path, variable, option, unit: alias.map_or("", |(_, _, unit)| unit) });
        }
    }
    keys
});

/// A key and its environment variable.
#[derive(Debug)]
pub(crate) struct Key {
    /// Path in the configuration file.
    pub(crate) path: String,
    pub(crate) variable: String,
    pub(super) option: &'static option::Key,
    /// Unit of a variable that is only a number.
    unit: &'static str,
}

impl Key {
    /// The value that the text of the variable means.
    pub(super) fn with_unit(&self, text: &str) -> String {
        let unit = if text.parse::<f64>().is_ok() { self.unit } else { "" };
        format!("{text}{unit}")
    }
}

/// The default of each key; empty for a key without one.
pub(super) fn defaults() -> Dict {
    let value = Value::serialize(Config::default());
    value.ok().and_then(Value::into_dict).unwrap_or_default()
}

/// Paths and values of everything in a table and its sections.
pub(super) fn leaves(table: &Dict) -> Vec<(String, Value)> {
    let mut leaves = Vec::new();
    for (name, value) in table {
        match value {
            Value::Dict(_, section) => {
                let below = self::leaves(section).into_iter();
                leaves.extend(below.map(|(path, value)| (format!("{name}.{path}"), value)));
            }
            value => leaves.push((name.clone(), value.clone())),
        }
    }
    leaves
}

/// Whether a variable has our prefix but belongs to no key.
pub(super) fn is_unknown_variable(name: &str) -> bool {
    name.starts_with("CODELIA_")
        && !name.starts_with(TEST_PREFIX)
        && name != FILE_VARIABLE
        && KEYS.iter().all(|key| key.variable != name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_alias_is_of_a_key() {
        for (path, variable, _) in ALIASES {
            assert!(KEYS.iter().any(|key| key.path == path && key.variable == variable), "{path}");
        }
        assert!(KEYS.len() > 130, "{} keys", KEYS.len());
    }
}
