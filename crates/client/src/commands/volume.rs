//! `codelia volume …`.

use anyhow::Result;
use codelia_proto::{
    duration_to_proto,
    v1::{CreateVolumeRequest, DeleteVolumeRequest, GetVolumeRequest, ListVolumesRequest, Volume},
};

use crate::{
    args,
    client::{Client, resource_name},
    output::Output,
    units,
};

/// Executes `codelia volume`.
pub(crate) async fn volume(client: &Client, command: args::Volumes, output: Output) -> Result<()> {
    let volume = match command {
        args::Volumes::Ls => return list(client, output).await,
        args::Volumes::Rm { volume } => {
            client
                .volumes()
                .delete_volume(DeleteVolumeRequest { name: resource_name("volumes", &volume) })
                .await?;
            return output.print(&serde_json::json!({ "volumeId": volume }), "");
        }
        args::Volumes::Create { name, max_bytes, ttl, project } => {
            let request = CreateVolumeRequest {
                volume_id: name,
                project: project.unwrap_or_default(),
                max_bytes,
                ttl: ttl.map(duration_to_proto),
            };
            client.call(request).await?
        }
        args::Volumes::Show { volume } => {
            client.call(GetVolumeRequest { name: resource_name("volumes", &volume) }).await?
        }
    };
    output.print_message(&volume)
}

async fn list(client: &Client, output: Output) -> Result<()> {
    let volumes = client.list(ListVolumesRequest::default(), usize::MAX).await?;
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
