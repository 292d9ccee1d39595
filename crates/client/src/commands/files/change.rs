//! `codelia rm`, `mkdir` and `mv`.

use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use codelia_proto::{
    json::to_json,
    v1::{MakeDirectoryRequest, MoveFileRequest, RemoveFileRequest},
};
use serde_json::{Value, json};

use super::remote_file::{has_reason, is_directory, join};
use crate::{
    args::{self, SessionPath},
    client::Client,
    each::Each,
    error_report::AboutFile,
    output::Output,
    resolve,
};

/// Removes files and directories.
pub(crate) async fn rm(client: &Client, args: &args::Rm, output: Output) -> Result<ExitCode> {
    let mut each = Each::new(output);
    each.try_all(client, &args.paths, async |path| {
        Ok((remove(client, path, args).await?, String::new()))
    })
    .await?;
    each.finish()
}

async fn remove(client: &Client, path: &SessionPath, args: &args::Rm) -> Result<Value> {
    let parent = resolve::session(client, &path.session).await?;
    let request = RemoveFileRequest { parent, path: path.path.clone(), recursive: args.recursive };
    let removed = client.files().remove_file(request).await;
    let removed = match removed.about_file(path) {
        Err(error) if args.force && has_reason(&error, "FILE_NOT_FOUND") => false,
        removed => removed.map(|_| true)?,
    };
    Ok(json!({ "path": path.path, "removed": removed }))
}

/// Creates directories.
pub(crate) async fn mkdir(client: &Client, args: &args::Mkdir, output: Output) -> Result<ExitCode> {
    let mut each = Each::new(output);
    each.try_all(client, &args.paths, async |path| {
        Ok((make(client, path, args.parents).await?, String::new()))
    })
    .await?;
    each.finish()
}

async fn make(client: &Client, path: &SessionPath, parents: bool) -> Result<Value> {
    let parent = resolve::session(client, &path.session).await?;
    let request = MakeDirectoryRequest { parent, path: path.path.clone(), parents };
    Ok(to_json(&client.call(request).await.about_file(path)?)?)
}

/// Moves or renames a file or directory.
pub(crate) async fn mv(client: &Client, args: &args::Mv, output: Output) -> Result<()> {
    let from = &args.source;
    let to = &args.destination;
    let parent = resolve::session(client, &from.session).await?;
    let is_same =
        from.session == to.session || resolve::session(client, &to.session).await? == parent;
    ensure!(is_same, "{from} and {to} are in different sessions: copy the file instead");
    let mut destination_path = to.path.clone();
    if to.path.ends_with('/') || is_directory(client, &parent, &to.path).await? {
        let name =
            from.path.trim_end_matches('/').rsplit('/').next().filter(|name| !name.is_empty());
        destination_path =
            join(&to.path, name.with_context(|| format!("{from} has no file name"))?);
    }
    let request = MoveFileRequest {
        parent,
        source_path: from.path.clone(),
        destination_path,
        overwrite: args.force,
    };
    output.print_json(&client.call(request).await?)
}
