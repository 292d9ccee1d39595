//! Finds the loader (ELF interpreter) of a dynamic program, which the kernel executes with it.

use std::{
    ffi::OsString,
    fs::File,
    os::unix::{ffi::OsStringExt, fs::FileExt},
    path::{Path, PathBuf},
};

const HEADER_BYTES: usize = 64;
const ENTRY_BYTES: usize = 56;
/// `PT_INTERP`: the program header with the path of the loader.
const TYPE_INTERPRETER: u32 = 3;
/// `PATH_MAX`.
const MAX_PATH_BYTES: u64 = 4096;

/// The loader of a 64-bit little-endian ELF program. `None` if the file is not one, has no loader
/// or cannot be read.
pub(crate) fn of(program: &Path) -> Option<PathBuf> {
    let file = File::open(program).ok()?;
    let header: [u8; HEADER_BYTES] = read(&file, 0)?;
    if header[..6] != *b"\x7fELF\x02\x01" {
        return None;
    }
    let (table_offset, entries) = (number(&header[32..40]), number(&header[56..58]));
    (0..entries).find_map(|index| {
        let entry: [u8; ENTRY_BYTES] = read(&file, table_offset.checked_add(index * ENTRY_BYTES as u64)?)?;
        (number(&entry[..4]) == u64::from(TYPE_INTERPRETER)).then(|| path(&file, &entry))?
    })
}

fn path(file: &File, entry: &[u8]) -> Option<PathBuf> {
    let (offset, length) = (number(&entry[8..16]), number(&entry[32..40]));
    let mut text = vec![0; usize::try_from(length.min(MAX_PATH_BYTES)).ok()?];
    file.read_exact_at(&mut text, offset).ok()?;
    let end = text.iter().position(|&byte| byte == 0)?;
    text.truncate(end);
    Some(PathBuf::from(OsString::from_vec(text)))
}

fn read<const N: usize>(file: &File, offset: u64) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    file.read_exact_at(&mut bytes, offset).ok()?;
    Some(bytes)
}

/// Decodes a little-endian number of any width up to eight bytes.
fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |sum, &byte| sum << 8 | u64::from(byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dynamic_program_has_a_loader() {
        let loader = of(&std::env::current_exe().unwrap()).unwrap();
        assert!(loader.is_file(), "{}", loader.display());
    }

    #[test]
    fn other_files_have_no_loader() {
        assert_eq!(of(Path::new("/proc/self/status")), None);
        assert_eq!(of(Path::new("/")), None);
        assert_eq!(of(Path::new("/nonexistent")), None);
    }
}
