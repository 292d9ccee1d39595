//! Client of the container engine.

use std::{collections::HashMap, path::PathBuf, sync::Arc, time::Duration};

use bollard::{
    API_DEFAULT_VERSION, Docker,
    errors::Error as EngineError,
    models::{
        ContainerCreateBody, ContainerState, ContainerSummary, ContainerUpdateBody, SystemInfo,
        SystemInfoCgroupVersionEnum,
    },
    query_parameters::{
        CreateContainerOptionsBuilder, KillContainerOptionsBuilder, ListContainersOptionsBuilder,
        RemoveContainerOptionsBuilder,
    },
};
use codelia_policy::Enforceable;
use futures::StreamExt;
use serde::Deserialize;
use tokio::sync::OnceCell;

use crate::{Error, Gap};

/// How long the engine may take to begin a response.
const TIMEOUT: Duration = Duration::from_secs(60);

const NOT_FOUND: u16 = 404;
/// The container is in the requested state, or changing to it.
const CONFLICT: u16 = 409;

/// The engines that differ behind the same API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EngineKind {
    Docker,
    Podman {
        /// On cgroup v1 Podman creates no cgroup namespace for a container.
        lacks_cgroup_namespaces: bool,
    },
}

impl EngineKind {
    pub(super) fn lacks_cgroup_namespaces(self) -> bool {
        matches!(self, Self::Podman { lacks_cgroup_namespaces: true })
    }
}

/// An entry in a list of containers. Without the state: Podman has states that the client does not
/// know, such as `stopped`.
#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct ListedContainer {
    pub(super) id: Option<String>,
    pub(super) labels: Option<HashMap<String, String>>,
}

impl ListedContainer {
    fn parse(answer: &str) -> Result<Vec<Self>, EngineError> {
        Ok(serde_json::from_str(answer)?)
    }
}

impl From<ContainerSummary> for ListedContainer {
    fn from(ContainerSummary { id, labels, .. }: ContainerSummary) -> Self {
        Self { id, labels }
    }
}

/// An engine. Connects on first use.
#[derive(Debug, Clone)]
pub(super) struct Engine {
    socket: PathBuf,
    connection: Arc<OnceCell<(Docker, EngineKind)>>,
}

impl Engine {
    pub(super) fn new(socket: PathBuf) -> Self {
        Self { socket, connection: Arc::default() }
    }

    async fn docker(&self) -> Result<&Docker, Error> {
        self.connection().await.map(|(docker, _)| docker)
    }

    pub(super) async fn kind(&self) -> Result<EngineKind, Error> {
        self.connection().await.map(|(_, kind)| *kind)
    }

    async fn connection(&self) -> Result<&(Docker, EngineKind), Error> {
        let missing = |error: EngineError| Error::EngineMissing {
            socket: self.socket.clone(),
            message: error.to_string(),
        };
        let connect = async {
            let path = self.socket.display().to_string();
            // Old engines have an older version of the API.
            let docker = Docker::connect_with_unix(&path, TIMEOUT.as_secs(), API_DEFAULT_VERSION)?
                .negotiate_version()
                .await?;
            let kind = detect_kind(&docker).await?;
            Ok((docker, kind))
        };
        self.connection.get_or_try_init(|| connect).await.map_err(missing)
    }

    /// The limits that the engine can set.
    pub(super) async fn limits(&self, gaps: &mut Vec<Gap>) -> Result<Enforceable, Error> {
        let info: SystemInfo =
            self.docker().await?.info().await.map_err(failed("read the engine's info"))?;
        let mut check = |controller: &str, supported: Option<bool>| {
            let supported = supported.unwrap_or(false);
            if !supported {
                gaps.push(Gap::new(
                    format!("limits of the {controller} controller: the engine cannot set them"),
                    "run the engine on a host with the cpu, cpuset, memory and pids controllers",
                ));
            }
            supported
        };
        let cpus = check("cpuset", info.cpu_set);
        let memory = check("memory", info.memory_limit);
        let pids = check("pids", info.pids_limit);
        let cpu = check("cpu", info.cpu_cfs_quota);
        Ok(Enforceable { memory, pids, cpu, cpus, ..Enforceable::default() })
    }

    /// Creates a container and returns its id.
    pub(super) async fn create(
        &self,
        name: &str,
        body: ContainerCreateBody,
    ) -> Result<String, Error> {
        let options = CreateContainerOptionsBuilder::new().name(name).build();
        let created = self.docker().await?.create_container(Some(options), body).await;
        Ok(created.map_err(failed("create the container"))?.id)
    }

    pub(super) async fn start(&self, name: &str) -> Result<(), Error> {
        self.docker()
            .await?
            .start_container(name, None)
            .await
            .map_err(failed("start the container"))
    }

    /// Waits until the container stops. Returns its exit code, or `None` if it does not exist.
    pub(super) async fn wait(&self, name: &str) -> Result<Option<i64>, Error> {
        match self.docker().await?.wait_container(name, None).next().await {
            Some(Ok(stopped)) => Ok(Some(stopped.status_code)),
            Some(Err(EngineError::DockerContainerWaitError { code, .. })) => Ok(Some(code)),
            Some(Err(EngineError::DockerResponseServerError {
                status_code: NOT_FOUND, ..
            })) => Ok(None),
            Some(Err(error)) => Err(failed("wait for the container")(error)),
            None => Err(Error::InitExited),
        }
    }

    pub(super) async fn state(&self, name: &str) -> Result<ContainerState, Error> {
        let inspected = self.docker().await?.inspect_container(name, None).await;
        Ok(inspected.map_err(failed("inspect the container"))?.state.unwrap_or_default())
    }

    /// Limits the processes of a running container. Returns `false` if the engine cannot.
    pub(super) async fn limit_pids(&self, name: &str, max: i64) -> Result<bool, Error> {
        let update =
            ContainerUpdateBody { pids_limit: Some(max), ..ContainerUpdateBody::default() };
        match self.docker().await?.update_container(name, update).await {
            Err(EngineError::DockerResponseServerError { status_code: NOT_FOUND, .. }) => Ok(false),
            result => result.map(|()| true).map_err(failed("limit the container")),
        }
    }

    pub(super) async fn kill(&self, name: &str) -> Result<(), Error> {
        let options = KillContainerOptionsBuilder::new().signal("KILL").build();
        let killed = self.docker().await?.kill_container(name, Some(options)).await;
        ignore_absent(killed).map_err(failed("kill the container"))
    }

    /// Kills the container if it runs and removes it. Not an error if it does not exist.
    pub(super) async fn remove(&self, name: &str) -> Result<(), Error> {
        let options = RemoveContainerOptionsBuilder::new().force(true).v(true).build();
        let removed = self.docker().await?.remove_container(name, Some(options)).await;
        ignore_absent(removed).map_err(failed("remove the container"))
    }

    /// Lists the containers with a label, in any state.
    pub(super) async fn list_by_label(&self, label: &str) -> Result<Vec<ListedContainer>, Error> {
        let filters = [("label".to_owned(), vec![label.to_owned()])].into();
        let options = ListContainersOptionsBuilder::new().all(true).filters(&filters).build();
        let listed = match self.docker().await?.list_containers(Some(options)).await {
            Ok(listed) => Ok(listed.into_iter().map(ListedContainer::from).collect()),
            // One of them has a state that Docker does not have.
            Err(EngineError::JsonDataError { contents, .. }) => ListedContainer::parse(&contents),
            Err(error) => Err(error),
        };
        listed.map_err(failed("list containers"))
    }
}

async fn detect_kind(docker: &Docker) -> Result<EngineKind, EngineError> {
    let components = docker.version().await?.components.unwrap_or_default();
    if !components.iter().any(|component| component.name.starts_with("Podman")) {
        return Ok(EngineKind::Docker);
    }
    let version = docker.info().await?.cgroup_version;
    Ok(EngineKind::Podman {
        lacks_cgroup_namespaces: version != Some(SystemInfoCgroupVersionEnum::_2),
    })
}

fn ignore_absent(result: Result<(), EngineError>) -> Result<(), EngineError> {
    match result {
        Err(EngineError::DockerResponseServerError {
            status_code: NOT_FOUND | CONFLICT, ..
        }) => Ok(()),
        result => result,
    }
}

fn failed(step: &'static str) -> impl FnOnce(EngineError) -> Error {
    move |error| Error::Engine {
        step,
        message: match error {
            EngineError::DockerResponseServerError { message, .. } => message,
            error => error.to_string(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_that_only_podman_has_does_not_hide_containers() {
        let answer = r#"[{"Id": "a", "State": "running", "Labels": {"owner": "1"}},
                         {"Id": "b", "State": "stopped", "Labels": null}]"#;
        assert!(serde_json::from_str::<Vec<ContainerSummary>>(answer).is_err(), "the control");
        let listed = ListedContainer::parse(answer).unwrap();
        let labels = HashMap::from([("owner".to_owned(), "1".to_owned())]);
        assert_eq!(listed[0], ListedContainer { id: Some("a".to_owned()), labels: Some(labels) });
        assert_eq!(listed[1], ListedContainer { id: Some("b".to_owned()), labels: None });
    }
}
