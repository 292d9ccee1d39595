//! How much memory the host has left.

use std::fs;

use rustix::io::Errno;

use crate::Error;

const MEMINFO: &str = "/proc/meminfo";

/// What could be used without swapping, in bytes, as the kernel estimates it.
///
/// # Errors
/// `/proc` cannot be read or understood.
pub fn available_bytes() -> Result<u64, Error> {
    let text = fs::read_to_string(MEMINFO).map_err(Error::io("read", MEMINFO))?;
    let kib = text.lines().find_map(|line| line.strip_prefix("MemAvailable:")?.strip_suffix("kB"));
    let kib: Option<u64> = kib.and_then(|number| number.trim().parse().ok());
    kib.map(|kib| kib * 1024).ok_or_else(|| Error::new("understand", MEMINFO, Errno::PROTO))
}

#[cfg(test)]
mod tests {
    #[test]
    fn some_memory_is_left_and_not_more_than_there_can_be() {
        let left = super::available_bytes().unwrap();
        assert!((1 << 20..1 << 50).contains(&left), "{left}");
    }
}
