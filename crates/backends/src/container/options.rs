//! Configuration of the mode.

use std::{collections::BTreeMap, path::PathBuf};

use codelia_policy::Plan;

use crate::Error;

/// Configuration of mode `container`.
#[derive(Debug, Clone)]
pub struct ContainerOptions {
    /// Path of `codelia-init`, as the engine sees it.
    pub init: PathBuf,
    /// The engine's socket.
    pub socket: PathBuf,
    /// The engine's name for the OCI runtime. `None` for its default.
    pub runtime: Option<String>,
    /// The default image.
    pub image: String,
    /// The images of profiles, by name. Profile `base` falls back to the default image.
    pub profile_images: BTreeMap<String, String>,
    /// Where each sandbox gets a directory for its control socket. The engine must see it under
    /// the same path.
    pub control_dir: PathBuf,
    /// The worker's name, for the label of its containers.
    pub worker: String,
}

impl ContainerOptions {
    /// The image of a plan.
    pub(super) fn image(&self, plan: &Plan) -> Result<&str, Error> {
        let Some(profile) = &plan.profile else { return Ok(&self.image) };
        match self.profile_images.get(profile) {
            Some(image) => Ok(image),
            None if profile == "base" => Ok(&self.image),
            None => Err(Error::Unenforceable { field: "policy.container.profile" }),
        }
    }
}
