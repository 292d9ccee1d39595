//! The configuration file (TOML).

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use figment::{
    Metadata, Profile, Provider,
    value::{Dict, Map, Value},
};

use super::keys::{self, KEYS};

/// A parsed configuration file without unknown keys.
#[derive(Debug)]
pub(super) struct ConfigFile {
    path: PathBuf,
    table: toml::Table,
}

impl ConfigFile {
    /// Reads a file.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let table: toml::Table = text.parse().with_context(|| format!("cannot parse {}", path.display()))?;
        let mut leaves = Vec::new();
        collect_leaves("", &table, &mut leaves);
        if let Some(unknown) = leaves.iter().find(|leaf| !is_known(leaf)) {
            let hint = keys::hint(unknown, KEYS.iter().map(|key| key.path));
            bail!("unknown key {unknown} in {}{hint}", path.display());
        }
        Ok(Self { path: path.to_owned(), table })
    }

    /// Whether the file sets this key.
    pub(super) fn has(&self, path: &str) -> bool {
        let (sections, name) = path.rsplit_once('.').unwrap_or(("", path));
        let mut table = &self.table;
        for section in sections.split('.').filter(|section| !section.is_empty()) {
            match table.get(section).and_then(toml::Value::as_table) {
                Some(inner) => table = inner,
                None => return false,
            }
        }
        table.contains_key(name)
    }

    /// The values, with former names replaced by current ones.
    fn renamed(&self) -> toml::Table {
        let mut table = self.table.clone();
        for (key, former) in KEYS.iter().filter_map(|key| key.former.map(|former| (key, former))) {
            if let Some(value) = remove(&mut table, former.path) {
                insert(&mut table, key.path, value);
            }
        }
        table
    }
}

impl Provider for ConfigFile {
    fn metadata(&self) -> Metadata {
        Metadata::from("TOML file", self.path.as_path())
    }

    fn data(&self) -> Result<Map<Profile, Dict>, figment::Error> {
        let dict = Value::serialize(self.renamed())?.into_dict().unwrap_or_default();
        Ok(Profile::Default.collect(dict))
    }
}

fn is_known(path: &str) -> bool {
    keys::by_path(path).is_some()
        || KEYS.iter().any(|key| key.former.is_some_and(|former| former.path == path))
}

fn collect_leaves(prefix: &str, table: &toml::Table, leaves: &mut Vec<String>) {
    for (name, value) in table {
        let path = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
        match value {
            toml::Value::Table(inner) => collect_leaves(&path, inner, leaves),
            _ => leaves.push(path),
        }
    }
}

fn remove(table: &mut toml::Table, path: &str) -> Option<toml::Value> {
    match path.split_once('.') {
        Some((section, rest)) => remove(table.get_mut(section)?.as_table_mut()?, rest),
        None => table.remove(path),
    }
}

fn insert(table: &mut toml::Table, path: &str, value: toml::Value) {
    match path.split_once('.') {
        Some((section, rest)) => {
            let inner = table.entry(section).or_insert_with(|| toml::Table::new().into());
            if let Some(inner) = inner.as_table_mut() {
                insert(inner, rest, value);
            }
        }
        None => {
            table.insert(path.to_owned(), value);
        }
    }
}
