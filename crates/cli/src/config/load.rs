//! Loads the configuration from defaults, file, environment and flags.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use figment::{
    Figment, Metadata, Profile, Provider,
    value::{Dict, Map, Value},
};

use super::{
    Config, Loaded,
    file::ConfigFile,
    keys::{self, KEYS, Key, Kind},
    show,
};

/// A value from the command line: the path of its key, and the text.
pub(crate) type Flag = (&'static str, String);

/// Loads the configuration of this process.
pub(crate) fn load(file: Option<&Path>, flags: &[Flag]) -> Result<Loaded> {
    let mut variables = BTreeMap::new();
    for (name, value) in std::env::vars_os() {
        let Some(name) = name.to_str().filter(|name| name.starts_with("CODELIA_")) else { continue };
        let value =
            value.into_string().ok().with_context(|| format!("environment variable {name} is not UTF-8"))?;
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
        let hint = keys::hint(name, KEYS.iter().map(|key| key.env));
        bail!("unknown environment variable {name}{hint}");
    }
    let file = file.or_else(|| variables.get(keys::FILE_VARIABLE).map(Path::new));
    let file = file.map(ConfigFile::read).transpose()?;
    let warnings = former_names(file.as_ref(), variables)?;
    let mut figment = defaults(data_dir);
    if let Some(file) = file {
        figment = figment.merge(file);
    }
    for key in KEYS {
        let names = [Some(key.env), key.former.map(|former| former.env)];
        for name in names.into_iter().flatten() {
            if let Some(text) = variables.get(name) {
                figment = figment.merge(SingleValue::new(format!("env:{name}"), key, text));
            }
        }
    }
    for (path, text) in flags {
        let key = keys::by_path(path).with_context(|| format!("no key {path}"))?;
        figment = figment.merge(SingleValue::new("flag".to_owned(), key, text));
    }
    let mut config: Config = figment.extract().map_err(describe)?;
    // A process started in another directory must find the same one.
    config.data_dir = std::path::absolute(&config.data_dir)?;
    Ok(Loaded { config, figment, warnings })
}

/// Returns a warning for each key set by its former name. Refuses a key set by both names.
fn former_names(file: Option<&ConfigFile>, variables: &BTreeMap<String, String>) -> Result<Vec<String>> {
    let mut warnings = Vec::new();
    for key in KEYS {
        let Some(former) = key.former else { continue };
        let in_file = |path: &str| file.is_some_and(|file| file.has(path));
        let in_env = |name: &str| variables.contains_key(name);
        let old: Vec<&str> =
            [in_file(former.path).then_some(former.path), in_env(former.env).then_some(former.env)]
                .into_iter()
                .flatten()
                .collect();
        if let Some(old) = old.first()
            && (in_file(key.path) || in_env(key.env))
        {
            let new = if in_file(key.path) { key.path } else { key.env };
            bail!("{old} is the deprecated name of {new}: both are set, remove {old}");
        }
        warnings.extend(old.into_iter().map(|old| {
            let new = if old == former.path { key.path } else { key.env };
            format!("{old} is deprecated and will be removed in the next version: use {new}")
        }));
    }
    Ok(warnings)
}

/// Source of values that are not set.
pub(super) const DEFAULT: &str = "default";

fn defaults(data_dir: &str) -> Figment {
    let with_default = KEYS.iter().filter_map(|key| {
        let value = if key.path == "data_dir" { Some(data_dir) } else { key.default };
        value.map(|value| SingleValue::new(DEFAULT.to_owned(), key, value))
    });
    with_default.fold(Figment::new(), Figment::merge)
}

/// The value of one key from one source.
struct SingleValue {
    source: String,
    path: &'static str,
    value: Value,
}

impl SingleValue {
    fn new(source: String, key: &Key, text: &str) -> Self {
        Self { source, path: key.path, value: typed(key.kind, text) }
    }
}

impl Provider for SingleValue {
    fn metadata(&self) -> Metadata {
        Metadata::named(self.source.clone())
    }

    fn data(&self) -> Result<Map<Profile, Dict>, figment::Error> {
        let dict = figment::util::nest(self.path, self.value.clone()).into_dict().unwrap_or_default();
        Ok(Profile::Default.collect(dict))
    }
}

/// Parses a text. An invalid one stays a string, which its key refuses later.
fn typed(kind: Kind, text: &str) -> Value {
    let parsed = match kind {
        Kind::Text => None,
        Kind::Integer => text.parse::<i64>().ok().map(Value::from),
        Kind::Float => text.parse::<f64>().ok().map(Value::from),
        Kind::Bool => text.parse::<bool>().ok().map(Value::from),
    };
    parsed.unwrap_or_else(|| Value::from(text))
}

/// Lists all problems, each with its key and source.
fn describe(error: figment::Error) -> anyhow::Error {
    let lines: Vec<String> = error
        .into_iter()
        .map(|one| {
            let source = one.metadata.as_ref().map(|metadata| format!(" ({})", show::source(metadata)));
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
    home_directory("XDG_STATE_HOME", ".local/state")
}

/// Where programs of this user keep their settings; `None` without a home directory.
pub(crate) fn config_home() -> Option<PathBuf> {
    home_directory("XDG_CONFIG_HOME", ".config")
}

/// The directory that a variable names, or the default below the home directory.
fn home_directory(variable: &str, default: &str) -> Option<PathBuf> {
    let value = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    value(variable).map(PathBuf::from).or_else(|| Some(Path::new(&value("HOME")?).join(default)))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::Write;

    use super::*;

    pub(crate) fn loaded(file: Option<&Path>, flags: &[Flag], variables: &[(&str, &str)]) -> Result<Loaded> {
        let variables =
            variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        load_from(file, flags, &variables, "/state/codelia")
    }

    fn file(text: &str) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file
    }

    fn slots(loaded: &Loaded) -> usize {
        loaded.config.worker.slots.unwrap().get()
    }

    #[test]
    fn flags_override_environment_file_and_defaults() {
        let file = file("[worker]\nslots = 2\n[sandbox]\nttl_seconds = 60\n");
        let variables = [("CODELIA_WORKER_SLOTS", "3")];
        let flags = [("worker.slots", "4".to_owned())];
        let by_file = loaded(Some(file.path()), &[], &[]).unwrap();
        assert_eq!((slots(&by_file), by_file.config.session_ttl().as_secs()), (2, 60));
        assert_eq!(slots(&loaded(Some(file.path()), &[], &variables).unwrap()), 3);
        assert_eq!(slots(&loaded(Some(file.path()), &flags, &variables).unwrap()), 4);
        let by_default = loaded(None, &[], &[]).unwrap();
        assert!(by_default.config.worker.slots.is_none());
        assert!(!by_default.is_set("api.listen"));
        assert!(by_file.is_set("worker.slots"));
    }

    #[test]
    fn variable_names_the_configuration_file() {
        let file = file("[worker]\nslots = 2\n");
        let variables = [("CODELIA_CONFIG", file.path().to_str().unwrap())];
        assert_eq!(slots(&loaded(None, &[], &variables).unwrap()), 2);
    }

    #[test]
    fn missing_configuration_file_is_refused() {
        assert!(loaded(Some(Path::new("/nowhere.toml")), &[], &[]).is_err());
    }

    #[test]
    fn unknown_names_are_refused_with_hint() {
        let file = file("[sandbox]\nmod = \"logical\"\n");
        let error = loaded(Some(file.path()), &[], &[]).unwrap_err().to_string();
        assert!(
            error.contains("unknown key sandbox.mod ") && error.contains("did you mean sandbox.mode?"),
            "{error}"
        );
        let error = loaded(None, &[], &[("CODELIA_SANDBOX_MODES", "logical")]).unwrap_err().to_string();
        assert!(error.contains("did you mean CODELIA_SANDBOX_MODE?"), "{error}");
        assert!(loaded(None, &[], &[("CODELIA_TEST_REQUIRE", "bwrap")]).is_ok());
    }

    #[test]
    fn invalid_value_error_names_key_and_source() {
        for (name, key, value) in [
            ("CODELIA_SANDBOX_MODE", "sandbox.mode", "jail"),
            ("CODELIA_SANDBOX_TTL_SECONDS", "sandbox.ttl_seconds", "0"),
            ("CODELIA_SANDBOX_TTL_SECONDS", "sandbox.ttl_seconds", "-5"),
            ("CODELIA_SANDBOX_TTL_SECONDS", "sandbox.ttl_seconds", "soon"),
            ("CODELIA_SANDBOX_NETWORK", "sandbox.network", "maybe"),
            ("CODELIA_SANDBOX_CPU_LIMIT", "sandbox.cpu_limit", "0"),
            ("CODELIA_SANDBOX_CPU_LIMIT", "sandbox.cpu_limit", "-1"),
            ("CODELIA_SANDBOX_CPU_LIMIT", "sandbox.cpu_limit", "NaN"),
            ("CODELIA_SANDBOX_MEMORY_LIMIT_MB", "sandbox.memory_limit_mb", "0"),
            ("CODELIA_API_LISTEN", "api.listen", "here"),
            ("CODELIA_METRICS_LISTEN", "metrics.listen", "here"),
            ("CODELIA_WORKER_SLOTS", "worker.slots", "0"),
        ] {
            let error = loaded(None, &[], &[(name, value)]).unwrap_err().to_string();
            assert!(error.contains(key) && error.contains(&format!("env:{name}")), "{error}");
        }
    }

    #[test]
    fn profile_images_are_parsed_from_pairs() {
        let key = "CODELIA_SANDBOX_CONTAINER_IMAGES";
        let images =
            |text| loaded(None, &[], &[(key, text)]).map(|loaded| loaded.config.sandbox.container_images);
        let found = images("python=registry:5000/py:3, go=go").unwrap();
        assert_eq!(
            found,
            [("go", "go"), ("python", "registry:5000/py:3")].map(|(a, b)| (a.into(), b.into())).into()
        );
        assert!(images("").unwrap().is_empty());
        assert!(images("python").is_err());
        let default = loaded(None, &[], &[]).unwrap().config.sandbox.container_images;
        assert_eq!(default.keys().collect::<Vec<_>>(), ["node", "python", "rust"]);
    }

    #[test]
    fn empty_metrics_address_disables_metrics() {
        assert_eq!(loaded(None, &[], &[("CODELIA_METRICS_LISTEN", "")]).unwrap().config.metrics.listen, None);
    }

    #[test]
    fn prod_profile_disallows_logical_runs_by_default() {
        let prod = ("CODELIA_PROFILE", "prod");
        assert!(!loaded(None, &[], &[prod]).unwrap().config.allow_logical());
        let allowed = [prod, ("CODELIA_SANDBOX_ALLOW_LOGICAL", "true")];
        assert!(loaded(None, &[], &allowed).unwrap().config.allow_logical());
    }

    #[test]
    fn former_names_work_with_a_warning() {
        let file = file("[sandbox]\nyields = true\n[worker]\nspare_memory_mb = 7\nslots = 2\n");
        let by_file = loaded(Some(file.path()), &[], &[]).unwrap();
        assert!(by_file.config.sandbox.cpu_idle);
        assert_eq!((by_file.config.worker.min_free_memory_mb, slots(&by_file)), (7, 2));
        let warning =
            |old: &str, new: &str| by_file.warnings.iter().any(|w| w.contains(old) && w.contains(new));
        assert_eq!(by_file.warnings.len(), 2);
        assert!(warning("sandbox.yields", "sandbox.cpu_idle"), "{:?}", by_file.warnings);
        assert!(warning("worker.spare_memory_mb", "worker.min_free_memory_mb"), "{:?}", by_file.warnings);

        let variables = [("CODELIA_SANDBOX_YIELDS", "true"), ("CODELIA_WORKER_SPARE_MEMORY_MB", "9")];
        let by_env = loaded(None, &[], &variables).unwrap();
        assert!(by_env.config.sandbox.cpu_idle);
        assert_eq!(by_env.config.worker.min_free_memory_mb, 9);
        assert!(by_env.warnings[1].contains("use CODELIA_SANDBOX_CPU_IDLE"), "{:?}", by_env.warnings);
    }

    #[test]
    fn current_names_give_no_warning() {
        let file = file("[sandbox]\ncpu_idle = true\n");
        let loaded = loaded(Some(file.path()), &[], &[("CODELIA_WORKER_MIN_FREE_MEMORY_MB", "9")]).unwrap();
        assert!(loaded.config.sandbox.cpu_idle && loaded.config.worker.min_free_memory_mb == 9);
        assert!(loaded.warnings.is_empty(), "{:?}", loaded.warnings);
    }

    #[test]
    fn former_and_current_name_together_are_refused() {
        let old = ("CODELIA_SANDBOX_YIELDS", "true");
        let new = ("CODELIA_SANDBOX_CPU_IDLE", "true");
        let old_file = file("[sandbox]\nyields = true\n");
        let both_file = file("[sandbox]\nyields = true\ncpu_idle = true\n");
        for (file, variables) in
            [(None, vec![old, new]), (Some(old_file.path()), vec![new]), (Some(both_file.path()), vec![])]
        {
            let error = loaded(file, &[], &variables).unwrap_err().to_string();
            assert!(error.contains("both are set"), "{error}");
        }
    }
}
