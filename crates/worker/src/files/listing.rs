//! `ListFiles`: one page of a directory, or of a directory and those in it. Blocks.
//!
//! Only names of the page are held in memory. Every directory is entered through the descriptor of
//! the one above it and never through a link.

use std::{
    collections::BinaryHeap,
    ffi::{OsStr, OsString},
    fs::File,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use codelia_policy::FileAccess;
use codelia_proto::v1;
use codelia_sys::resolve_beneath::{Entry, FinalSymlink};
use codelia_types::Reason;
use prost::Message;
use rustix::fs::{Dir, FileType};

use super::{
    error::FileError,
    workspace::{Workspace, describe},
};

/// Levels of a listing: each holds a descriptor open.
const MAX_DEPTH: usize = 100;
/// A page ends before the file that would exceed this many bytes.
const MAX_PAGE_BYTES: usize = 1024 * 1024;
/// The kernel's limit for a path. A longer one cannot be requested.
const MAX_PATH: usize = 4095;

/// Lists a page of a directory. A page token is the path from the directory to the last file of the
/// page before, in hexadecimal digits.
pub(super) fn list(
    workspace: &Workspace,
    request: &v1::ListFilesRequest,
) -> Result<v1::ListFilesResponse, FileError> {
    let after = hex::decode(&request.page_token).map_err(|_| Reason::InvalidField)?;
    workspace.as_session(|| {
        let (target, entry) =
            workspace.find_entry(&request.path, FinalSymlink::Follow, FileAccess::Read)?;
        if entry.kind() != FileType::Directory {
            return Err(Reason::NotADirectory.into());
        }
        let after: Vec<&OsStr> = Path::new(OsStr::from_bytes(&after)).iter().collect();
        let mut page = Page {
            workspace,
            top: target.path.clone(),
            size: usize::try_from(request.page_size).unwrap_or(0).max(1),
            files: Vec::new(),
            bytes: 0,
            last: PathBuf::new(),
            is_full: false,
        };
        let depth = usize::try_from(request.depth).unwrap_or(1).clamp(1, MAX_DEPTH);
        page.add_directory(&entry, &entry.open()?, &target.path, &after, depth)?;
        let next_page_token = if page.is_full {
            hex::encode(page.last.as_os_str().as_bytes())
        } else {
            String::new()
        };
        Ok(v1::ListFilesResponse { files: page.files, next_page_token })
    })
}

/// A page that is being filled.
struct Page<'a> {
    workspace: &'a Workspace,
    /// The path of the listed directory.
    top: PathBuf,
    size: usize,
    files: Vec<v1::File>,
    bytes: usize,
    /// The path of the last file, from the listed directory.
    last: PathBuf,
    /// Whether the page is complete, and other files follow.
    is_full: bool,
}

impl Page<'_> {
    /// Adds the content of a directory after the path `after`, `depth` levels of it.
    fn add_directory(
        &mut self,
        entry: &Entry,
        directory: &File,
        path: &Path,
        after: &[&OsStr],
        depth: usize,
    ) -> Result<(), FileError> {
        let workspace = self.workspace;
        if let [name, rest @ ..] = after
            && depth > 1
            && workspace.may_see(&path.join(name))
            && let Some(found) = entry.lookup(name)?
        {
            self.descend(&found, &path.join(name), rest, depth)?;
        }
        let mut last = after.first().map(|name| name.to_os_string()).unwrap_or_default();
        let visible = |name: &OsStr| workspace.may_see(&path.join(name));
        while !self.is_full {
            // One more than fits, to know whether another page follows.
            let left = self.size + 1 - self.files.len();
            let names =
                first_names(directory, &last, left, visible, || workspace.check_deadline())?;
            let bytes = names.iter().map(|name| name.len()).sum();
            let _memory = workspace.permit.try_reserve(bytes).ok_or(Reason::TooManyFileCalls)?;
            for name in &names {
                self.add_entry(entry, &path.join(name), name, depth)?;
            }
            match names.into_iter().nth(left - 1) {
                Some(name) => last = name,
                None => return Ok(()),
            }
        }
        Ok(())
    }

    /// Adds an entry of a directory, and its content.
    fn add_entry(
        &mut self,
        parent: &Entry,
        path: &Path,
        name: &OsStr,
        depth: usize,
    ) -> Result<(), FileError> {
        self.workspace.check_deadline()?;
        if self.is_full {
            return Ok(());
        }
        // Skips what was removed meanwhile.
        let Some(found) = parent.lookup(name)? else { return Ok(()) };
        self.add(path, &found)?;
        if depth > 1 { self.descend(&found, path, &[], depth) } else { Ok(()) }
    }

    /// Adds the content of a directory below the listed one, if it can be read.
    fn descend(
        &mut self,
        found: &Entry,
        path: &Path,
        after: &[&OsStr],
        depth: usize,
    ) -> Result<(), FileError> {
        if self.is_full || found.kind() != FileType::Directory || path.as_os_str().len() > MAX_PATH
        {
            return Ok(());
        }
        match found.open().map_err(FileError::from) {
            Err(error) if error.reason == Reason::FilePermission => Ok(()),
            directory => self.add_directory(found, &directory?, path, after, depth - 1),
        }
    }

    fn add(&mut self, path: &Path, found: &Entry) -> Result<(), FileError> {
        let file = describe(path, found)?;
        let bytes = self.bytes + file.encoded_len();
        if self.files.len() == self.size || (bytes > MAX_PAGE_BYTES && !self.files.is_empty()) {
            self.is_full = true;
            return Ok(());
        }
        self.bytes = bytes;
        self.last = path.strip_prefix(&self.top).unwrap_or(path).to_owned();
        self.files.push(file);
        Ok(())
    }
}

/// The first `max` names after `after`, in order.
fn first_names(
    directory: &File,
    after: &OsStr,
    max: usize,
    visible: impl Fn(&OsStr) -> bool,
    may_continue: impl Fn() -> Result<(), FileError>,
) -> Result<Vec<OsString>, FileError> {
    let mut first = BinaryHeap::with_capacity(max.min(1024));
    for entry in Dir::read_from(directory)? {
        may_continue()?;
        let entry = entry?;
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        if name == "." || name == ".." || name <= after || !visible(name) {
            continue;
        }
        first.push(name.to_owned());
        if first.len() > max {
            first.pop();
        }
    }
    Ok(first.into_sorted_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_sorted_and_limited() {
        let temp = tempfile::tempdir().unwrap();
        for name in ["c", "a", "d", "b", "hidden"] {
            std::fs::write(temp.path().join(name), "").unwrap();
        }
        let directory = File::open(temp.path()).unwrap();
        let names = |after: &str, max| {
            first_names(&directory, OsStr::new(after), max, |name| name != "hidden", || Ok(()))
                .unwrap()
        };
        assert_eq!(names("", 2), ["a", "b"]);
        assert_eq!(names("b", 9), ["c", "d"]);
        assert!(names("", 0).is_empty());
    }
}
