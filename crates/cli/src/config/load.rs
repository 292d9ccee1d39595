//! Loads the configuration from defaults, file, environment and flags.

use std::{
    borrow::Cow,
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use codelia_client::{Flag, spelling::hint};
use figment::{
    Figment, Metadata, Profile, Provider,
    error::Kind,
    value::{Dict, Map, Value},
};

use super::{
    keys::{self, KEYS},
    loaded::{DEFAULT, Loaded, source},
    schema::Config,
};

/// Loads the configuration of this process.
pub(crate) fn load(file: Option<&Path>, flags: &[Flag]) -> Result<Loaded> {
    let mut variables = BTreeMap::new();
    for (name, value) in std::env::vars_os() {
        let Some(name) = name.to_str().filter(|name| name.starts_with("CODELIA_")) else {
            continue;
        };
        let value = value
            .into_string()
            .ok()
            .with_context(|| format!("environment variable {name} is not UTF-8"))?;
        variables.insert(name.to_owned(), value);
    }
    load_from(file, flags, &variables, &default_data_dir()?)
}

fn load_from(
    file: Option<&Path>,
    flags: &[Flag],
    variables: &BTreeMap<String, String>,
    data_dir: &str,
) -> Result<Loaded> {
    if let Some(name) = variables.keys().find(|name| keys::is_unknown_variable(name)) {
        let hint = hint(name, KEYS.iter().map(|key| key.variable.as_str()));
        bail!("unknown environment variable {name}{hint}");
    }
    let mut figment =
        Figment::from(Layer { source: Metadata::named(DEFAULT), values: keys::defaults() })
            .merge(Layer::from_text(DEFAULT, "data_dir", data_dir));
    if let Some(file) = file.or_else(|| variables.get(keys::FILE_VARIABLE).map(Path::new)) {
        figment = figment.merge(read(file)?);
    }
    for key in KEYS.iter() {
        if let Some(text) = variables.get(&key.variable) {
            let source = format!("env:{}", key.variable);
            figment = figment.merge(Layer::from_text(source, &key.path, &key.with_unit(text)));
        }
    }
    for (path, text) in flags {
        figment = figment.merge(Layer::from_text("flag", path, text));
    }
    let mut config: Config = figment.extract().map_err(describe)?;
    // A process started in another directory must find the same one.
    config.data_dir = std::path::absolute(&config.data_dir)?;
    Ok(Loaded { config, figment })
}

/// Reads a configuration file (TOML) without unknown keys.
fn read(path: &Path) -> Result<Layer> {
    let text =
        std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let table: toml::Table =
        text.parse().with_context(|| format!("cannot parse {}", path.display()))?;
    let values = Value::serialize(table)?.into_dict().unwrap_or_default();
    for (key, _) in keys::leaves(&values) {
        if KEYS.iter().all(|known| known.path != key) {
            let hint = hint(&key, KEYS.iter().map(|known| known.path.as_str()));
            bail!("unknown key {key} in {}{hint}", path.display());
        }
    }
    Ok(Layer { source: Metadata::from("TOML file", path), values })
}

/// Values of one source.
#[derive(Debug)]
struct Layer {
    source: Metadata,
    values: Dict,
}

impl Layer {
    /// The value of one key.
    fn from_text(source: impl Into<Cow<'static, str>>, path: &str, text: &str) -> Self {
        let source = Metadata::named(source);
        let layer = |value| {
            let values = figment::util::nest(path, value).into_dict().unwrap_or_default();
            Self { source: source.clone(), values }
        };
        let numbers =
            [text.parse::<i64>().map(Value::from).ok(), text.parse::<f64>().map(Value::from).ok()];
        let truth = text.parse::<bool>().map(Value::from).ok();
        let typed =
            numbers.into_iter().chain([truth]).flatten().map(layer).find(Self::has_its_type);
        let as_text = layer(Value::from(text));
        if as_text.has_its_type() { as_text } else { typed.unwrap_or(as_text) }
    }

    /// Whether the key takes values of this type.
    fn has_its_type(&self) -> bool {
        let read = Value::from(self.values.clone()).deserialize::<Config>();
        !read.is_err_and(|error| matches!(error.kind, Kind::InvalidType(..)))
    }
}

impl Provider for Layer {
    fn metadata(&self) -> Metadata {
        self.source.clone()
    }

    fn data(&self) -> Result<Map<Profile, Dict>, figment::Error> {
        Ok(Profile::Default.collect(self.values.clone()))
    }
}

/// Lists all problems, each with its key and source.
fn describe(error: figment::Error) -> anyhow::Error {
    let lines: Vec<String> = error
        .into_iter()
        .map(|one| {
            let source = one.metadata.as_ref().map(|metadata| format!(" ({})", source(metadata)));
            format!("{}: {}{}", one.path.join("."), one.kind, source.unwrap_or_default())
        })
        .collect();
    anyhow::anyhow!("invalid configuration: {}", lines.join("; "))
}

/// Data directory of `up`, if none is configured.
fn default_data_dir() -> Result<String> {
    if rustix::process::geteuid().is_root() {
        return Ok("/var/lib/codelia".to_owned());
    }
    let state = state_home().context("neither HOME nor CODELIA_DATA_DIR is set")?;
    Ok(state.join("codelia").display().to_string())
}

/// Where programs of this user keep their state; `None` without a home directory.
pub(crate) fn state_home() -> Option<PathBuf> {
    codelia_client::home_directory("XDG_STATE_HOME", ".local/state")
}

#[cfg(test)]
pub(crate) mod tests;
