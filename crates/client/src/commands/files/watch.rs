//! `codelia watch`.

use anyhow::Result;
use codelia_proto::v1::{FileEvent, FileEventKind, WatchFilesRequest};

use crate::{args, client::Client, error_report::AboutFile, output::Output, resolve, words::Word};

/// Prints changes until the session ends.
pub(crate) async fn watch(client: &Client, args: &args::Watch, output: Output) -> Result<()> {
    let at = &args.path;
    let parent = resolve::session(client, &at.session).await?;
    let request = WatchFilesRequest { parent, path: at.path.clone(), recursive: args.recursive };
    let mut messages = client.files().watch_files(request).await.about_file(at)?.into_inner();
    while let Some(message) = messages.message().await.about_file(at)? {
        for event in &message.events {
            output.print_message_as(event, &line(event))?;
        }
    }
    Ok(())
}

fn line(event: &FileEvent) -> String {
    let word = event.kind().word();
    match event.kind() {
        FileEventKind::Renamed => format!("{word:<8}  {} -> {}", event.previous_path, event.path),
        FileEventKind::Overflow => {
            format!("{word:<8}  some changes are missing: list the directory again")
        }
        _ => format!("{word:<8}  {}", event.path),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_name_both_paths_of_a_rename() {
        let event = |kind: FileEventKind, path: &str, previous_path: &str| FileEvent {
            kind: kind.into(),
            path: path.into(),
            previous_path: previous_path.into(),
            time: None,
        };
        assert_eq!(line(&event(FileEventKind::Created, "a", "")), "created   a");
        assert_eq!(line(&event(FileEventKind::Renamed, "b", "a")), "renamed   a -> b");
        assert!(line(&event(FileEventKind::Overflow, "", "")).contains("list the directory again"));
    }
}
