//! The manifests in `deploy/k8s`: they render, are valid for Kubernetes, name what exists, and give
//! no pod more than it needs. Each check has a control with made-up input that it must reject.

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use codelia_tests::{Program, Scratch, available, engine_docker};
use serde_json::{Value, json};

const OVERLAYS: [&str; 4] = ["dev", "prod", "prod-keda", "prod-host-users"];
/// Of kustomize, in which a base can have components.
const MIN_KUBECTL: (u32, u32) = (1, 21);
/// Host paths that a pod may mount: none.
const HOST_PATHS: [&str; 0] = [];
/// What probes may ask, on the port of the metrics.
const PROBES: [&str; 3] = ["/startupz", "/healthz", "/readyz"];
const SECCOMP: &str = "codelia-worker-seccomp.json";

fn deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/k8s")
}

/// Whether this machine can render the manifests.
fn can_render() -> bool {
    let version =
        Command::new("kubectl").args(["version", "--client", "--output", "json"]).output();
    let version = version.ok().and_then(|done| serde_json::from_slice::<Value>(&done.stdout).ok());
    let part = |name: &str| -> Option<u32> {
        let text = version.as_ref()?["clientVersion"][name].as_str()?;
        text.trim_end_matches('+').parse().ok()
    };
    let missing = match part("major").zip(part("minor")) {
        None => Some("no kubectl: install kubernetes-client"),
        Some(found) if found < MIN_KUBECTL => Some("kubectl is older than 1.21"),
        Some(_) => None,
    };
    available("kubectl", missing)
}

fn render(overlay: &str) -> Result<String> {
    let done = Command::new("kubectl")
        .arg("kustomize")
        .arg(deploy().join("overlays").join(overlay))
        .output()?;
    ensure!(done.status.success(), "{overlay}: {}", String::from_utf8_lossy(&done.stderr));
    Ok(String::from_utf8(done.stdout)?)
}

fn objects(overlay: &str) -> Result<Vec<Value>> {
    let text = render(overlay)?;
    let documents = serde_yaml_ng::Deserializer::from_str(&text);
    documents.map(|document| serde::Deserialize::deserialize(document).context("YAML")).collect()
}

/// The template of the pods of an object, if it has any.
fn pod(object: &Value) -> Option<&Value> {
    Some(&object["spec"]["template"]["spec"]).filter(|spec| spec["containers"].is_array())
}

fn containers(pod: &Value) -> impl Iterator<Item = &Value> {
    let all = ["initContainers", "containers"].into_iter().filter_map(|key| pod[key].as_array());
    all.flatten()
}

fn name(object: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or("?").to_owned();
    format!("{}/{}", text(&object["kind"]), text(&object["metadata"]["name"]))
}

/// Returns the values of a container's environment; those from elsewhere are empty.
fn environment(container: &Value, objects: &[Value]) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for source in container["envFrom"].as_array().into_iter().flatten() {
        let map = objects.iter().find(|object| {
            object["kind"] == "ConfigMap"
                && object["metadata"]["name"] == source["configMapRef"]["name"]
        });
        let data = map.and_then(|map| map["data"].as_object()).into_iter().flatten();
        found.extend(
            data.map(|(key, value)| (key.clone(), value.as_str().unwrap_or_default().to_owned())),
        );
    }
    for variable in container["env"].as_array().into_iter().flatten() {
        let text = |key: &str| variable[key].as_str().unwrap_or_default().to_owned();
        found.insert(text("name"), text("value"));
    }
    found
}

/// What a pod has that it must not have, or lacks.
fn pod_violations(pod: &Value) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut check = |ok: bool, what: &str| {
        if !ok {
            wrong.push(what.to_owned());
        }
    };
    check(pod["automountServiceAccountToken"] == false, "has a token");
    for key in ["hostNetwork", "hostPID", "hostIPC"] {
        check(pod[key].as_bool() != Some(true), key);
    }
    for volume in pod["volumes"].as_array().into_iter().flatten() {
        let path = volume["hostPath"]["path"].as_str();
        check(path.is_none_or(|path| HOST_PATHS.contains(&path)), "mounts a host path");
        check(volume["projected"].is_null(), "projects a token");
    }
    for container in containers(pod) {
        let security = &container["securityContext"];
        check(security["privileged"].as_bool() != Some(true), "is privileged");
        check(security["readOnlyRootFilesystem"] == true, "has a writable root");
        check(security["capabilities"]["drop"] == json!(["ALL"]), "keeps capabilities");
        for kind in ["requests", "limits"] {
            for resource in ["cpu", "memory"] {
                check(
                    !container["resources"][kind][resource].is_null(),
                    "lacks requests or limits",
                );
            }
        }
        let profile =
            [&pod["securityContext"], security].map(|context| &context["seccompProfile"]["type"]);
        check(
            profile.iter().any(|kind| **kind == "RuntimeDefault" || **kind == "Localhost"),
            "lacks seccomp",
        );
        let unmasked = security["procMount"] == "Unmasked";
        check(!unmasked || pod["hostUsers"] == false, "unmasks /proc without a user namespace");
        check(
            is_pinned(container["image"].as_str().unwrap_or_default()),
            "has an image without a version",
        );
        for probe in ["startupProbe", "readinessProbe", "livenessProbe"] {
            let get = &container[probe]["httpGet"];
            let known = get["path"].as_str().is_some_and(|path| PROBES.contains(&path));
            check(
                get.is_null() || (known && get["port"] == "metrics"),
                "probes what does not exist",
            );
        }
    }
    wrong
}

/// Whether an image has a digest or a version.
fn is_pinned(image: &str) -> bool {
    let tag = image.rsplit('/').next().and_then(|last| last.split_once(':')).map(|(_, tag)| tag);
    image.contains("@sha256:") || tag.is_some_and(|tag| tag.contains('.') && tag != "latest")
}

#[test]
fn manifests_are_valid_for_three_kubernetes_versions() -> Result<()> {
    let python = env::var_os("CODELIA_TEST_PYTHON");
    let missing =
        python.is_none().then_some("no Python with the validator: run scripts/python-client");
    if !can_render() || !available("python", missing) {
        return Ok(());
    }
    let (python, scratch) = (python.context("python")?, Scratch::new()?);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("clients/python/validate_manifests.py");
    let validate = |files: &[PathBuf]| Command::new(&python).arg(&script).args(files).output();
    let mut files = Vec::new();
    for overlay in OVERLAYS {
        let file = scratch.join(overlay);
        fs::write(&file, render(overlay)?)?;
        files.push(file);
    }
    let done = validate(&files)?;
    let versions = String::from_utf8(done.stdout)?.split_whitespace().count() - 1;
    assert!(done.status.success() && versions == 3, "{}", String::from_utf8_lossy(&done.stderr));
    let wrong = scratch.join("wrong");
    fs::write(&wrong, render("prod")?.replace("hostUsers:", "hostUser:"))?;
    assert!(!validate(&[wrong])?.status.success(), "the control");
    Ok(())
}

#[test]
fn pods_have_no_more_than_they_need() -> Result<()> {
    if !can_render() {
        return Ok(());
    }
    for overlay in OVERLAYS {
        let objects = objects(overlay)?;
        let pods: Vec<_> =
            objects.iter().filter_map(|object| Some((name(object), pod(object)?))).collect();
        assert!(pods.len() >= 4, "{overlay}: {}", pods.len());
        for (name, pod) in pods {
            assert_eq!(pod_violations(pod), Vec::<String>::new(), "{overlay}: {name}");
        }
        let accounts = objects.iter().filter(|object| object["kind"] == "ServiceAccount");
        for account in accounts {
            assert_eq!(
                account["automountServiceAccountToken"],
                false,
                "{overlay}: {}",
                name(account)
            );
        }
    }
    let objects = objects("prod")?;
    let good = objects.iter().filter_map(pod).next().context("a pod")?;
    for (pointer, value) in [
        ("/automountServiceAccountToken", json!(true)),
        ("/hostNetwork", json!(true)),
        ("/volumes/0", json!({ "hostPath": { "path": "/" } })),
        ("/containers/0/securityContext/privileged", json!(true)),
        ("/containers/0/securityContext/readOnlyRootFilesystem", json!(false)),
        ("/containers/0/securityContext/capabilities/drop", json!([])),
        ("/containers/0/resources/limits/memory", Value::Null),
        ("/containers/0/image", json!("codelia:latest")),
        (
            "/containers/0/livenessProbe",
            json!({ "httpGet": { "path": "/nope", "port": "metrics" } }),
        ),
    ] {
        let mut bad = good.clone();
        let (parent, key) = pointer.rsplit_once('/').context("a pointer")?;
        match bad.pointer_mut(parent).context(pointer)? {
            Value::Array(list) => list[key.parse::<usize>()?] = value,
            parent => parent[key] = value,
        }
        assert_eq!(
            pod_violations(&bad).len(),
            1,
            "the control: {pointer}: {:?}",
            pod_violations(&bad)
        );
    }
    Ok(())
}

/// Returns what is wrong with a command line of `codelia`: the program itself decides.
pub(crate) fn command_error(program: &Program, arguments: &[&str]) -> Result<Option<String>> {
    let done = program.command().args(arguments).arg("--help").output()?;
    let error = String::from_utf8_lossy(&done.stderr).lines().next().unwrap_or_default().to_owned();
    Ok((!done.status.success()).then_some(error))
}

/// Returns why the program refuses settings, or those that it does not know.
pub(crate) fn settings_error(
    program: &Program,
    settings: &BTreeMap<String, String>,
) -> Result<Option<String>> {
    let own =
        settings.iter().filter(|(name, value)| name.starts_with("CODELIA_") && !value.is_empty());
    let done = program.command().args(["config", "show", "--json"]).envs(own).output()?;
    let text = String::from_utf8_lossy(&done.stderr).into_owned();
    let rows: Vec<Value> = serde_json::from_slice(&done.stdout).unwrap_or_default();
    let is_known = |name: &&String| rows.iter().any(|row| row["variable"] == name.as_str());
    let unknown =
        settings.keys().filter(|name| name.starts_with("CODELIA_")).find(|name| !is_known(name));
    Ok(if done.status.success() {
        unknown.map(|name| format!("unknown {name}"))
    } else {
        Some(text)
    })
}

#[test]
fn commands_and_settings_of_pods_exist() -> Result<()> {
    if !can_render() {
        return Ok(());
    }
    let program = Program::find()?;
    assert!(command_error(&program, &["wroker"])?.is_some(), "the control");
    assert!(command_error(&program, &["worker", "--no-such-flag"])?.is_some(), "the control");
    for (name, value) in [("CODELIA_WORKER_SLOT", "4"), ("CODELIA_WORKER_SLOTS", "many")] {
        let wrong = BTreeMap::from([(name.to_owned(), value.to_owned())]);
        assert!(settings_error(&program, &wrong)?.is_some(), "the control: {name}");
    }
    let mut commands = 0;
    for overlay in OVERLAYS {
        let objects = objects(overlay)?;
        for object in &objects {
            for container in pod(object).into_iter().flat_map(containers) {
                let words =
                    container["command"].as_array().into_iter().flatten().filter_map(Value::as_str);
                let words: Vec<_> = words.skip_while(|word| *word != "codelia").skip(1).collect();
                if words.is_empty() {
                    continue;
                }
                commands += 1;
                let wrong = command_error(&program, &words)?;
                assert_eq!(wrong, None, "{overlay}: {}: {words:?}", name(object));
                let wrong = settings_error(&program, &environment(container, &objects))?;
                assert_eq!(wrong, None, "{overlay}: {}", name(object));
            }
        }
    }
    assert!(commands >= 5 * OVERLAYS.len(), "{commands}");
    Ok(())
}

/// Compose and Kubernetes use one profile.
#[test]
fn workers_have_one_seccomp_profile() -> Result<()> {
    let root = deploy().join("..");
    ensure!(root.join(SECCOMP).is_file(), "{SECCOMP}");
    let compose = fs::read_to_string(root.join("compose.yaml"))?;
    let named: Vec<_> =
        compose.lines().filter_map(|line| line.trim().strip_prefix("- seccomp:")).collect();
    ensure!(
        !named.is_empty() && named.iter().all(|path| *path == format!("./{SECCOMP}")),
        "{named:?}"
    );
    let worker = fs::read_to_string(deploy().join("base/worker.yaml"))?;
    ensure!(worker.contains(&format!("localhostProfile: {SECCOMP}\n")), "the worker's profile");
    for copy in ["docker/codelia/seccomp.json", "k8s/node/codelia-worker-seccomp.json"] {
        ensure!(!root.join(copy).exists(), "a second profile: {copy}");
    }
    Ok(())
}

#[test]
fn workers_have_time_to_drain() -> Result<()> {
    if !can_render() {
        return Ok(());
    }
    for overlay in OVERLAYS {
        let objects = objects(overlay)?;
        for part in ["worker", "api"] {
            let name = format!("codelia-{part}");
            let object = objects
                .iter()
                .find(|object| object["metadata"]["name"] == name && pod(object).is_some());
            let pod = object.and_then(pod).context(name)?;
            let container = &pod["containers"][0];
            let settings = environment(container, &objects);
            let seconds = |name: &str| -> Result<u64> {
                Ok(settings.get(name).context("a setting")?.trim_end_matches('s').parse()?)
            };
            let drain = seconds("CODELIA_WORKER_DRAIN_GRACE")?;
            let before =
                container["lifecycle"]["preStop"]["sleep"]["seconds"].as_u64().unwrap_or(0);
            let grace = pod["terminationGracePeriodSeconds"].as_u64().context("a grace period")?;
            assert!(
                grace >= before + drain + 10,
                "{overlay}: {part}: {grace} s for {before} + {drain} s"
            );
            if part == "worker" {
                let longest = seconds("CODELIA_LIMITS_MAX_TIMEOUT")?;
                assert!(
                    drain >= longest,
                    "{overlay}: a run of {longest} s outlives a drain of {drain} s"
                );
            }
        }
    }
    Ok(())
}

/// What the worker of the overlay `prod-host-users` may do, as options of `docker run`.
fn worker_options(pod: &Value) -> Vec<String> {
    let capabilities = pod["containers"][0]["securityContext"]["capabilities"]["add"].as_array();
    let capabilities = capabilities.into_iter().flatten().filter_map(Value::as_str);
    let profile = format!("seccomp={}", deploy().join("..").join(SECCOMP).display());
    let mut options = vec!["--cap-drop=ALL".to_owned(), "--security-opt".to_owned(), profile];
    options.extend(capabilities.map(|capability| format!("--cap-add={capability}")));
    options
}

/// Asks `codelia doctor` in a container whether it can isolate commands in the mode of the
/// manifests.
fn is_native_usable(options: &[String]) -> Result<bool> {
    let program = Program::find()?;
    let init = env::var("CODELIA_INIT").context("CODELIA_INIT")?;
    let prepare = deploy().join("components/host-users");
    let mount = |from: &Path, to: &str| format!("--volume={}:{to}:ro", from.display());
    let mut arguments: Vec<String> =
        ["run", "--rm", "--network=none", "--read-only"].map(str::to_owned).to_vec();
    arguments.extend(
        ["/tmp", "/run", "/var/lib/codelia:exec,mode=755"].map(|dir| format!("--tmpfs={dir}")),
    );
    arguments.extend(options.iter().cloned());
    // The image of the tests is small.
    arguments.push(mount(Path::new("/usr"), "/usr"));
    arguments.push(mount(&prepare, "/prepare"));
    arguments.push(mount(program.path(), "/opt/codelia/codelia"));
    arguments.push(mount(Path::new(&init), "/opt/codelia/codelia-init"));
    arguments.extend(
        ["--env=CODELIA_DATA_DIR=/var/lib/codelia", "--env=CODELIA_SANDBOX_MODE=native"]
            .map(str::to_owned),
    );
    arguments.push("codelia-base".to_owned());
    arguments.extend(
        ["/bin/sh", "/prepare/prepare.sh", "/opt/codelia/codelia", "doctor", "--json"]
            .map(str::to_owned),
    );
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = engine_docker(&arguments)?;
    let Ok(report) = serde_json::from_slice::<Value>(&done.stdout) else { return Ok(false) };
    let modes = report["modes"].as_array().context("modes")?;
    let usable = modes.iter().any(|mode| mode["mode"] == "native" && mode["usable"] == true);
    assert_eq!(
        usable,
        done.status.success(),
        "doctor fails if the configured mode is not usable: {report}"
    );
    Ok(usable)
}

/// On the host of this test, with the capabilities, the seccomp profile and the script of the
/// manifests.
#[test]
fn unprivileged_worker_container_isolates_commands() -> Result<()> {
    let missing =
        env::var_os(codelia_tests::ENGINE_SOCKET).is_none().then_some("no engine: use with-engine");
    if !available("container", missing) || !can_render() {
        return Ok(());
    }
    let objects = objects("prod-host-users")?;
    let worker = objects
        .iter()
        .find(|object| object["kind"] == "StatefulSet")
        .and_then(pod)
        .context("the worker")?;
    let options = worker_options(worker);
    assert!(is_native_usable(&options)?);
    let without_admin: Vec<_> =
        options.iter().filter(|word| !word.ends_with("SYS_ADMIN")).cloned().collect();
    assert!(!is_native_usable(&without_admin)?, "the control: no capability to mount");
    Ok(())
}
