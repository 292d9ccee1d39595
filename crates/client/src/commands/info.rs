//! `codelia info` and `codelia whoami`.

use anyhow::Result;
use codelia_proto::v1::{GetServerInfoRequest, WhoAmIRequest};

use crate::{client::Client, output::Output};

/// Prints what the server offers.
pub(crate) async fn info(client: &Client, output: Output) -> Result<()> {
    output.print_message(&client.call(GetServerInfoRequest {}).await?)
}

/// Prints the caller's key and tenant.
pub(crate) async fn whoami(client: &Client, output: Output) -> Result<()> {
    output.print_message(&client.info().who_am_i(WhoAmIRequest {}).await?.into_inner())
}
