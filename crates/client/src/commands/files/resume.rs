//! `codelia cp --resume`: which files are complete, and downloads that continue.

use std::{
    fs::Metadata,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::{Result, bail, ensure};
use codelia_proto::v1::{File, FileKind, ReadFileRequest, StatFileRequest, read_file_response};
use indicatif::ProgressBar;

use super::{
    download::{self, LocalFile, Target, copy_chunks},
    hash::hash,
    partial::Partial,
    remote_file::{NO_FILE, find, size},
    upload::Source,
};
use crate::client::Client;

/// The file in the session, if it is complete: of the same size, and not older than the source.
pub(super) async fn uploaded(
    client: &Client,
    parent: &str,
    path: &str,
    source: &Source,
) -> Result<Option<File>> {
    let Some(found) = find(client, parent, path).await? else { return Ok(None) };
    let is_complete = found.kind() == FileKind::Regular
        && source.size == Some(size(&found))
        && source.modified.is_some_and(|modified| modify_time(&found) >= modified);
    Ok(is_complete.then_some(found))
}

/// Reads a file of a session, from where an earlier copy stopped. Skips it if it is complete.
pub(super) async fn download(
    client: &Client,
    mut request: ReadFileRequest,
    target: LocalFile,
    limit: Option<u64>,
    bar: &ProgressBar,
) -> Result<File> {
    let stat = StatFileRequest {
        parent: request.parent.clone(),
        path: request.path.clone(),
        no_follow: false,
    };
    let found = client.call(stat).await?;
    if found.kind() != FileKind::Regular {
        // The server says what is wrong with it.
        return download::download(client, request, Target::File(target), limit, bar).await;
    }
    let size = size(&found);
    if std::fs::symlink_metadata(&target.path).is_ok_and(|local| is_complete(&local, &found)) {
        bar.inc(size);
        return Ok(found);
    }
    target.check_replaceable()?;
    ensure!(
        limit.is_none_or(|limit| limit == size),
        "the file changed during the copy: copy it again"
    );
    let version = hash(&(&request.parent, &request.path, &found.etag, size));
    let mut partial = Partial::open(&target, version, found.mode.cast_unsigned(), size)?;
    request.offset = i64::try_from(partial.length)?;
    bar.inc(partial.length);
    let mut chunks = client.files().read_file(request).await?.into_inner();
    let first = chunks.message().await?.and_then(|chunk| chunk.kind);
    let Some(read_file_response::Kind::File(opened)) = first else { bail!(NO_FILE) };
    ensure!(opened.etag == found.etag, "the file changed during the copy: copy it again");
    let left = size - partial.length;
    let copied = copy_chunks(&mut chunks, |data| partial.write(data), left, bar).await?;
    ensure!(copied == left, "the file became shorter during the copy: copy it again");
    partial.publish(&target)?;
    Ok(found)
}

/// Whether a local file is the copy of one in a session: of the same size, and not older.
fn is_complete(local: &Metadata, remote: &File) -> bool {
    let is_newer = local.modified().is_ok_and(|modified| modified >= modify_time(remote));
    local.is_file() && local.len() == size(remote) && is_newer
}

/// When a file was modified; the distant future if the server does not say.
fn modify_time(file: &File) -> SystemTime {
    let never = UNIX_EPOCH + Duration::from_secs(u32::MAX.into()) * 4;
    let Some(time) = &file.modify_time else { return never };
    let nanos = Duration::from_nanos(time.nanos.try_into().unwrap_or_default());
    let seconds = Duration::from_secs(time.seconds.unsigned_abs());
    let whole = if time.seconds < 0 {
        UNIX_EPOCH.checked_sub(seconds)
    } else {
        UNIX_EPOCH.checked_add(seconds)
    };
    whole.map_or(never, |whole| whole + nanos)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn complete_files_have_the_size_and_are_not_older() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("out");
        fs::write(&path, "text").unwrap();
        let local = fs::metadata(&path).unwrap();
        let remote = |size_bytes: i64, seconds: i64| File {
            size_bytes,
            modify_time: Some(prost_types::Timestamp { seconds, nanos: 0 }),
            ..File::default()
        };
        assert!(is_complete(&local, &remote(4, 1_000)) && is_complete(&local, &remote(4, -1)));
        assert!(!is_complete(&local, &remote(5, 1_000)));
        assert!(!is_complete(&local, &remote(4, 4_000_000_000)));
        assert!(!is_complete(&local, &File { size_bytes: 4, ..File::default() }), "no time");
        assert!(!is_complete(&fs::metadata(temp.path()).unwrap(), &remote(4, 1_000)));
    }
}
