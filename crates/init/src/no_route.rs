//! Counts how often programs of the sandbox tried to reach an address to which its network has no
//! route. The kernel counts them, in files that are opened before init is restricted.

use std::{fs::File, io::Read};

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
        // Each file is read once.
        Self { files: open_files(), before: sum(open_files()) }
    }

    /// The number of attempts. What cannot be read counts as none.
    pub(crate) fn count(self) -> u64 {
        sum(self.files).saturating_sub(self.before)
    }
}

fn open_files() -> Vec<(File, Find)> {
    let open = |(path, find): (&str, Find)| File::open(path).ok().map(|file| (file, find));
    FILES.into_iter().filter_map(open).collect()
}

fn sum(files: Vec<(File, Find)>) -> u64 {
    let counts = files.into_iter().filter_map(|(file, find)| find(&read(file)?));
    counts.fold(0, u64::saturating_add)
}

/// With `read` alone: init's filter allows no other call on files.
fn read(mut file: File) -> Option<String> {
    let (mut text, mut length) = (vec![0; MAX_BYTES], 0);
    loop {
        match file.read(text.get_mut(length..)?) {
            Ok(0) => break,
            Ok(count) => length += count,
            Err(_) => return None,
        }
    }
    text.truncate(length);
    String::from_utf8(text).ok()
}

/// In pairs of lines: names, then values.
fn find_in_table(text: &str) -> Option<u64> {
    let mut rows = text.lines().filter_map(|line| line.strip_prefix(TABLE)).map(str::split_whitespace);
    let (names, values) = (rows.next()?, rows.next()?);
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
        let table = "Ip: Forwarding OutDiscards OutNoRoutes\nIp: 1 5 42\nIcmp: OutNoRoutes\nIcmp: 7\n";
        assert_eq!(find_in_table(table), Some(42));
        assert_eq!(find_in_table("Ip: OutNoRoutes\n"), None);
        assert_eq!(find_in_list("Ip6InNoRoutes   \t3\nIp6OutNoRoutes   \t17\n"), Some(17));
        assert_eq!(find_in_list(""), None);
    }

    #[test]
    fn this_kernel_has_the_counters() {
        let found =
            FILES.map(|(path, find)| File::open(path).ok().and_then(read).and_then(|text| find(&text)));
        assert!(found[0].is_some(), "{found:?}");
    }
}
