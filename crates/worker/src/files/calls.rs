//! The file calls with one request and one response, except lists. All functions block.

use std::{os::fd::OwnedFd, path::Path};

use codelia_policy::FileAccess;
use codelia_proto::v1;
use codelia_sys::{
    Errno,
    resolve_beneath::{self, FinalSymlink, ResolvedPath},
};
use codelia_types::Reason;
use memchr::memmem::Finder;
use rustix::fs::{
    Access, AtFlags, FileType, Mode, RenameFlags, accessat, mkdirat, renameat, renameat_with,
    unlinkat,
};
use uuid::Uuid;

use super::{
    error::FileError,
    reservation::NEW_ENTRY,
    upload::{Upload, WriteOptions, read_at},
    workspace::{Workspace, describe},
};
use crate::workspace::trash;

/// The largest file that can be edited, before and after: both are held in memory.
const MAX_EDIT_BYTES: usize = 16 * 1024 * 1024;
const DIRECTORY_MODE: Mode =
    Mode::RWXU.union(Mode::RGRP).union(Mode::XGRP).union(Mode::ROTH).union(Mode::XOTH);

pub(super) fn stat(
    workspace: &Workspace,
    request: &v1::StatFileRequest,
) -> Result<v1::StatFileResponse, FileError> {
    let final_symlink =
        if request.no_follow { FinalSymlink::NoFollow } else { FinalSymlink::Follow };
    workspace.as_session(|| {
        let (target, entry) =
            workspace.find_entry(&request.path, final_symlink, FileAccess::Read)?;
        Ok(v1::StatFileResponse { file: Some(describe(&target.path, &entry)?) })
    })
}

pub(super) fn make_directory(
    workspace: &Workspace,
    request: &v1::MakeDirectoryRequest,
) -> Result<v1::MakeDirectoryResponse, FileError> {
    workspace.as_session(|| {
        if request.parents {
            make_all(workspace, Path::new(&request.path))?;
        } else {
            make_one(workspace, Path::new(&request.path), false)?;
        }
        let (target, entry) =
            workspace.find_entry(&request.path, FinalSymlink::Follow, FileAccess::Read)?;
        Ok(v1::MakeDirectoryResponse { file: Some(describe(&target.path, &entry)?) })
    })
}

/// Creates a directory and those above it, as far as they are missing. Call it as the session.
pub(super) fn make_all(workspace: &Workspace, path: &Path) -> Result<(), FileError> {
    for ancestor in path.ancestors().collect::<Vec<_>>().into_iter().rev() {
        workspace.check_deadline()?;
        make_one(workspace, ancestor, true)?;
    }
    Ok(())
}

fn make_one(workspace: &Workspace, path: &Path, may_exist: bool) -> Result<(), FileError> {
    let path = path.to_str().ok_or(Reason::InvalidField)?;
    let target = workspace.resolve(path, FinalSymlink::Follow, FileAccess::Read)?;
    match &target.entry {
        Some(entry) if may_exist && entry.kind() == FileType::Directory => Ok(()),
        Some(_) => Err(Reason::FileExists.into()),
        None => {
            workspace.resolve(path, FinalSymlink::Follow, FileAccess::Write)?;
            workspace.reservation.take(NEW_ENTRY)?;
            match mkdirat(&target.parent, &target.name, DIRECTORY_MODE) {
                Err(Errno::EXIST) if may_exist => Ok(()),
                made => Ok(made?),
            }
        }
    }
}

pub(super) fn move_file(
    workspace: &Workspace,
    request: &v1::MoveFileRequest,
) -> Result<v1::MoveFileResponse, FileError> {
    let resolve = |path, field| {
        workspace
            .resolve(path, FinalSymlink::NoFollow, FileAccess::Replace)
            .map_err(FileError::at(field))
    };
    workspace.as_session(|| {
        let mut from = resolve(&request.source_path, "source_path")?;
        let to = resolve(&request.destination_path, "destination_path")?;
        let absent = || FileError::at("source_path")(Reason::FileNotFound.into());
        let moved = from.entry.take().ok_or_else(absent)?;
        let flags = if request.overwrite { RenameFlags::empty() } else { RenameFlags::NOREPLACE };
        renameat_with(&from.parent, &from.name, &to.parent, &to.name, flags)
            .map_err(|errno| FileError::at("destination_path")(errno.into()))?;
        Ok(v1::MoveFileResponse { file: Some(describe(&to.path, &moved.refresh()?)?) })
    })
}

pub(super) fn copy(
    workspace: &Workspace,
    request: &v1::CopyFileRequest,
) -> Result<v1::CopyFileResponse, FileError> {
    let at_source = FileError::at("source_path");
    let (source, mut upload) = workspace.as_session(|| {
        let (_, entry) = workspace.find_file(&request.source_path).map_err(&at_source)?;
        let source = entry.open().map_err(|errno| at_source(errno.into()))?;
        let options = WriteOptions {
            mode: Some(entry.stat.st_mode & 0o777),
            replace: request.overwrite,
            etag: String::new(),
        };
        let upload = Upload::begin(workspace, &request.destination_path, options);
        Ok((source, upload.map_err(FileError::at("destination_path"))?))
    })?;
    upload.append_file(workspace, &source).map_err(at_source)?;
    let file = upload.publish(workspace).map_err(FileError::at("destination_path"))?;
    Ok(v1::CopyFileResponse { file: Some(file) })
}

pub(super) fn remove(
    workspace: &Workspace,
    request: &v1::RemoveFileRequest,
) -> Result<v1::RemoveFileResponse, FileError> {
    let left = workspace.as_session(|| {
        let (target, entry) =
            workspace.find_entry(&request.path, FinalSymlink::NoFollow, FileAccess::Replace)?;
        match (entry.kind(), request.recursive) {
            (FileType::Directory, true) => {
                // The session's user must be allowed to remove it from its parent.
                accessat(
                    &target.parent,
                    ".",
                    Access::WRITE_OK | Access::EXEC_OK,
                    AtFlags::EACCESS,
                )?;
                return Ok(Some(target));
            }
            (FileType::Directory, false) => {
                unlinkat(&target.parent, &target.name, AtFlags::REMOVEDIR)?
            }
            _ => unlinkat(&target.parent, &target.name, AtFlags::empty())?,
        }
        Ok(None)
    })?;
    left.map_or(Ok(()), |target| remove_tree(workspace, &target))?;
    Ok(v1::RemoveFileResponse {})
}

/// Moves a tree to the trash atomically and removes it there.
fn remove_tree(workspace: &Workspace, target: &ResolvedPath) -> Result<(), FileError> {
    let trash: OwnedFd = resolve_beneath::open_directory(&workspace.trash())?;
    let name = Uuid::new_v4().to_string();
    renameat(&target.parent, &target.name, &trash, &name)?;
    let may_continue = || workspace.check_deadline().is_ok();
    if let Err(error) = trash::remove_while(&workspace.trash(), Path::new(&name), &may_continue) {
        tracing::warn!(%error, "cannot remove directory from the trash, leaving it to upkeep");
    }
    Ok(())
}

pub(super) fn edit(
    workspace: &Workspace,
    request: &v1::EditFileRequest,
) -> Result<v1::EditFileResponse, FileError> {
    let (source, size, mut upload) = workspace.as_session(|| {
        let (_, entry) = workspace.find_file(&request.path)?;
        let etag = super::workspace::etag(&entry);
        if !request.etag.is_empty() && request.etag != etag {
            return Err(Reason::FileChanged.into());
        }
        let size = usize::try_from(entry.stat.st_size).unwrap_or(usize::MAX);
        // The etag detects a change between reading and writing.
        let options = WriteOptions { mode: None, replace: true, etag };
        Ok((entry.open()?, size, Upload::begin(workspace, &request.path, options)?))
    })?;
    if size > MAX_EDIT_BYTES {
        return Err(Reason::FileTooLarge.into());
    }
    let _text_memory = workspace.permit.try_reserve(size).ok_or(Reason::TooManyFileCalls)?;
    let edit = Edit::new(read_at(&source, 0, size)?, request)?;
    if edit.result_bytes > MAX_EDIT_BYTES {
        return Err(Reason::FileTooLarge.into());
    }
    workspace.check_deadline()?;
    let _result_memory =
        workspace.permit.try_reserve(edit.result_bytes).ok_or(Reason::TooManyFileCalls)?;
    upload.append(workspace, &edit.result())?;
    let file = upload.publish(workspace)?;
    Ok(v1::EditFileResponse { file: Some(file), replacements: edit.count })
}

/// A replacement in a text. Its size is known before it is done. The time is linear in the text,
/// whatever the text to find.
#[derive(Debug)]
struct Edit<'a> {
    text: Vec<u8>,
    old: Finder<'a>,
    new: &'a [u8],
    count: i64,
    result_bytes: usize,
}

impl<'a> Edit<'a> {
    fn new(text: Vec<u8>, request: &'a v1::EditFileRequest) -> Result<Self, FileError> {
        let old = Finder::new(&request.old_text);
        let new = request.new_text.as_slice();
        if old.needle().is_empty() {
            return Err(Reason::TextNotFound.into());
        }
        let max = if request.replace_all { usize::MAX } else { 2 };
        let count = old.find_iter(&text).take(max).count();
        if count > 1 && !request.replace_all {
            return Err(Reason::TextAmbiguous.into());
        }
        let kept = text.len() - count * old.needle().len();
        let result_bytes = kept.saturating_add(count.saturating_mul(new.len()));
        match i64::try_from(count) {
            Ok(0) | Err(_) => Err(Reason::TextNotFound.into()),
            Ok(count) => Ok(Self { text, old, new, count, result_bytes }),
        }
    }

    fn result(&self) -> Vec<u8> {
        let mut result = Vec::with_capacity(self.result_bytes);
        let mut end = 0;
        for at in self.old.find_iter(&self.text) {
            result.extend_from_slice(&self.text[end..at]);
            result.extend_from_slice(self.new);
            end = at + self.old.needle().len();
        }
        result.extend_from_slice(&self.text[end..]);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(old: &str, new: &str, replace_all: bool) -> v1::EditFileRequest {
        let (old_text, new_text) = (old.to_owned().into(), new.to_owned().into());
        v1::EditFileRequest { old_text, new_text, replace_all, ..Default::default() }
    }

    fn edited(text: &str, old: &str, new: &str, all: bool) -> Result<(String, i64), Reason> {
        let request = request(old, new, all);
        let edit = Edit::new(text.as_bytes().to_vec(), &request).map_err(|error| error.reason)?;
        let result = edit.result();
        assert_eq!(result.len(), edit.result_bytes);
        Ok((String::from_utf8(result).unwrap(), edit.count))
    }

    #[test]
    fn several_occurrences_need_replace_all() {
        assert_eq!(edited("a b c", "b", "x", false), Ok(("a x c".into(), 1)));
        assert_eq!(edited("a b b", "b", "x", false), Err(Reason::TextAmbiguous));
        assert_eq!(edited("b b", "b", "bb", true), Ok(("bb bb".into(), 2)));
        assert_eq!(edited("abc", "d", "x", true), Err(Reason::TextNotFound));
        assert_eq!(edited("abc", "", "x", true), Err(Reason::TextNotFound));
        assert_eq!(edited("aaa", "aa", "b", true), Ok(("ba".into(), 1)));
        assert_eq!(edited("abc", "abc", "", false), Ok((String::new(), 1)));
    }

    #[test]
    fn size_of_edit_is_known_before_it_is_made() {
        let all = request("x", &"y".repeat(1 << 20), true);
        let edit = Edit::new(vec![b'x'; 3000], &all).unwrap();
        assert_eq!((edit.count, edit.result_bytes), (3000, 3000 << 20));
    }
}
