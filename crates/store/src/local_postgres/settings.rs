//! Settings of a private server. `docs/operations/data.md` has the measurements.

use std::fs;

use super::Durability;

const MIB: u64 = 1024 * 1024;
/// A sixteenth of the memory within these bounds: the server shares the machine with sandboxes.
const SHARED_BUFFERS_MIB: (u64, u64) = (128, 512);

/// Returns `name=value` for each setting.
pub(super) fn all(durability: Durability) -> Vec<String> {
    let mut settings =
        vec!["unix_socket_permissions=0700".to_owned(), "max_connections=200".to_owned()];
    let more: &[&str] = match durability {
        // Live runs are few rows that change all the time: vacuum looks at them often.
        Durability::Full => &[
            "wal_compression=on",
            "max_wal_size=2GB",
            "checkpoint_timeout=15min",
            "autovacuum_naptime=10s",
        ],
        Durability::None => &["fsync=off", "synchronous_commit=off", "full_page_writes=off"],
    };
    settings.extend(more.iter().map(|&setting| setting.to_owned()));
    if durability == Durability::Full {
        settings.push(format!("shared_buffers={}MB", shared_buffers_mib(total_memory())));
    }
    settings
}

fn shared_buffers_mib(memory: Option<u64>) -> u64 {
    let (min, max) = SHARED_BUFFERS_MIB;
    memory.map_or(min, |bytes| (bytes / 16 / MIB).clamp(min, max))
}

/// The memory of this machine in bytes.
fn total_memory() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_buffers_follow_memory() {
        let gib = |count: u64| Some(count * 1024 * MIB);
        let sizes = [None, gib(1), gib(4), gib(64)].map(shared_buffers_mib);
        assert_eq!(sizes, [128, 128, 256, 512]);
        assert!(total_memory().is_some_and(|bytes| bytes > 64 * MIB));
    }
}
