//! Network mode `proxy`, from a program in a sandbox to a server in another network namespace.

mod around;
mod asks;
mod caches;
mod credentials;
mod invariants;
mod ipv6;
mod lists;
mod programs;
mod records;
mod restart;
mod tenants;
mod websocket;

use std::{fs, path::Path};

use anyhow::{Context, Result, ensure};
use codelia_policy::CA_VARIABLES;
use codelia_proto::v1::{
    CreateSessionRequest, NetworkMode, NetworkPolicy, Policy, PortList, Run, StartRunRequest,
    TextList,
};
use codelia_store::EventKind;
use codelia_tests::{
    Client, Cluster, Exec, RecordedEvent, TestNetwork, Transcript, recorded_events, shell,
};

use crate::isolation::isolating_with;

/// A host that sessions may reach, and one that they may not. Both lead to the same server.
const ALLOWED: &str = "allowed.example.com";
const OTHER: &str = "other.example.com";

/// The policy of the installation: sessions may have less.
const POLICY: &str = "network: {mode: proxy, allowed_hosts: ['*.example.com', '*.example.org'], \
                      allowed_ports: [80, 443, 5432, 9000]}";

/// The certificate authority of the servers, in a session's workspace.
const CA: &str = "/workspace/ca.pem";
/// The names under which programs look for a proxy.
const PROXY_VARIABLES: &str =
    "http_proxy https_proxy all_proxy no_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY";

/// An installation next to a network with servers.
struct Place {
    network: TestNetwork,
    cluster: Cluster,
    client: Client,
}

impl Place {
    /// Starts it in a mode, or returns `None` if the machine lacks something.
    async fn start(mode: &'static str) -> Result<Option<Self>> {
        Self::start_under(mode, POLICY, Vec::new()).await
    }

    /// The same under a policy of the installation. Containers have the programs of the host.
    async fn start_under(
        mode: &'static str,
        policy: &str,
        settings: Vec<(&'static str, String)>,
    ) -> Result<Option<Self>> {
        let programs = if mode == "container" { host_programs()? } else { String::new() };
        Self::start_without_host_programs(mode, &format!("{policy}\n{programs}"), settings).await
    }

    /// The same; containers have only what is in their image.
    async fn start_without_host_programs(
        mode: &'static str,
        policy: &str,
        settings: Vec<(&'static str, String)>,
    ) -> Result<Option<Self>> {
        let Some(network) = TestNetwork::start().await? else { return Ok(None) };
        Self::start_next_to(network, mode, policy, settings).await
    }

    /// The same next to a network that exists.
    async fn start_next_to(
        network: TestNetwork,
        mode: &'static str,
        policy: &str,
        mut settings: Vec<(&'static str, String)>,
    ) -> Result<Option<Self>> {
        network.serve(&[ALLOWED, OTHER])?;
        let file = network.www().join("../policy.yaml");
        fs::write(&file, policy)?;
        settings.push(("CODELIA_SANDBOX_POLICY", file.display().to_string()));
        settings.push(("CODELIA_EGRESS_RESOLVERS", network.resolver()));
        let Some(cluster) = isolating_with(mode, 1, settings).await? else {
            network.end().await?;
            return Ok(None);
        };
        let client = cluster.tenant("a").await?;
        Ok(Some(Self { network, cluster, client }))
    }

    /// Creates a session whose runs may reach these hosts, with the authority of the servers in it.
    async fn session(&self, hosts: &[&str], ports: &[u16]) -> Result<String> {
        let request = CreateSessionRequest {
            network: NetworkMode::Proxy.into(),
            policy: Some(network_policy(hosts, ports)),
            ..CreateSessionRequest::default()
        };
        let session = self.client.create(request).await?.name;
        self.client.put(&session, "ca.pem", &fs::read_to_string(self.network.authority())?).await?;
        Ok(session)
    }

    /// Runs a script with the authority of the servers.
    async fn run(&self, session: &str, script: &str) -> Result<Transcript> {
        Exec::start(&self.client, with_authority(session, script)).await?.finish().await
    }

    /// Runs a script that must succeed and returns its output.
    async fn output(&self, session: &str, script: &str) -> Result<String> {
        let done = self.run(session, script).await?;
        ensure!(exit_code(&done) == Some(0), "{script}: {done:?}");
        Ok(done.stdout_text())
    }

    async fn events(&self, kind: EventKind) -> Result<Vec<RecordedEvent>> {
        recorded_events(&self.cluster.store, &"a".parse()?, Some(kind)).await
    }

    async fn end(self) -> Result<()> {
        self.cluster.end().await?;
        self.network.end().await
    }
}

fn network_policy(hosts: &[&str], ports: &[u16]) -> Policy {
    let values = hosts.iter().map(|&host| host.to_owned()).collect();
    let allowed_ports = (!ports.is_empty())
        .then(|| PortList { values: ports.iter().map(|&port| i32::from(port)).collect() });
    let network = NetworkPolicy {
        allowed_hosts: Some(TextList { values }),
        allowed_ports,
        ..NetworkPolicy::default()
    };
    Policy { network: Some(network), ..Policy::default() }
}

/// A request to run a script with the authority of the servers.
fn with_authority(session: &str, script: &str) -> StartRunRequest {
    let mut request = shell(session, script);
    if let Some(command) = &mut request.command {
        command.env = CA_VARIABLES.iter().map(|name| ((*name).to_owned(), CA.to_owned())).collect();
    }
    request
}

fn exit_code(done: &Transcript) -> Option<i32> {
    use codelia_proto::v1::outcome::Kind;
    match done.finished.as_ref()?.outcome.as_ref()?.kind.as_ref()? {
        Kind::Exited(code) => Some(*code),
        _ => None,
    }
}

fn finished(done: &Transcript) -> Result<&Run> {
    done.finished.as_ref().context("the run has not ended")
}

/// A policy that gives containers the programs of the host instead of those of the image, as the
/// other modes have them.
fn host_programs() -> Result<String> {
    let mut paths =
        vec!["/usr".to_owned(), "/etc/alternatives".to_owned(), "/etc/ld.so.cache".to_owned()];
    for entry in fs::read_dir("/etc")? {
        let path = entry?.path().display().to_string();
        paths.extend(Some(path).filter(|path| path.starts_with("/etc/java-")));
    }
    Ok(format!("filesystem: {{read_only_paths: [{}]}}\n", paths.join(", ")))
}

/// Whether a program exists where sandboxes see it.
pub(crate) fn is_installed(program: &str) -> bool {
    ["/usr/local/bin", "/usr/bin", "/bin"].iter().any(|dir| Path::new(dir).join(program).exists())
}
