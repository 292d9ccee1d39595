//! The volumes of a session: which ones it mounts is decided when it is created, and its runs have
//! no others.

use std::time::Duration;

use codelia_policy::{Policy, VolumeMount};
use codelia_store::{SessionVolumes, Store, VolumesMounted};
use codelia_types::{Reason, SessionId};
use tokio::time::{Instant, sleep};

use crate::error::ApiError;

const FIELD: &str = "policy.filesystem.volumes";
/// How long a new session waits for the removal of one that wrote to the same volume and has ended.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(10);
const REMOVAL_INTERVAL: Duration = Duration::from_millis(50);

/// Has a new session mount its volumes.
pub(crate) async fn mount(store: &Store, wanted: SessionVolumes<'_>) -> Result<(), ApiError> {
    let deadline = Instant::now() + REMOVAL_TIMEOUT;
    loop {
        match store.volume_mount(wanted).await? {
            VolumesMounted::Mounted => return Ok(()),
            VolumesMounted::InUse { is_open: false, .. } if Instant::now() < deadline => {
                sleep(REMOVAL_INTERVAL).await;
            }
            refused => return Err(refusal(wanted.volumes, refused)),
        }
    }
}

fn refusal(volumes: &[VolumeMount], refused: VolumesMounted) -> ApiError {
    let field = |name: &str| match volumes.iter().position(|volume| volume.name == name) {
        Some(at) => format!("{FIELD}[{at}].name"),
        None => FIELD.to_owned(),
    };
    match refused {
        VolumesMounted::NotFound(name) => ApiError::invalid(
            field(&name),
            format!("volume {name:?} not found; create it with `codelia volume create {name}`"),
        ),
        VolumesMounted::OtherProject { name, project } => ApiError::invalid(
            field(&name),
            format!(
                "volume {name:?} is only for sessions of project {project:?}; create the session in it"
            ),
        ),
        VolumesMounted::Apart(one, other) => ApiError::invalid(
            FIELD,
            format!(
                "volumes {one:?} and {other:?} are on the disks of different workers; mount one of them, or \
                 delete and create the other again"
            ),
        ),
        VolumesMounted::InUse { name, session, .. } => {
            let message = format!(
                "{FIELD}: session {session} writes to volume {name:?}; close it, or mount the volume with \
                 mode copy or read_only"
            );
            in_use(message, &name, session).with("field", FIELD)
        }
        VolumesMounted::Mounted => ApiError::internal("the volumes are mounted"),
    }
}

/// A session mounts the volume, or writes to it.
pub(super) fn in_use(message: String, volume: &str, session: SessionId) -> ApiError {
    ApiError::new(Reason::VolumeInUse, message).with("volume", volume).with("session", session)
}

/// The policy of a run with only volumes of its session. One that the run requests and the session
/// does not mount is refused.
pub(crate) fn within_session(
    mut policy: Policy,
    requested: &Policy,
    session: &Policy,
) -> Result<Policy, ApiError> {
    let mounted = session.filesystem.mounted_volumes();
    let is_missing = |volume: &&VolumeMount| !mounted.contains(volume);
    if let Some(volume) = requested.filesystem.mounted_volumes().iter().find(is_missing) {
        return Err(ApiError::invalid(
            FIELD,
            format!(
                "the session does not mount volume {:?} so; create a session that does",
                volume.name
            ),
        ));
    }
    // Policies above may have changed since the session was created.
    let volumes = &mut policy.filesystem.volumes;
    if session.filesystem.volumes.is_none() && requested.filesystem.volumes.is_none() {
        *volumes = None;
    }
    volumes.iter_mut().for_each(|volumes| volumes.retain(|volume| mounted.contains(volume)));
    Ok(policy)
}
