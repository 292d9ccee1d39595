//! `codelia volume …`.

use anyhow::{Context, Result};
use codelia_proto::{
    duration_to_proto,
    v1::{CreateVolumeRequest, DeleteVolumeRequest, GetVolumeRequest, ListVolumesRequest, Volume},
};

use crate::{
    args,
    client::{Client, pages},
    output::Output,
    units,
};

/// Executes `codelia volume`.
pub(crate) async fn volume(client: &Client, command: args::Volumes, output: Output) -> Result<()> {
    let mut volumes = client.volumes();
    let volume = match command {
        args::Volumes::Ls => return list(client, output).await,
        args::Volumes::Rm { volume } => {
            volumes.delete_volume(DeleteVolumeRequest { name: resource(&volume) }).await?;
            return output.print(&serde_json::json!({ "volumeId": volume }), "");
        }
        args::Volumes::Create { name, max_bytes, ttl, project } => {
            let request = CreateVolumeRequest {
                volume_id: name,
                project: project.unwrap_or_default(),
                max_bytes,
                ttl: ttl.map(duration_to_proto),
            };
            volumes.create_volume(request).await?.into_inner().volume
        }
        args::Volumes::Show { volume } => {
            volumes
                .get_volume(GetVolumeRequest { name: resource(&volume) })
                .await?
                .into_inner()
                .volume
        }
    };
    output.print_message(&volume.context("the server sent no volume")?)
}

fn resource(name: &str) -> String {
    if name.contains('/') { name.to_owned() } else { format!("volumes/{name}") }
}

async fn list(client: &Client, output: Output) -> Result<()> {
    let volumes = pages(usize::MAX, async |page_token| {
        let request = ListVolumesRequest { page_size: 0, page_token };
        let page = client.volumes().list_volumes(request).await?.into_inner();
        Ok((page.volumes, page.next_page_token))
    })
    .await?;
    let header = ["VOLUME", "USED", "MAX", "SESSIONS", "PROJECT", "LAST USED"];
    output.print_list(&header, &volumes, |volume: &Volume| {
        vec![
            volume.volume_id.clone(),
            units::bytes(volume.used_bytes.unsigned_abs()),
            units::bytes(volume.max_bytes.unsigned_abs()),
            volume.sessions.to_string(),
            volume.project.clone(),
            units::age(volume.use_time.as_ref()),
        ]
    })
}
