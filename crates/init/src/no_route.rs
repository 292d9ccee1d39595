//! Counts how often programs of the sandbox tried to reach an address to which its network has no
//! route. The kernel counts them, in files that are opened before init is restricted.

use std::{fs::File, os::unix::fs::FileExt};

use codelia_init::{ExpectedNamespace, SecuritySetup};

/// The files of the kernel's counters, of IPv4 and of IPv6, with the names there.
const FILES: [(&str, Find); 2] =
    [("/proc/self/net/snmp", find_in_table), ("/proc/self/net/snmp6", find_in_list)];
const TABLE: &str = "Ip:";
const COLUMN: &str = "OutNoRoutes";
const NAME: &str = "Ip6OutNoRoutes";

/// Twice what the files have: each page of it costs a fault.
const MAX_BYTES: usize = 16 * 1024;

type Find = fn(&str) -> Option<u64>;

/// The counters of a sandbox's own network. Empty if the network is not its own.
#[derive(Debug, Default)]
pub(crate) struct NoRouteCounters {
    files: Vec<(File, Find)>,
    /// The count at the beginning: an earlier sandbox of the session may have had the network.
    before: u64,
}

impl NoRouteCounters {
    /// Opens the counters. A kernel without IPv6 has no file for it.
    pub(crate) fn open(security: &SecuritySetup) -> Self {
        if !matches!(security.expected.namespaces.get("net"), Some(ExpectedNamespace::Not(_))) {
            return Self::default();
        }
        let open = |(path, find): (&str, Find)| File::open(path).ok().map(|file| (file, find));
        let files: Vec<_> = FILES.into_iter().filter_map(open).collect();
        Self { before: sum(&files), files }
    }

    /// The number of attempts. What cannot be read counts as none.
    pub(crate) fn count(&self) -> u64 {
        sum(&self.files).saturating_sub(self.before)
    }
}

fn sum(files: &[(File, Find)]) -> u64 {
    let mut buffer = vec![0; MAX_BYTES];
    let counts = files.iter().filter_map(|(file, find)| find(read(file, &mut buffer)?));
    counts.fold(0, u64::saturating_add)
}

/// With `pread` alone: init's filter allows no other call on files.
fn read<'a>(file: &File, buffer: &'a mut [u8]) -> Option<&'a str> {
    let mut length = 0;
    loop {
        match file.read_at(buffer.get_mut(length..)?, length as u64) {
            Ok(0) => return std::str::from_utf8(&buffer[..length]).ok(),
            Ok(count) => length += count,
            Err(_) => return None,
        }
    }
}

/// In pairs of lines: names, then values.
fn find_in_table(text: &str) -> Option<u64> {
    let mut rows =
        text.lines().filter_map(|line| line.strip_prefix(TABLE)).map(str::split_whitespace);
    let names = rows.next()?;
    let values = rows.next()?;
    names.zip(values).find(|(name, _)| *name == COLUMN)?.1.parse().ok()
}

/// A name and its value in each line.
fn find_in_list(text: &str) -> Option<u64> {
    let mut lines = text.lines().filter_map(|line| line.split_once(char::is_whitespace));
    lines.find(|(name, _)| *name == NAME)?.1.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_found_by_name() {
        let table =
            "Ip: Forwarding OutDiscards OutNoRoutes\nIp: 1 5 42\nIcmp: OutNoRoutes\nIcmp: 7\n";
        assert_eq!(find_in_table(table), Some(42));
        assert_eq!(find_in_table("Ip: OutNoRoutes\n"), None);
        assert_eq!(find_in_list("Ip6InNoRoutes   \t3\nIp6OutNoRoutes   \t17\n"), Some(17));
        assert_eq!(find_in_list(""), None);
    }

    #[test]
    fn this_kernel_has_the_counters() {
        let (path, find) = FILES[0];
        let (file, mut buffer) = (File::open(path).unwrap(), vec![0; MAX_BYTES]);
        for _ in 0..2 {
            // A read begins again at the start.
            assert!(read(&file, &mut buffer).and_then(find).is_some());
        }
    }
}
