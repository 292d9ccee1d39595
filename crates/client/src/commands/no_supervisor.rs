//! `codelia supervisor` on systems without Unix sockets: not supported.

use anyhow::Result;

use crate::{args, client::Client, system::unsupported};

/// Refuses the command.
pub(crate) async fn supervisor(_: &Client, _: &args::Supervisor) -> Result<()> {
    Err(unsupported("codelia supervisor").into())
}
