//! The container engine: what is asked of it over its socket, and how it fails.

use std::{path::PathBuf, sync::Arc, time::Duration};

use bollard::{
    API_DEFAULT_VERSION, Docker,
    errors::Error as Failure,
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
use tokio::sync::OnceCell;

use crate::{Error, Gap};

/// How long the engine may take to begin an answer.
const PATIENCE: Duration = Duration::from_secs(60);

const NOT_FOUND: u16 = 404;
/// It is in the state that was asked for, or on its way to it.
const CONFLICT: u16 = 409;

/// Where engines of the same API differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Family {
    Docker,
    /// With control groups of version 1 it gives containers no namespace of their own for them.
    Podman {
        lacks_cgroup_namespaces: bool,
    },
}

impl Family {
    pub(super) fn lacks_cgroup_namespaces(self) -> bool {
        matches!(self, Self::Podman { lacks_cgroup_namespaces: true })
    }
}

/// An engine, spoken to when it is first needed.
#[derive(Debug, Clone)]
pub(super) struct Engine {
    socket: PathBuf,
    connection: Arc<OnceCell<(Docker, Family)>>,
}

impl Engine {
    pub(super) fn new(socket: PathBuf) -> Self {
        Self { socket, connection: Arc::default() }
    }

    async fn docker(&self) -> Result<&Docker, Error> {
        self.connection().await.map(|(docker, _)| docker)
    }

    /// Whose it is.
    pub(super) async fn family(&self) -> Result<Family, Error> {
        self.connection().await.map(|(_, family)| *family)
    }

    async fn connection(&self) -> Result<&(Docker, Family), Error> {
        let missing = |error: Failure| Error::EngineMissing {
            socket: self.socket.clone(),
            complaint: error.to_string(),
        };
        let connect = async {
            let path = self.socket.display().to_string();
            // Old engines speak an older version.
            let docker = Docker::connect_with_unix(&path, PATIENCE.as_secs(), API_DEFAULT_VERSION)?
                .negotiate_version()
                .await?;
            let family = family(&docker).await?;
            Ok((docker, family))
        };
        self.connection.get_or_try_init(|| connect).await.map_err(missing)
    }

    /// Which limits it can set.
    pub(super) async fn limits(&self, gaps: &mut Vec<Gap>) -> Result<Enforceable, Error> {
        let info: SystemInfo = self.docker().await?.info().await.map_err(failed("tell of itself"))?;
        let mut can = |name: &str, says: Option<bool>| {
            let can = says.unwrap_or(false);
            if !can {
                gaps.push(Gap {
                    missing: format!("limits by the {name} controller: the engine cannot set them"),
                    remedy: "give the engine a host with the cpu, cpuset, memory and pids controllers"
                        .to_owned(),
                });
            }
            can
        };
        let cpus = can("cpuset", info.cpu_set);
        let (memory, pids) = (can("memory", info.memory_limit), can("pids", info.pids_limit));
        Ok(Enforceable { memory, pids, cpu: can("cpu", info.cpu_cfs_quota), cpus, ..Enforceable::default() })
    }

    /// Answers the container's id.
    pub(super) async fn create(&self, name: &str, body: ContainerCreateBody) -> Result<String, Error> {
        let options = CreateContainerOptionsBuilder::new().name(name).build();
        let created = self.docker().await?.create_container(Some(options), body).await;
        Ok(created.map_err(failed("create the container"))?.id)
    }

    pub(super) async fn start(&self, name: &str) -> Result<(), Error> {
        self.docker().await?.start_container(name, None).await.map_err(failed("start the container"))
    }

    /// Waits until it does not run; answers its exit code, `None` if it is not there.
    pub(super) async fn ended(&self, name: &str) -> Result<Option<i64>, Error> {
        match self.docker().await?.wait_container(name, None).next().await {
            Some(Ok(ended)) => Ok(Some(ended.status_code)),
            Some(Err(Failure::DockerContainerWaitError { code, .. })) => Ok(Some(code)),
            Some(Err(Failure::DockerResponseServerError { status_code: NOT_FOUND, .. })) => Ok(None),
            Some(Err(error)) => Err(failed("wait for the container")(error)),
            None => Err(Error::InitEnded),
        }
    }

    pub(super) async fn state(&self, name: &str) -> Result<ContainerState, Error> {
        let inspected = self.docker().await?.inspect_container(name, None).await;
        Ok(inspected.map_err(failed("look at the container"))?.state.unwrap_or_default())
    }

    /// Tells whether it can.
    pub(super) async fn limit_pids(&self, name: &str, most: i64) -> Result<bool, Error> {
        let update = ContainerUpdateBody { pids_limit: Some(most), ..ContainerUpdateBody::default() };
        match self.docker().await?.update_container(name, update).await {
            Err(Failure::DockerResponseServerError { status_code: NOT_FOUND, .. }) => Ok(false),
            answer => answer.map(|()| true).map_err(failed("limit the container")),
        }
    }

    pub(super) async fn kill(&self, name: &str) -> Result<(), Error> {
        let options = KillContainerOptionsBuilder::new().signal("KILL").build();
        let killed = self.docker().await?.kill_container(name, Some(options)).await;
        gone(killed).map_err(failed("kill the container"))
    }

    /// Kills it first if it runs. One that is not there is fine.
    pub(super) async fn remove(&self, name: &str) -> Result<(), Error> {
        let options = RemoveContainerOptionsBuilder::new().force(true).v(true).build();
        let removed = self.docker().await?.remove_container(name, Some(options)).await;
        gone(removed).map_err(failed("remove the container"))
    }

    /// All that carry a label, whatever their state.
    pub(super) async fn labelled(&self, label: &str) -> Result<Vec<ContainerSummary>, Error> {
        let filters = [("label".to_owned(), vec![label.to_owned()])].into();
        let options = ListContainersOptionsBuilder::new().all(true).filters(&filters).build();
        self.docker().await?.list_containers(Some(options)).await.map_err(failed("list containers"))
    }
}

async fn family(docker: &Docker) -> Result<Family, Failure> {
    let parts = docker.version().await?.components.unwrap_or_default();
    if !parts.iter().any(|part| part.name.starts_with("Podman")) {
        return Ok(Family::Docker);
    }
    let version = docker.info().await?.cgroup_version;
    Ok(Family::Podman { lacks_cgroup_namespaces: version != Some(SystemInfoCgroupVersionEnum::_2) })
}

fn gone(answer: Result<(), Failure>) -> Result<(), Failure> {
    match answer {
        Err(Failure::DockerResponseServerError { status_code: NOT_FOUND | CONFLICT, .. }) => Ok(()),
        answer => answer,
    }
}

fn failed(step: &'static str) -> impl FnOnce(Failure) -> Error {
    move |error| Error::Engine {
        step,
        complaint: match error {
            Failure::DockerResponseServerError { message, .. } => message,
            error => error.to_string(),
        },
    }
}
