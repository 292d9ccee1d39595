//! `codelia info` and `codelia whoami`.

use anyhow::{Context, Result};
use codelia_proto::v1::{GetServerInfoRequest, WhoAmIRequest};

use crate::{client::Client, output::Output};

/// Prints what the server offers.
pub(crate) async fn info(client: &Client, output: Output) -> Result<()> {
    let response = client.info().get_server_info(GetServerInfoRequest {}).await?.into_inner();
    output.print_message(&response.server_info.context("the server sent no information")?)
}

/// Prints the caller's key and tenant.
pub(crate) async fn whoami(client: &Client, output: Output) -> Result<()> {
    output.print_message(&client.info().who_am_i(WhoAmIRequest {}).await?.into_inner())
}
