//! The volumes of a run: finds their directories, watches their size while the command may write,
//! and measures them when it has ended.

use std::{collections::BTreeMap, path::PathBuf, sync::atomic::AtomicBool};

use codelia_policy::{VOLUME_BYTES, VolumeMode};
use codelia_store::MountedVolume;
use codelia_types::{Outcome, Reason, VolumeId};
use tokio::task::spawn_blocking;

use super::size::{SizeWatch, Sizes};
use crate::{
    file_work::blocking,
    run::{
        active::ActiveRun,
        executor::{Executor, NotStarted},
        retry::retry_until_fenced,
    },
    sandbox::backends::{Denial, failed},
    workspace::volumes,
};

/// The volumes of a run.
#[derive(Debug, Default)]
pub(crate) struct RunVolumes {
    /// Their directories, by name.
    pub(crate) directories: BTreeMap<String, PathBuf>,
    /// Volumes that the command may write to.
    pub(crate) written: Vec<WrittenVolume>,
}

/// A volume that a command may write to.
#[derive(Debug, Clone)]
pub(crate) struct WrittenVolume {
    id: VolumeId,
    directory: PathBuf,
    /// The maximum of the volume, or what it had before if that was more, so that a command can
    /// remove files.
    max_bytes: u64,
}

/// Watches the sizes of the volumes that a command may write to.
pub(crate) fn watch(written: &[WrittenVolume]) -> Option<SizeWatch> {
    if written.is_empty() {
        return None;
    }
    let written = written.to_vec();
    let is_over =
        |volume: &WrittenVolume| measure(volume).is_some_and(|bytes| bytes > volume.max_bytes);
    let sizes = move |_: &AtomicBool| {
        if written.iter().any(is_over) { Sizes::Exceeded } else { Sizes::Below }
    };
    Some(SizeWatch::start("volume sizes", VOLUME_BYTES, sizes))
}

/// Blocking. The size of a volume; `None` if it cannot be read.
fn measure(volume: &WrittenVolume) -> Option<u64> {
    let measured = volumes::measure(&volume.directory);
    measured
        .inspect_err(|error| tracing::warn!(volume = %volume.id, %error, "cannot measure a volume"))
        .ok()
}

impl Executor {
    /// The volumes of a run, with their directories made. All that its policy names must be there.
    pub(crate) async fn volumes(&self, run: &ActiveRun) -> Result<RunVolumes, NotStarted> {
        let wanted = run.assigned.spec.policy.filesystem.mounted_volumes();
        let mut found = RunVolumes::default();
        if wanted.is_empty() {
            return Ok(found);
        }
        let session = run.assigned.session;
        let root = self.core.root.id;
        let used = || self.core.store.volume_use(session, root);
        let used = retry_until_fenced("use volumes", run, used).await?;
        for one in wanted {
            let Some(mounted) = used.iter().find(|mounted| mounted.name == one.name) else {
                return Err(unavailable(&one.name).into());
            };
            // A writer has the volume for itself: the session must have it, not only the run.
            if one.mode == VolumeMode::Exclusive && !mounted.is_writer {
                return Err(unavailable(&one.name).into());
            }
            let directory = self.volume_directory(mounted).await?;
            if one.mode == VolumeMode::Exclusive {
                let max_bytes = mounted.max_bytes.max(mounted.used_bytes);
                let directory = directory.clone();
                found.written.push(WrittenVolume { id: mounted.id, directory, max_bytes });
            }
            found.directories.insert(one.name.clone(), directory);
        }
        Ok(found)
    }

    async fn volume_directory(&self, volume: &MountedVolume) -> Result<PathBuf, Denial> {
        let dirs = self.core.root.volumes();
        let id = volume.id;
        let created = blocking(move || dirs.create(id)).await;
        created.map_err(|error| failed(&error).into())
    }

    /// Records the sizes of volumes that a command could write to. Returns the outcome, which is
    /// the limit if one is too large.
    pub(crate) async fn measure_volumes(
        &self,
        written: &[WrittenVolume],
        outcome: Outcome,
    ) -> Outcome {
        let mut outcome = outcome;
        for volume in written {
            let id = volume.id;
            let measured = volume.clone();
            let Ok(Some(bytes)) = spawn_blocking(move || measure(&measured)).await else {
                continue;
            };
            if bytes > volume.max_bytes {
                outcome = Outcome::Limit(VOLUME_BYTES.to_owned());
            }
            // The next run records it.
            if let Err(error) = self.core.store.volume_measured(id, self.core.root.id, bytes).await
            {
                tracing::warn!(volume = %id, %error, "cannot record the size of a volume");
            }
        }
        outcome
    }
}

fn unavailable(name: &str) -> Denial {
    let message = format!(
        "policy.filesystem.volumes: volume {name:?} is not mounted by the session, or is on the disk of another \
         worker; create another session"
    );
    Denial::at("policy.filesystem.volumes", Reason::VolumeUnavailable, message)
}
