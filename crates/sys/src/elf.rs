//! Reads ELF programs.

use std::{
    ffi::OsString,
    fs::File,
    os::unix::{ffi::OsStringExt, fs::FileExt},
    path::PathBuf,
};

const HEADER_BYTES: usize = 64;
const ENTRY_BYTES: usize = 56;
/// More program headers than any compiler writes. Further ones are not read.
const MAX_ENTRIES: u64 = 128;
/// `ET_DYN`: the file can be loaded at any address.
const TYPE_DYNAMIC: u64 = 3;
/// `PT_INTERP`: the program header with the path of the loader.
const TYPE_INTERPRETER: u64 = 3;
/// `PATH_MAX`.
const MAX_PATH_BYTES: u64 = 4096;

/// A 64-bit little-endian ELF program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    /// Whether it can be loaded at any address: a loader, a library or a position-independent
    /// program.
    pub is_relocatable: bool,
    /// The loader (ELF interpreter) that the kernel executes with it. `None` for a static program
    /// and for a loader.
    pub interpreter: Option<PathBuf>,
}

/// Reads the headers of a program. `None` if the file is not one or cannot be read.
#[must_use]
pub fn read(file: &File) -> Option<Program> {
    let header: [u8; HEADER_BYTES] = read_at(file, 0)?;
    if header[..6] != *b"\x7fELF\x02\x01" {
        return None;
    }
    let table_offset = number(&header[32..40]);
    let entries = number(&header[56..58]);
    let interpreter = (0..entries.min(MAX_ENTRIES)).find_map(|index| {
        let entry: [u8; ENTRY_BYTES] =
            read_at(file, table_offset.checked_add(index * ENTRY_BYTES as u64)?)?;
        (number(&entry[..4]) == TYPE_INTERPRETER).then(|| path(file, &entry))?
    });
    Some(Program { is_relocatable: number(&header[16..18]) == TYPE_DYNAMIC, interpreter })
}

fn path(file: &File, entry: &[u8]) -> Option<PathBuf> {
    let offset = number(&entry[8..16]);
    let length = number(&entry[32..40]);
    let mut text = vec![0; usize::try_from(length.min(MAX_PATH_BYTES)).ok()?];
    file.read_exact_at(&mut text, offset).ok()?;
    let end = text.iter().position(|&byte| byte == 0)?;
    text.truncate(end);
    Some(PathBuf::from(OsString::from_vec(text)))
}

fn read_at<const N: usize>(file: &File, offset: u64) -> Option<[u8; N]> {
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

    fn program(path: &str) -> Option<Program> {
        read(&File::open(path).unwrap())
    }

    #[test]
    fn dynamic_program_has_a_loader() {
        let loader = program("/proc/self/exe").unwrap().interpreter.unwrap();
        assert!(loader.is_file(), "{}", loader.display());
        let itself = read(&File::open(loader).unwrap()).unwrap();
        assert_eq!(itself, Program { is_relocatable: true, interpreter: None });
    }

    #[test]
    fn other_files_are_not_programs() {
        assert_eq!(program("/proc/self/status"), None);
        assert_eq!(program("/"), None);
    }
}
