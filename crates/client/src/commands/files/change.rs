//! `codelia rm`, `mkdir` and `mv`.

use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use codelia_proto::{
    json::to_json,
    v1::{MakeDirectoryRequest, MoveFileRequest, RemoveFileRequest},
};
use serde_json::{Value, json};

use super::{has_reason, is_directory, join};
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
    for path in &args.paths {
        let removed = client.explained(remove(client, path, args).await).await;
        each.report(&path.to_string(), removed.map(|json| (json, String::new())))?;
    }
    each.finish()
}

async fn remove(client: &Client, path: &SessionPath, args: &args::Rm) -> Result<Value> {
    let parent = resolve::session(client, &path.session).await?;
    let request = RemoveFileRequest { parent, path: path.path.clone(), recursive: args.recursive };
    let removed = match client.files().remove_file(request).await {
        Ok(_) => true,
        Err(status) if args.force && has_reason(&status, "FILE_NOT_FOUND") => false,
        Err(status) => return Err(status).about_file(&path.session, &path.path),
    };
    Ok(json!({ "path": path.path, "removed": removed }))
}

/// Creates directories.
pub(crate) async fn mkdir(client: &Client, args: &args::Mkdir, output: Output) -> Result<ExitCode> {
    let mut each = Each::new(output);
    for path in &args.paths {
        let created = client.explained(make(client, path, args.parents).await).await;
        each.report(&path.to_string(), created.map(|json| (json, String::new())))?;
    }
    each.finish()
}

async fn make(client: &Client, path: &SessionPath, parents: bool) -> Result<Value> {
    let parent = resolve::session(client, &path.session).await?;
    let request = MakeDirectoryRequest { parent, path: path.path.clone(), parents };
    Ok(to_json(&client.call(request).await.about_file(&path.session, &path.path)?)?)
}

/// Moves or renames a file or directory.
pub(crate) async fn mv(client: &Client, args: &args::Mv, output: Output) -> Result<()> {
    let (from, to) = (&args.source, &args.destination);
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
