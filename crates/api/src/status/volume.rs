//! [`VolumeError`]: why a volume is not created, mounted or deleted.

use std::collections::HashMap;

use codelia_store::{MAX_VOLUMES, VolumeNotCreated, VolumeNotDeleted};
use codelia_types::{Reason, SessionId, VolumeName};
use tonic::Code;

use super::error::ApiError;

/// Why a volume is not created, mounted or deleted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum VolumeError {
    /// A session mounts it, or writes to it.
    InUse { name: String, session: SessionId, is_writer: bool },
    /// The tenant has one with this name.
    Exists(VolumeName),
    /// The tenant has as many as it may.
    TooMany,
}

impl VolumeError {
    /// The text for the caller.
    pub(super) fn text(&self) -> String {
        match self {
            Self::InUse { name, session, is_writer: true } => format!(
                "policy.filesystem.volumes: session {session} writes to volume {name:?}; close it, or mount the \
                 volume with mode copy or read_only"
            ),
            Self::InUse { name, session, is_writer: false } => {
                format!("session {session} mounts volume {name:?}; close it first (codelia session close)")
            }
            Self::Exists(name) => format!("volume_id: volume {name} exists; choose another name"),
            Self::TooMany => format!(
                "quota `volumes` reached: the tenant has {MAX_VOLUMES}; delete one that is not used (codelia \
                 volume rm)"
            ),
        }
    }

    pub(super) fn code_and_reason(&self) -> (Code, Reason) {
        match self {
            Self::InUse { .. } => (Code::FailedPrecondition, Reason::VolumeInUse),
            Self::Exists(_) => (Code::AlreadyExists, Reason::VolumeExists),
            Self::TooMany => (Code::ResourceExhausted, Reason::TooManyVolumes),
        }
    }

    /// The field, the volume and the session that has it.
    pub(super) fn metadata(&self) -> HashMap<String, String> {
        let named = |pairs: &[(&str, String)]| {
            pairs.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect()
        };
        match self {
            Self::InUse { name, session, is_writer } => {
                let field = if *is_writer { "policy.filesystem.volumes" } else { "name" };
                named(&[
                    ("field", field.to_owned()),
                    ("volume", name.clone()),
                    ("session", session.to_string()),
                ])
            }
            Self::Exists(name) => named(&[("field", "volume_id".to_owned()), ("volume", name.to_string())]),
            // The quota, which is described as others are.
            Self::TooMany => HashMap::new(),
        }
    }
}

impl ApiError {
    /// Why a volume was not created.
    pub(crate) fn volume_not_created(name: &VolumeName, why: VolumeNotCreated) -> Self {
        match why {
            VolumeNotCreated::Exists => Self::Volume(VolumeError::Exists(name.clone())),
            VolumeNotCreated::TooMany => Self::Volume(VolumeError::TooMany),
            VolumeNotCreated::NoTenant => Self::TenantDeleted,
        }
    }

    /// Why a volume was not deleted.
    pub(crate) fn volume_not_deleted(name: &VolumeName, why: VolumeNotDeleted) -> Self {
        match why {
            VolumeNotDeleted::NotFound => Self::not_found("volume", name),
            VolumeNotDeleted::InUse(session) => {
                let name = name.to_string();
                Self::Volume(VolumeError::InUse { name, session, is_writer: false })
            }
        }
    }
}
