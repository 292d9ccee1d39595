//! Configuration: defaults < file < environment < flags. Unknown keys and variables are refused.

pub(crate) mod keys;
mod show;

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    num::{NonZeroU32, NonZeroU64, NonZeroUsize},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use codelia_types::{Mode, NetworkMode};
use figment::{
    Figment, Metadata, Profile as FigmentProfile, Provider,
    providers::{Format, Toml},
    value::{Dict, Map, Value},
};
use secrecy::SecretString;
use serde::{Deserialize, Deserializer};

use self::keys::{KEYS, Key, Kind};

pub(crate) use show::show;

/// The effective configuration, and where each value came from.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) config: Config,
    figment: Figment,
}

/// The effective configuration.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Config {
    pub(crate) data_dir: PathBuf,
    pub(crate) profile: Profile,
    pub(crate) database: Database,
    pub(crate) api: Api,
    pub(crate) metrics: Metrics,
    #[serde(default)]
    pub(crate) internal: Internal,
    pub(crate) worker: Worker,
    pub(crate) sandbox: Sandbox,
    pub(crate) log: Log,
    #[serde(default)]
    pub(crate) otlp: Otlp,
    #[serde(default)]
    pub(crate) client: Client,
}

/// What the installation is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Profile {
    Dev,
    Prod,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Database {
    pub(crate) url: Option<SecretString>,
    pub(crate) max_connections: NonZeroU32,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Api {
    pub(crate) listen: SocketAddr,
    pub(crate) tls_cert: Option<PathBuf>,
    pub(crate) tls_key: Option<PathBuf>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Metrics {
    /// `None` if it was set to nothing.
    #[serde(deserialize_with = "address_or_off")]
    pub(crate) listen: Option<SocketAddr>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Internal {
    pub(crate) tls_ca: Option<PathBuf>,
    pub(crate) tls_cert: Option<PathBuf>,
    pub(crate) tls_key: Option<PathBuf>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Worker {
    pub(crate) id: Option<String>,
    pub(crate) listen: Option<String>,
    pub(crate) advertise: Option<String>,
    pub(crate) slots: Option<NonZeroUsize>,
    pub(crate) lease_ttl_seconds: NonZeroU64,
    /// At most 50.
    pub(crate) lease_margin_percent: u32,
    pub(crate) poll_interval_ms: NonZeroU64,
    pub(crate) drain_grace_seconds: Option<u64>,
    pub(crate) spare_memory_mb: u64,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Sandbox {
    pub(crate) mode: Option<Mode>,
    pub(crate) root: Option<PathBuf>,
    pub(crate) ttl_seconds: NonZeroU64,
    pub(crate) network: Option<Network>,
    /// Cores.
    #[serde(deserialize_with = "more_than_zero")]
    pub(crate) cpu_limit: f64,
    pub(crate) memory_limit_mb: NonZeroU64,
    /// What any command may do, as a file.
    pub(crate) policy: Option<PathBuf>,
    pub(crate) allow_logical: Option<bool>,
    /// Users and groups that sessions get as their own, where the worker is root.
    pub(crate) uid_base: NonZeroU32,
    pub(crate) uid_count: NonZeroU32,
    /// Whether commands get only the processor time that everything else leaves.
    pub(crate) yields: bool,
    /// The tools of the modes, by path or by name.
    pub(crate) bwrap: PathBuf,
    pub(crate) nsjail: PathBuf,
    /// The engine of mode `container`, the runtime it uses, and the image that brings the programs.
    pub(crate) container_socket: PathBuf,
    pub(crate) container_runtime: Option<String>,
    pub(crate) container_image: String,
    /// The images of profiles: `python=codelia-python,…`.
    #[serde(deserialize_with = "pairs")]
    pub(crate) container_images: BTreeMap<String, String>,
    pub(crate) init: Option<PathBuf>,
}

/// Whether sandboxes have a network, in the words of `CODELIA_SANDBOX_NETWORK`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Network {
    Disabled,
    Enabled,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Log {
    pub(crate) format: String,
    pub(crate) filter: Option<String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Otlp {
    pub(crate) endpoint: Option<String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Client {
    pub(crate) endpoint: Option<String>,
    pub(crate) api_key: Option<SecretString>,
    pub(crate) tls_ca: Option<PathBuf>,
}

impl Config {
    /// The directory a worker keeps its sessions in.
    pub(crate) fn sandbox_root(&self) -> PathBuf {
        self.sandbox.root.clone().unwrap_or_else(|| self.data_dir.join("worker"))
    }

    /// Whether runs without isolation are admitted.
    pub(crate) fn allow_logical(&self) -> bool {
        self.sandbox.allow_logical.unwrap_or(self.profile == Profile::Dev)
    }

    /// The network of runs that ask for none in particular.
    pub(crate) fn network(&self) -> Option<NetworkMode> {
        self.sandbox.network.map(|network| match network {
            Network::Disabled => NetworkMode::None,
            Network::Enabled => NetworkMode::Host,
        })
    }

    /// Default time to live of a session.
    pub(crate) fn session_ttl(&self) -> Duration {
        Duration::from_secs(self.sandbox.ttl_seconds.get())
    }
}

impl Loaded {
    /// Whether somebody set this key.
    pub(crate) fn is_set(&self, path: &str) -> bool {
        self.figment.find_metadata(path).is_some_and(|from| from.name != DEFAULT)
    }
}

/// A value given on the command line: path of its key, and text.
pub(crate) type Flag = (&'static str, String);

/// Loads the configuration of this process.
pub(crate) fn load(file: Option<&Path>, flags: &[Flag]) -> Result<Loaded> {
    let mut variables = BTreeMap::new();
    for (name, value) in std::env::vars_os() {
        let Some(name) = name.to_str().filter(|name| name.starts_with("CODELIA_")) else { continue };
        let value = value.into_string().ok().with_context(|| format!("the variable {name} is not UTF-8"))?;
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
        bail!("unknown variable {name}{}", keys::hint(name, KEYS.iter().map(|key| key.env)));
    }
    let mut figment = defaults(data_dir);
    if let Some(path) =
        file.map(PathBuf::from).or_else(|| variables.get(keys::FILE_VARIABLE).map(PathBuf::from))
    {
        figment = figment.merge(checked_file(&path)?);
    }
    for key in KEYS {
        if let Some(text) = variables.get(key.env) {
            figment = figment.merge(One::new(format!("env:{}", key.env), key, text));
        }
    }
    for (path, text) in flags {
        let key = keys::by_path(path).with_context(|| format!("no key {path}"))?;
        figment = figment.merge(One::new("flag".to_owned(), key, text));
    }
    let mut config: Config = figment.extract().map_err(explain)?;
    // What is started from another directory must find the same one.
    config.data_dir = std::path::absolute(&config.data_dir)?;
    Ok(Loaded { config, figment })
}

const DEFAULT: &str = "default";

fn defaults(data_dir: &str) -> Figment {
    let with_default = KEYS.iter().filter_map(|key| {
        let value = if key.path == "data_dir" { Some(data_dir) } else { key.default };
        value.map(|value| One::new(DEFAULT.to_owned(), key, value))
    });
    with_default.fold(Figment::new(), Figment::merge)
}

/// One value from one place.
struct One {
    source: String,
    path: &'static str,
    value: Value,
}

impl One {
    fn new(source: String, key: &Key, text: &str) -> Self {
        Self { source, path: key.path, value: typed(key.kind, text) }
    }
}

impl Provider for One {
    fn metadata(&self) -> Metadata {
        Metadata::named(self.source.clone())
    }

    fn data(&self) -> Result<Map<FigmentProfile, Dict>, figment::Error> {
        let dict = figment::util::nest(self.path, self.value.clone()).into_dict().unwrap_or_default();
        Ok(FigmentProfile::Default.collect(dict))
    }
}

/// The value a text stands for. One that cannot be read stays a text, which its key then refuses.
fn typed(kind: Kind, text: &str) -> Value {
    let read = match kind {
        Kind::Text => None,
        Kind::Whole => text.parse::<i64>().ok().map(Value::from),
        Kind::Real => text.parse::<f64>().ok().map(Value::from),
        Kind::Truth => text.parse::<bool>().ok().map(Value::from),
    };
    read.unwrap_or_else(|| Value::from(text))
}

/// The file as a source, if it can be read and has no unknown key.
fn checked_file(path: &Path) -> Result<impl Provider> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let table: toml::Table = text.parse().with_context(|| format!("cannot read {}", path.display()))?;
    let mut leaves = Vec::new();
    collect_leaves("", &table, &mut leaves);
    if let Some(wrong) = leaves.iter().find(|leaf| keys::by_path(leaf).is_none()) {
        let hint = keys::hint(wrong, KEYS.iter().map(|key| key.path));
        bail!("unknown key {wrong} in {}{hint}", path.display());
    }
    Ok(Toml::file_exact(path))
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

fn explain(error: figment::Error) -> anyhow::Error {
    let lines: Vec<String> = error
        .into_iter()
        .map(|one| {
            let from =
                one.metadata.as_ref().map(|from| format!(" ({})", show::source(from))).unwrap_or_default();
            format!("{}: {}{from}", one.path.join("."), one.kind)
        })
        .collect();
    anyhow::anyhow!("the configuration is wrong: {}", lines.join("; "))
}

/// Where `up` keeps its state if nobody says.
fn default_data_dir() -> Result<String> {
    let variable = |name| std::env::var(name).ok().filter(|value: &String| !value.is_empty());
    if rustix::process::geteuid().is_root() {
        return Ok("/var/lib/codelia".to_owned());
    }
    if let Some(state) = variable("XDG_STATE_HOME") {
        return Ok(format!("{state}/codelia"));
    }
    let home = variable("HOME").context("neither HOME nor CODELIA_DATA_DIR is set")?;
    Ok(format!("{home}/.local/state/codelia"))
}

fn address_or_off<'de, D: Deserializer<'de>>(from: D) -> Result<Option<SocketAddr>, D::Error> {
    let text = String::deserialize(from)?;
    if text.is_empty() { Ok(None) } else { text.parse().map(Some).map_err(serde::de::Error::custom) }
}

/// Names with a value each: `a=b,c=d`.
fn pairs<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<String, String>, D::Error> {
    let text = String::deserialize(from)?;
    let pair = |part: &str| match part.trim().split_once('=') {
        Some((name, value)) if !name.is_empty() && !value.is_empty() => {
            Ok((name.to_owned(), value.to_owned()))
        }
        _ => Err(serde::de::Error::custom(format!("{part:?} is not NAME=VALUE"))),
    };
    text.split(',').filter(|part| !part.trim().is_empty()).map(pair).collect()
}

fn more_than_zero<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    let value = f64::deserialize(from)?;
    if value.is_finite() && value >= 0.001 {
        Ok(value)
    } else {
        Err(serde::de::Error::custom(format!("{value} is not a number of cores")))
    }
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
    fn a_flag_wins_over_a_variable_over_the_file_over_the_default() {
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
    fn the_file_may_be_named_by_its_variable() {
        let file = file("[worker]\nslots = 2\n");
        let variables = [("CODELIA_CONFIG", file.path().to_str().unwrap())];
        assert_eq!(slots(&loaded(None, &[], &variables).unwrap()), 2);
    }

    #[test]
    fn a_file_that_is_not_there_is_refused() {
        assert!(loaded(Some(Path::new("/nowhere.toml")), &[], &[]).is_err());
    }

    #[test]
    fn unknown_keys_and_variables_are_refused_with_a_hint() {
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
    fn a_wrong_value_is_refused_with_its_key_and_source() {
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
    fn images_of_profiles_are_named_in_one_value() {
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
        let usual = loaded(None, &[], &[]).unwrap().config.sandbox.container_images;
        assert_eq!(usual.keys().collect::<Vec<_>>(), ["node", "python", "rust"]);
    }

    #[test]
    fn an_empty_metrics_address_turns_the_page_off() {
        assert_eq!(loaded(None, &[], &[("CODELIA_METRICS_LISTEN", "")]).unwrap().config.metrics.listen, None);
    }

    #[test]
    fn production_admits_no_logical_runs_unless_told_so() {
        let prod = ("CODELIA_PROFILE", "prod");
        assert!(!loaded(None, &[], &[prod]).unwrap().config.allow_logical());
        let told = [prod, ("CODELIA_SANDBOX_ALLOW_LOGICAL", "true")];
        assert!(loaded(None, &[], &told).unwrap().config.allow_logical());
    }
}
