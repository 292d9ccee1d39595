//! Free memory of the host.

use std::fs;

use rustix::io::Errno;

use crate::Error;

const MEMINFO: &str = "/proc/meminfo";

/// The kernel's estimate of the memory available without swapping, in bytes.
///
/// # Errors
/// `/proc/meminfo` cannot be read or parsed.
pub fn available_bytes() -> Result<u64, Error> {
    let text = fs::read_to_string(MEMINFO).map_err(Error::io("read", MEMINFO))?;
    let kib = text.lines().find_map(|line| line.strip_prefix("MemAvailable:")?.strip_suffix("kB"));
    let kib: Option<u64> = kib.and_then(|number| number.trim().parse().ok());
    kib.map(|kib| kib * 1024).ok_or_else(|| Error::new("parse", MEMINFO, Errno::PROTO))
}

#[cfg(test)]
mod tests {
    #[test]
    fn available_memory_is_plausible() {
        let available = super::available_bytes().unwrap();
        assert!((1 << 20..1 << 50).contains(&available), "{available}");
    }
}
