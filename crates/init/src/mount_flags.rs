//! `codelia-init --restrict-mounts`: sets the flags on a container's mounts that its engine has no
//! option for. Runs outside, as the worker's user, before the command starts.

use std::{io::Stdin, path::Path};

use codelia_init::{Failure, Report, RestrictRequest, Step};
use codelia_sys::{Errno, mount, overlay};

use crate::{control::Control, failure::at, layout};

/// Serves one request.
pub(crate) fn serve(control: &mut Control<Stdin>) -> Result<(), Failure> {
    let request: RestrictRequest = control.expect_message()?;
    restrict(control, &request).map_err(at(Step::RestrictMounts))?;
    control.send(&Report::Ready, &[])
}

fn restrict(control: &mut Control<Stdin>, request: &RestrictRequest) -> Result<(), Errno> {
    let namespaces = control.take_descriptors();
    // Without one these would be the mounts of the host.
    if namespaces.is_empty() {
        return Err(Errno::BADF);
    }
    overlay::enter_namespaces(&namespaces)?;
    mount::deny_setuid(Path::new("/"))?;
    request.without_devices.iter().try_for_each(|target| mount::deny_devices(target))?;
    request.layout.as_ref().map_or(Ok(()), layout::apply)
}
