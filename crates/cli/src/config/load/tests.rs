use std::io::Write;

use codelia_types::ByteSize;

use super::*;

pub(crate) fn loaded(
    file: Option<&Path>,
    flags: &[Flag],
    variables: &[(&str, &str)],
) -> Result<Loaded> {
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
    let file = file("[worker]\nslots = 2\n[sandbox]\nttl = \"1m\"\n");
    let variables = [("CODELIA_WORKER_SLOTS", "3")];
    let flags = [("worker.slots", "4".to_owned())];
    let by_file = loaded(Some(file.path()), &[], &[]).unwrap();
    assert_eq!((slots(&by_file), by_file.config.sandbox.ttl.as_secs()), (2, 60));
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
        ("CODELIA_SANDBOX_TTL_SECONDS", "sandbox.ttl", "0"),
        ("CODELIA_SANDBOX_TTL_SECONDS", "sandbox.ttl", "-5"),
        ("CODELIA_SANDBOX_TTL_SECONDS", "sandbox.ttl", "soon"),
        ("CODELIA_SANDBOX_NETWORK", "sandbox.network", "maybe"),
        ("CODELIA_SANDBOX_CPU_LIMIT", "sandbox.cpu_limit", "0"),
        ("CODELIA_SANDBOX_CPU_LIMIT", "sandbox.cpu_limit", "-1"),
        ("CODELIA_SANDBOX_CPU_LIMIT", "sandbox.cpu_limit", "NaN"),
        ("CODELIA_SANDBOX_MEMORY_LIMIT_MB", "sandbox.memory_limit", "0"),
        ("CODELIA_API_LISTEN", "api.listen", "here"),
        ("CODELIA_METRICS_LISTEN", "metrics.listen", "here"),
        ("CODELIA_WORKER_SLOTS", "worker.slots", "0"),
        ("CODELIA_WORKER_SLOTS", "worker.slots", "many"),
        ("CODELIA_API_ALLOW_PLAINTEXT", "api.allow_plaintext", "maybe"),
        ("CODELIA_API_STREAM_WINDOW", "api.stream_window", "64"),
        ("CODELIA_WORKER_LEASE_TTL", "worker.lease_ttl", "15"),
    ] {
        let error = loaded(None, &[], &[(name, value)]).unwrap_err().to_string();
        assert!(error.contains(key) && error.contains(&format!("env:{name}")), "{error}");
    }
}

#[test]
fn variables_have_the_type_of_their_key() {
    let variables = [
        ("CODELIA_WORKER_ID", "7"),
        ("CODELIA_WORKER_SLOTS", "7"),
        ("CODELIA_LIMITS_MAX_CPUS", "7"),
        ("CODELIA_SANDBOX_ALLOW_LOGICAL", "false"),
        ("CODELIA_OUTPUT_S3_REGION", "true"),
        ("CODELIA_SANDBOX_TTL_SECONDS", "77"),
        ("CODELIA_SANDBOX_MEMORY_LIMIT_MB", "64"),
    ];
    let config = loaded(None, &[], &variables).unwrap().config;
    assert_eq!(config.worker.id.map(|id| id.to_string()).as_deref(), Some("7"));
    assert_eq!(config.worker.slots.map(usize::from), Some(7));
    assert_eq!(config.limits.max_cpus.map(f64::from), Some(7.0));
    assert_eq!(config.sandbox.allow_logical, Some(false));
    assert_eq!(config.output.s3_region, "true");
    assert_eq!(config.sandbox.ttl.as_secs(), 77);
    assert_eq!(config.sandbox.memory_limit, ByteSize::mib(64));
    let with_unit = [("CODELIA_SANDBOX_TTL_SECONDS", "10m")];
    assert_eq!(loaded(None, &[], &with_unit).unwrap().config.sandbox.ttl.as_secs(), 600);
}

#[test]
fn profile_images_are_parsed_from_pairs() {
    let key = "CODELIA_SANDBOX_CONTAINER_IMAGES";
    let images = |text| {
        loaded(None, &[], &[(key, text)]).map(|loaded| loaded.config.sandbox.container_images)
    };
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
    assert_eq!(
        loaded(None, &[], &[("CODELIA_METRICS_LISTEN", "")]).unwrap().config.metrics.listen,
        None
    );
}

#[test]
fn prod_profile_disallows_logical_runs_by_default() {
    let prod = ("CODELIA_PROFILE", "prod");
    assert!(!loaded(None, &[], &[prod]).unwrap().config.allow_logical());
    let allowed = [prod, ("CODELIA_SANDBOX_ALLOW_LOGICAL", "true")];
    assert!(loaded(None, &[], &allowed).unwrap().config.allow_logical());
}
