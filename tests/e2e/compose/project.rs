//! Creates the containers, networks and volumes of a compose file. A key that is not applied here
//! is an error, so that the file and the test cannot differ.

use std::{collections::BTreeMap, fs, process::Command};

use anyhow::{Context, Result, bail, ensure};
use codelia_tests::{ENGINE_SOCKET, Program, Scratch, TEST_CONTAINER, engine_command, eventually};
use serde_json::Value;

use super::{deploy, is_own};

/// Settings of the test: a dead worker is detected quickly.
const SETTINGS: [&str; 2] = ["CODELIA_WORKER_LEASE_TTL=3s", "CODELIA_WORKER_POLL_INTERVAL=200ms"];

/// What the image of Postgres does at its first start, with the host's programs.
const POSTGRES: &str = r#"#!/bin/sh
set -eu
data=/var/lib/postgresql/data
initdb --pgdata $data --username $POSTGRES_USER --pwfile $POSTGRES_PASSWORD_FILE --auth scram-sha-256 >/dev/null
echo 'host all all all scram-sha-256' >> $data/pg_hba.conf
echo "CREATE DATABASE $POSTGRES_DB" | postgres --single -D $data postgres >/dev/null
shift
exec postgres -D $data -c listen_addresses=* -c unix_socket_directories=/tmp "$@"
"#;

/// The parts of a service that this test applies.
#[derive(Debug, Default)]
pub(super) struct Service {
    pub(super) image: String,
    pub(super) user: String,
    pub(super) cap_drop: Vec<String>,
    pub(super) cap_add: Vec<String>,
    pub(super) security_opt: Vec<String>,
    entrypoint: Vec<String>,
    command: Vec<String>,
    environment: Vec<String>,
    networks: Vec<String>,
    volumes: Vec<String>,
    tmpfs: Vec<String>,
    healthcheck: Vec<String>,
    /// Services and the conditions under which this one starts.
    depends_on: Vec<(String, String)>,
    options: Vec<String>,
}

#[derive(Debug)]
pub(super) struct Project {
    pub(super) services: BTreeMap<String, Service>,
    /// Names with whether nothing outside is reached.
    networks: Vec<(String, bool)>,
    volumes: Vec<String>,
}

impl Project {
    pub(super) fn read() -> Result<Self> {
        let text = fs::read_to_string(deploy().join("compose.yaml"))?;
        let mut file: serde_yaml_ng::Value = serde_yaml_ng::from_str(&text)?;
        // What is merged may contain merges.
        while serde_yaml_ng::to_string(&file)?.contains("<<:") {
            file.apply_merge()?;
        }
        let file = serde_json::to_value(file)?;
        let (mut networks, mut volumes, mut services) = (Vec::new(), Vec::new(), BTreeMap::new());
        for (key, value) in map(&file)? {
            match key.as_str() {
                "name" => {}
                key if key.starts_with("x-") => {}
                "networks" => {
                    for (name, network) in map(value)? {
                        networks.push((name.clone(), network["internal"] == true));
                    }
                }
                "volumes" => volumes = map(value)?.keys().cloned().collect(),
                "services" => {
                    for (name, service) in map(value)? {
                        services.insert(
                            name.clone(),
                            Service::parse(service).with_context(|| name.clone())?,
                        );
                    }
                }
                other => bail!("{other} is not applied by this test"),
            }
        }
        Ok(Self { services, networks, volumes })
    }

    /// Builds the image and starts the services in the order of their dependencies.
    pub(super) async fn start(self) -> Result<Started> {
        let prefix = format!("{TEST_CONTAINER}{}", uuid::Uuid::new_v4().simple());
        let started =
            Started { prefix, project: self, scratch: Scratch::new()?, is_removed: false };
        started.start().await.with_context(|| started.logs())?;
        Ok(started)
    }
}

impl Service {
    fn parse(value: &Value) -> Result<Self> {
        let mut service = Self::default();
        for (key, value) in map(value)? {
            match key.as_str() {
                "image" => service.image = text(value)?,
                "user" => service.user = text(value)?,
                "cap_drop" => service.cap_drop = list(value)?,
                "cap_add" => service.cap_add = list(value)?,
                "security_opt" => service.security_opt = list(value)?,
                "entrypoint" => service.entrypoint = list(value)?,
                "command" => service.command = list(value)?,
                "networks" => service.networks = list(value)?,
                "volumes" => service.volumes = list(value)?,
                "tmpfs" => service.tmpfs = list(value)?,
                "healthcheck" => service.healthcheck = list(&value["test"])?,
                "environment" => {
                    for (name, value) in map(value)? {
                        service.environment.push(format!("{name}={}", text(value)?));
                    }
                }
                "depends_on" => {
                    for (name, value) in map(value)? {
                        service.depends_on.push((name.clone(), text(&value["condition"])?));
                    }
                }
                "read_only" => service.options.push(format!("--read-only={value}")),
                "mem_limit" => service.options.push(format!("--memory={}", text(value)?)),
                "pids_limit" => service.options.push(format!("--pids-limit={value}")),
                // A container that dies is not restarted, so that the test sees it. Addresses are
                // called directly.
                "restart" | "ports" => {}
                other => bail!("{other} is not applied by this test"),
            }
        }
        Ok(service)
    }
}

#[derive(Debug)]
pub(super) struct Started {
    prefix: String,
    project: Project,
    scratch: Scratch,
    is_removed: bool,
}

impl Drop for Started {
    fn drop(&mut self) {
        if !self.is_removed {
            // The test has failed: what remains is only reported.
            let _ = self.remove_all().inspect_err(|error| eprintln!("{error:#}"));
        }
    }
}

impl Started {
    fn name(&self, name: &str) -> String {
        format!("{}-{name}", self.prefix)
    }

    async fn start(&self) -> Result<()> {
        self.build_image()?;
        self.build_postgres_image()?;
        for (name, internal) in &self.project.networks {
            let internal = format!("--internal={internal}");
            engine_command(&["network", "create", &internal, &self.name(name)])?;
        }
        for volume in &self.project.volumes {
            engine_command(&["volume", "create", &self.name(volume)])?;
        }
        let mut waiting: Vec<_> = self.project.services.keys().collect();
        while !waiting.is_empty() {
            let is_ready = |name: &&String| {
                self.project.services[*name]
                    .depends_on
                    .iter()
                    .all(|(other, _)| !waiting.contains(&other))
            };
            let at = waiting.iter().position(is_ready).context("dependencies form a cycle")?;
            let name = waiting.remove(at);
            self.start_service(name).await.with_context(|| format!("service {name}"))?;
        }
        Ok(())
    }

    /// The image of deploy/docker/codelia with the programs of this build.
    fn build_image(&self) -> Result<()> {
        let context = self.scratch.join("context");
        fs::create_dir(&context)?;
        Program::find()?.copied_into(&context)?;
        let nsjail = std::env::var("CODELIA_NSJAIL").context("CODELIA_NSJAIL")?;
        // With its libraries, if it comes with them.
        let source = nsjail.strip_suffix("/nsjail/bin/nsjail").unwrap_or(&nsjail);
        let copied = Command::new("cp").arg("-r").arg(source).arg(context.join("nsjail")).status();
        ensure!(copied?.success(), "copy nsjail");
        fs::copy(deploy().join("docker/codelia/Dockerfile"), context.join("Dockerfile"))?;
        let (tag, context) = (self.name("image"), context.display().to_string());
        engine_command(&[
            "build",
            "--quiet",
            "--build-arg",
            "BASE=codelia-base",
            "--tag",
            &tag,
            &context,
        ])?;
        Ok(())
    }

    async fn start_service(&self, name: &str) -> Result<()> {
        let service = &self.project.services[name];
        for (other, condition) in &service.depends_on {
            match condition.as_str() {
                "service_completed_successfully" => self.wait_for_success(other)?,
                "service_healthy" => self.wait_until_healthy(other).await?,
                other => bail!("condition {other} is not applied by this test"),
            }
        }
        let create = self.create_arguments(name, service)?;
        engine_command(&create.iter().map(String::as_str).collect::<Vec<_>>())?;
        let container = self.name(name);
        for network in service.networks.iter().skip(1) {
            engine_command(&[
                "network",
                "connect",
                "--alias",
                name,
                &self.name(network),
                &container,
            ])?;
        }
        engine_command(&["start", &container]).map(drop)
    }

    fn create_arguments(&self, name: &str, service: &Service) -> Result<Vec<String>> {
        let mut create = vec!["create".to_owned(), format!("--name={}", self.name(name))];
        let mut add = |option: &str, value: &str| create.push(format!("--{option}={value}"));
        add("user", &service.user);
        add("network-alias", name);
        add("network", &self.name(service.networks.first().context("a network")?));
        service.cap_drop.iter().for_each(|it| add("cap-drop", it));
        service.cap_add.iter().for_each(|it| add("cap-add", it));
        service.tmpfs.iter().for_each(|it| add("tmpfs", it));
        service.environment.iter().for_each(|it| add("env", it));
        for option in &service.security_opt {
            // A path in the file is relative to it.
            let path = option.strip_prefix("seccomp:").map(|path| deploy().join(path));
            add(
                "security-opt",
                &path.map_or(option.clone(), |path| format!("seccomp={}", path.display())),
            );
        }
        for volume in &service.volumes {
            let is_path = volume.starts_with('.');
            let source = if is_path {
                format!("{}/", deploy().canonicalize()?.display())
            } else {
                self.name("")
            };
            add("volume", &format!("{source}{}", volume.strip_prefix("./").unwrap_or(volume)));
        }
        create.extend(service.options.iter().cloned());
        if is_own(service) {
            create.extend(SETTINGS.map(|setting| format!("--env={setting}")));
            let [program, arguments @ ..] = service.entrypoint.as_slice() else {
                create.push(self.name("image"));
                create.extend(service.command.iter().cloned());
                return Ok(create);
            };
            create.extend([format!("--entrypoint={program}"), self.name("image")]);
            create.extend(arguments.iter().cloned());
            return Ok(create);
        }
        ensure!(service.image.starts_with("postgres:"), "{} has no stand-in", service.image);
        create.extend(self.postgres_stand_in()?);
        create.extend(service.command.iter().cloned());
        Ok(create)
    }

    /// An image with the host's Postgres in place of the one that cannot be pulled here.
    fn build_postgres_image(&self) -> Result<()> {
        let context = self.scratch.join("postgres");
        fs::create_dir(&context)?;
        fs::write(context.join("postgres.sh"), POSTGRES)?;
        fs::write(
            context.join("Dockerfile"),
            "FROM codelia-base\n\
             RUN echo postgres:x:999:999::/:/bin/sh >> /etc/passwd && install -d -o 999 -g 999 /var/lib/postgresql/data\n\
             COPY postgres.sh /\n",
        )?;
        let (tag, context) = (self.name("postgres-image"), context.display().to_string());
        engine_command(&["build", "--quiet", "--tag", &tag, &context]).map(drop)
    }

    fn postgres_stand_in(&self) -> Result<Vec<String>> {
        let versions = fs::read_dir("/usr/lib/postgresql").context("Postgres of the host")?;
        let programs =
            versions.flatten().next().context("no Postgres of the host")?.path().join("bin");
        Ok(vec![
            format!("--env=PATH={}:/usr/bin", programs.display()),
            "--volume=/usr:/usr:ro".to_owned(),
            "--entrypoint=sh".to_owned(),
            self.name("postgres-image"),
            "/postgres.sh".to_owned(),
        ])
    }

    fn wait_for_success(&self, service: &str) -> Result<()> {
        let code = engine_command(&["wait", &self.name(service)])?;
        ensure!(code.trim() == "0", "{service} exited with {code}");
        Ok(())
    }

    async fn wait_until_healthy(&self, service: &str) -> Result<()> {
        let check = &self.project.services[service].healthcheck;
        ensure!(check.first().is_some_and(|kind| kind == "CMD"), "{check:?}");
        let check: Vec<_> = check[1..].iter().map(String::as_str).collect();
        eventually("the service is healthy", || async { self.exec(service, &check).ok() }).await;
        Ok(())
    }

    /// Runs a command in the container of a service.
    pub(super) fn exec(&self, service: &str, command: &[&str]) -> Result<String> {
        engine_command(&[&["exec", &self.name(service)], command].concat())
    }

    /// The address of a service in a network.
    pub(super) fn address(&self, service: &str, network: &str) -> Result<String> {
        let field = format!(
            "{{{{(index .NetworkSettings.Networks \"{}\").IPAddress}}}}",
            self.name(network)
        );
        Ok(engine_command(&["inspect", "--format", &field, &self.name(service)])?.trim().to_owned())
    }

    pub(super) fn kill(&self, service: &str) -> Result<()> {
        engine_command(&["kill", "--signal=KILL", &self.name(service)]).map(drop)
    }

    /// The last lines of every service, to find out what failed.
    pub(super) fn logs(&self) -> String {
        let mut all = String::new();
        for service in self.project.services.keys() {
            let name = self.name(service);
            let lines = container_log(&name).unwrap_or_else(|error| format!("{error}\n"));
            let state =
                engine_command(&["inspect", "--format={{json .State}}", &name]).unwrap_or_default();
            all += &format!("--- {service} {state}{lines}");
        }
        all
    }

    pub(super) fn remove(mut self) -> Result<()> {
        self.is_removed = true;
        self.remove_all()
    }

    fn remove_all(&self) -> Result<()> {
        let mut removed = Ok(());
        let mut remove = |arguments: &[&str], name: &str| {
            let done = engine_command(&[arguments, &[&self.name(name)]].concat());
            if removed.is_ok() {
                removed = done.map(drop);
            }
        };
        for service in self.project.services.keys() {
            remove(&["rm", "--force", "--volumes"], service);
        }
        self.project.networks.iter().for_each(|(name, _)| remove(&["network", "rm"], name));
        self.project.volumes.iter().for_each(|name| remove(&["volume", "rm", "--force"], name));
        remove(&["rmi", "--force"], "image");
        remove(&["rmi", "--force"], "postgres-image");
        removed
    }
}

/// What a container wrote last, to either stream.
fn container_log(name: &str) -> Result<String> {
    let host = format!("unix://{}", std::env::var(ENGINE_SOCKET)?);
    let done =
        Command::new("docker").args(["--host", &host, "logs", "--tail=30", name]).output()?;
    Ok(String::from_utf8_lossy(&[done.stdout, done.stderr].concat()).into_owned())
}

fn map(value: &Value) -> Result<&serde_json::Map<String, Value>> {
    value.as_object().with_context(|| format!("{value} is not a map"))
}

fn text(value: &Value) -> Result<String> {
    value.as_str().map(str::to_owned).with_context(|| format!("{value} is not a text"))
}

fn list(value: &Value) -> Result<Vec<String>> {
    value.as_array().with_context(|| format!("{value} is not a list"))?.iter().map(text).collect()
}
