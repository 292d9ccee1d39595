//! What holds a sandbox on the host: `codelia-init` itself, a tool around it, a container.

use std::fmt::Debug;

use async_trait::async_trait;
use codelia_sys::{Pid, process::ExitStatus};
use codelia_types::Receipt;

use crate::sandbox::process::Process;

/// What a mode started. The sandbox asks it to end by the end of the control socket, then calls
/// `ended`; if that takes too long `kill` and `ended` again; then `remove`, once.
#[async_trait]
pub(crate) trait Holder: Send + Sync + Debug {
    /// Waits for its end; `true` if it ended by itself. Cancel-safe; may be called again.
    async fn ended(&mut self) -> bool;

    /// Kills it without waiting for its end.
    async fn kill(&mut self);

    /// Takes away what is left of it on the host and counts what cannot be. Control groups and the
    /// processes in them are the sandbox's business.
    async fn remove(&mut self) -> Receipt {
        Receipt::default()
    }

    /// Whether it ended for want of memory, where that is asked because `codelia-init` could not tell.
    async fn ran_out_of_memory(&mut self) -> bool {
        false
    }

    /// The process of `codelia-init` if it shares our process namespace. Elsewhere it kills all
    /// its processes at once and none of them can stop it, so that nobody needs to help it.
    fn bare_init(&self) -> Option<Pid> {
        None
    }
}

/// `codelia-init` as a child of ours.
#[derive(Debug)]
pub(crate) struct BareInit(pub(crate) Process);

#[async_trait]
impl Holder for BareInit {
    async fn ended(&mut self) -> bool {
        matches!(self.0.ended().await, Ok(ExitStatus::Exited(_)))
    }

    async fn kill(&mut self) {
        if let Err(errno) = self.0.kill() {
            tracing::warn!(%errno, "codelia-init was not killed");
        }
    }

    fn bare_init(&self) -> Option<Pid> {
        self.0.id()
    }
}
