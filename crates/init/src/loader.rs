//! Which loader a dynamic program names: the kernel executes it together with the program.

use std::{
    ffi::OsString,
    fs::File,
    os::unix::{ffi::OsStringExt, fs::FileExt},
    path::{Path, PathBuf},
};

const HEADER_BYTES: usize = 64;
const ENTRY_BYTES: usize = 56;
/// A program header of this type says where the path of the loader is.
const TYPE_LOADER: u32 = 3;
/// No path is longer.
const MOST_PATH_BYTES: u64 = 4096;

/// The loader of a 64-bit little-endian ELF program; `None` for a file that is none, names none or
/// cannot be read.
pub(crate) fn of(program: &Path) -> Option<PathBuf> {
    let file = File::open(program).ok()?;
    let header: [u8; HEADER_BYTES] = read(&file, 0)?;
    if header[..6] != *b"\x7fELF\x02\x01" {
        return None;
    }
    let (table, entries) = (number(&header[32..40]), number(&header[56..58]));
    (0..entries).find_map(|index| {
        let entry: [u8; ENTRY_BYTES] = read(&file, table.checked_add(index * ENTRY_BYTES as u64)?)?;
        (number(&entry[..4]) == u64::from(TYPE_LOADER)).then(|| path(&file, &entry))?
    })
}

fn path(file: &File, entry: &[u8]) -> Option<PathBuf> {
    let (offset, length) = (number(&entry[8..16]), number(&entry[32..40]));
    let mut text = vec![0; usize::try_from(length.min(MOST_PATH_BYTES)).ok()?];
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

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |sum, &byte| sum << 8 | u64::from(byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dynamic_program_names_a_loader_that_is_there() {
        let loader = of(&std::env::current_exe().unwrap()).unwrap();
        assert!(loader.is_file(), "{}", loader.display());
    }

    #[test]
    fn what_is_no_program_names_none() {
        assert_eq!(of(Path::new("/proc/self/status")), None);
        assert_eq!(of(Path::new("/")), None);
        assert_eq!(of(Path::new("/nonexistent")), None);
    }
}
