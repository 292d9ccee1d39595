//! Removes what killed workers left: containers by their labels, control directories by the names
//! of their links.

use std::{fs, io, path::Path};

use codelia_sys::process_id::ProcessId;

use super::{control_dir, engine::Engine, spec};
use crate::Error;

/// Removes the containers whose owner was a process of our PID namespace and is gone. Owners in
/// other namespaces cannot be checked from here.
pub(super) async fn remove_containers(engine: &Engine) -> Result<usize, Error> {
    let mut removed = 0;
    let label = format!("{}={}", spec::NAMESPACE_LABEL, spec::pid_namespace()?);
    for container in engine.list_by_label(&label).await? {
        let labels = container.labels.unwrap_or_default();
        let owner = labels.get(spec::OWNER_LABEL).and_then(|owner| owner.parse::<ProcessId>().ok());
        if let (Some(id), Some(false)) = (container.id, owner.map(ProcessId::is_alive)) {
            engine.remove(&id).await?;
            removed += 1;
        }
    }
    Ok(removed)
}

/// Removes the control directories whose owner is gone.
pub(super) fn remove_directories(parent: &Path) -> Result<usize, Error> {
    let entries = match fs::read_dir(parent) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        entries => entries?,
    };
    let mut removed = 0;
    for entry in entries {
        let entry = entry?;
        let owner = entry.file_name().to_str().and_then(ProcessId::from_name_prefix);
        if owner.is_some_and(|owner| !owner.is_alive()) {
            let link = entry.path();
            // Another worker may have removed it meanwhile.
            let Ok(name) = fs::read_link(&link) else { continue };
            control_dir::remove(&parent.join(name), &link)?;
            removed += 1;
        }
    }
    Ok(removed)
}
