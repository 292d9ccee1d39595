//! Files with policies and profiles.

use std::{fs::File, io::Read, path::Path};

use anyhow::{Context, Result};
use codelia_policy::{
    Format, ParseError, Policy,
    size::{MAX_BYTES, check_bytes},
};

/// Reads a policy file. Its extension names the format.
///
/// # Errors
/// The file cannot be read, or holds no policy.
pub fn read(file: &Path) -> Result<Policy> {
    let name = || file.display().to_string();
    let format = Format::from_path(file).with_context(name)?;
    Policy::parse(&read_text(file)?, format).with_context(name)
}

/// Reads a file of bounded size.
///
/// # Errors
/// The file cannot be read, is too large, or is not text.
pub fn read_text(file: &Path) -> Result<String> {
    let name = || file.display().to_string();
    // One byte more shows that the file is too large, whatever its size.
    let mut bounded = File::open(file).with_context(name)?.take(MAX_BYTES as u64 + 1);
    let mut bytes = Vec::new();
    bounded.read_to_end(&mut bytes).with_context(name)?;
    check_bytes(bytes.len()).map_err(ParseError::from).with_context(name)?;
    String::from_utf8(bytes).with_context(name)
}
