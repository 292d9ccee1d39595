//! `VolumeService`: creates, shows and deletes volumes of the caller's tenant. The auth layer
//! requires the scope.

mod mount;

use std::{sync::Arc, time::Duration};

use codelia_proto::{
    duration_to_proto, timestamp_to_proto,
    v1::{self, volume_service_server::VolumeService},
};
use codelia_store::{
    Caller, MAX_VOLUMES, MAX_VOLUMES_BYTES, NewVolume, Volume, VolumeNotCreated, VolumeNotDeleted,
};
use codelia_types::{Reason, VolumeName};

use self::mount::in_use;
pub(crate) use self::mount::{mount, within_session};
use crate::{
    context::Context,
    error::ApiError,
    rpc::serve,
    wire::{paging::Page, resource_name, validate},
};

const DEFAULT_BYTES: i64 = 5 << 30;
const MIN_BYTES: i64 = 1 << 20;
const DEFAULT_TTL: Duration = Duration::from_secs(30 * 24 * 3600);
const MIN_TTL: Duration = Duration::from_secs(60);
const MAX_TTL: Duration = Duration::from_secs(365 * 24 * 3600);

/// Answers the calls of the service, with the state that all of them share.
#[derive(Debug)]
pub(crate) struct Volumes {
    pub(crate) context: Arc<Context>,
}

impl Volumes {
    async fn create_volume(
        &self,
        caller: &Caller,
        wire: v1::CreateVolumeRequest,
    ) -> Result<v1::CreateVolumeResponse, ApiError> {
        let name: VolumeName = wire.volume_id.parse().map_err(|_| {
            ApiError::invalid("volume_id", "must be of [a-z0-9-], 1 to 63 characters")
        })?;
        let project = validate::project("project", wire.project)?;
        let new = NewVolume {
            tenant: &caller.tenant,
            name: &name,
            project: project.as_deref(),
            max_bytes: max_bytes(wire.max_bytes)?,
            ttl: ttl(wire.ttl)?,
            key: caller.key,
        };
        let created = self.context.store.volume_create(new).await?;
        let volume = created.map_err(|why| not_created(&name, why))?;
        Ok(v1::CreateVolumeResponse { volume: Some(to_proto(&volume)) })
    }

    async fn get_volume(
        &self,
        caller: &Caller,
        wire: v1::GetVolumeRequest,
    ) -> Result<v1::GetVolumeResponse, ApiError> {
        let name = resource_name::volume("name", &wire.name)?;
        let volume = self.context.store.volume_get(&caller.tenant, &name).await?;
        let volume = volume.ok_or_else(|| ApiError::not_found("volume", name))?;
        Ok(v1::GetVolumeResponse { volume: Some(to_proto(&volume)) })
    }

    async fn list_volumes(
        &self,
        caller: &Caller,
        wire: v1::ListVolumesRequest,
    ) -> Result<v1::ListVolumesResponse, ApiError> {
        let mut page = Page::<VolumeName, _>::parse(&caller.tenant, &wire)?;
        while let Some(limit) = page.batch() {
            self.context.list_turn(caller).await?;
            let rows =
                self.context.store.volume_list(&caller.tenant, page.after.as_ref(), limit).await?;
            page.add(rows, |volume| (volume.name.clone(), to_proto(&volume)));
        }
        let (volumes, next_page_token) = page.finish();
        Ok(v1::ListVolumesResponse { volumes, next_page_token })
    }

    async fn delete_volume(
        &self,
        caller: &Caller,
        wire: v1::DeleteVolumeRequest,
    ) -> Result<v1::DeleteVolumeResponse, ApiError> {
        let name = resource_name::volume("name", &wire.name)?;
        let deleted = self.context.store.volume_delete(&caller.tenant, &name, caller.key).await?;
        deleted.map_err(|why| not_deleted(&name, why))?;
        Ok(v1::DeleteVolumeResponse {})
    }
}

fn not_created(name: &VolumeName, why: VolumeNotCreated) -> ApiError {
    match why {
        VolumeNotCreated::Exists => {
            let message = format!("volume_id: volume {name} exists; choose another name");
            ApiError::new(Reason::VolumeExists, message)
                .with("field", "volume_id")
                .with("volume", name)
        }
        VolumeNotCreated::TooMany => {
            let message = format!(
                "quota `volumes` reached: the tenant has {MAX_VOLUMES}; delete one that is not used \
                 (codelia volume rm)"
            );
            ApiError::new(Reason::TooManyVolumes, message).of_quota("volumes")
        }
        VolumeNotCreated::NoTenant => ApiError::tenant_deleted(),
    }
}

fn not_deleted(name: &VolumeName, why: VolumeNotDeleted) -> ApiError {
    match why {
        VolumeNotDeleted::NotFound => ApiError::not_found("volume", name),
        VolumeNotDeleted::InUse(session) => {
            let name = name.as_str();
            let message = format!(
                "session {session} mounts volume {name:?}; close it first (codelia session close)"
            );
            in_use(message, name, session).with("field", "name")
        }
    }
}

fn max_bytes(wire: Option<i64>) -> Result<i64, ApiError> {
    match wire {
        None => Ok(DEFAULT_BYTES),
        Some(bytes) if (MIN_BYTES..=MAX_VOLUMES_BYTES).contains(&bytes) => Ok(bytes),
        Some(_) => Err(ApiError::invalid(
            "max_bytes",
            format!("must be from {MIN_BYTES} (1 MiB) to {MAX_VOLUMES_BYTES} (20 GiB)"),
        )),
    }
}

fn ttl(wire: Option<prost_types::Duration>) -> Result<Duration, ApiError> {
    match validate::ttl("ttl", wire, MAX_TTL)? {
        Some(ttl) if ttl < MIN_TTL => Err(ApiError::invalid("ttl", "must be at least 1 minute")),
        ttl => Ok(ttl.unwrap_or(DEFAULT_TTL)),
    }
}

fn to_proto(volume: &Volume) -> v1::Volume {
    v1::Volume {
        name: format!("volumes/{}", volume.name),
        volume_id: volume.name.to_string(),
        project: volume.project.clone().unwrap_or_default(),
        max_bytes: volume.max_bytes,
        ttl: Some(duration_to_proto(volume.ttl)),
        create_time: Some(timestamp_to_proto(volume.created_at)),
        use_time: Some(timestamp_to_proto(volume.used_at)),
        used_bytes: volume.used_bytes,
        sessions: volume.sessions,
        key_id: volume.key.to_string(),
    }
}

serve! {
    VolumeService for Volumes;
    call create_volume(CreateVolumeRequest) -> CreateVolumeResponse;
    call get_volume(GetVolumeRequest) -> GetVolumeResponse;
    call list_volumes(ListVolumesRequest) -> ListVolumesResponse;
    call delete_volume(DeleteVolumeRequest) -> DeleteVolumeResponse;
}
