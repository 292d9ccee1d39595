//! Reserves a range of user ids for a session root, against the accounts and subordinate ids of
//! this host and against other session roots.
//!
//! A directory holds one file for each reserved range, named after it, with the id and the path of
//! its root. It outlives the worker, because files with these owners do.

use std::{
    fmt,
    fs::{self, File, Permissions},
    io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    time::SystemTime,
};

use rustix::fs::{FlockOperation, flock};
use uuid::Uuid;

use super::root::{RootError, identify};
use crate::file_work::if_exists;

/// Between what `useradd`, systemd, SSSD and container engines use by default.
const FIRST: u32 = 2_100_000_000;
/// systemd uses the ids from the next one on.
const LAST: u32 = 2_147_352_575;
const DEFAULT_RANGES: UidRange = UidRange { base: FIRST, count: LAST - FIRST + 1 };
const LOCK: &str = "lock";

/// User and group ids that are reserved for the sessions of one root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UidRange {
    /// The first id.
    pub base: u32,
    /// The number of ids.
    pub count: u32,
}

impl UidRange {
    /// The last id; `None` if the range is empty or too long.
    pub(super) fn last(self) -> Option<u32> {
        self.base.checked_add(self.count.checked_sub(1)?)
    }

    pub(super) fn contains(self, uid: u32) -> bool {
        uid.checked_sub(self.base).is_some_and(|offset| offset < self.count)
    }

    fn overlaps(self, other: Self) -> bool {
        self.count > 0
            && other.count > 0
            && (self.contains(other.base) || other.contains(self.base))
    }
}

impl fmt::Display for UidRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {}", self.base, self.last().unwrap_or(self.base))
    }
}

/// How to choose a range.
#[derive(Debug, Clone)]
pub struct UidOptions {
    /// The session root that gets the range.
    pub root: PathBuf,
    /// The directory with the reservations of this host.
    pub registry: PathBuf,
    /// The first id. `None` chooses a free range.
    pub base: Option<u32>,
    /// The number of ids.
    pub count: u32,
}

/// A range that cannot be reserved.
#[derive(Debug, thiserror::Error)]
pub enum UidError {
    /// The host uses ids of the range.
    #[error(
        "sandbox.uid_base: user ids {range} overlap {taken}: choose another range, or unset it to get a free one"
    )]
    Overlap {
        /// The configured range.
        range: UidRange,
        /// The accounts or ids that use them.
        taken: String,
    },
    /// Another session root has ids of the range.
    #[error(
        "sandbox.uid_base: user ids {range} are reserved for the session root {}: choose another range, \
         unset it to get a free one, or remove {} if that root is gone", .root.display(), .entry.display()
    )]
    Reserved {
        /// The configured range.
        range: UidRange,
        /// The other root.
        root: PathBuf,
        /// The file with its reservation.
        entry: PathBuf,
    },
    /// The range ends beyond the last user id.
    #[error("sandbox.uid_base: {count} user ids from {base} exceed the last one, {}", LAST)]
    TooHigh {
        /// The first id.
        base: u32,
        /// The number of ids.
        count: u32,
    },
    /// The process could not use the range.
    #[error(
        "sandbox.uid_base: user ids {range} do not exist here: choose some that /proc/self/uid_map lists"
    )]
    Unmapped {
        /// The configured range.
        range: UidRange,
    },
    /// All ranges are taken.
    #[error("sandbox.uid_count: no range of {count} user ids is free: remove files of roots that are gone from {}", .registry.display())]
    Exhausted {
        /// The number of ids.
        count: u32,
        /// The directory with the reservations.
        registry: PathBuf,
    },
    /// The reservations cannot be read or written.
    #[error("sandbox.uid_registry: cannot {step} {}: choose a directory that all workers of this host share", .path.display())]
    Registry {
        /// The operation.
        step: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system error.
        source: io::Error,
    },
    /// The session root cannot be used.
    #[error(transparent)]
    Root(#[from] RootError),
}

/// Ids that something on this host uses.
#[derive(Debug)]
struct Taken {
    range: UidRange,
    by: String,
}

/// A reservation.
#[derive(Debug)]
struct Entry {
    range: UidRange,
    path: PathBuf,
    root_id: String,
    root: PathBuf,
    made_at: SystemTime,
}

/// Reserves user ids for a session root. A root keeps its range. Returns `None` if no range is
/// configured and the process is in a user namespace without the default ones.
///
/// # Errors
/// If the range overlaps others, or the reservation cannot be recorded.
pub fn reserve_uids(options: &UidOptions) -> Result<Option<UidRange>, UidError> {
    reserve(
        options,
        Path::new("/etc"),
        &fs::read_to_string("/proc/self/uid_map").unwrap_or_default(),
    )
}

fn reserve(options: &UidOptions, etc: &Path, uid_map: &str) -> Result<Option<UidRange>, UidError> {
    if options.base.is_none() && !is_mapped(DEFAULT_RANGES, uid_map) {
        let reason = "this user namespace lacks the default ids (set sandbox.uid_base)";
        tracing::warn!(reason, "sessions share the user of the worker");
        return Ok(None);
    }
    let (root, root_id) = identify(&options.root)?;
    let root_id = root_id.to_string();
    let registry = Registry::lock(&options.registry)?;
    let entries = registry.entries()?;
    let taken = taken_ids(etc).map_err(registry_error("compare with the accounts in", etc))?;
    let request = Request { options, entries: &entries, taken: &taken, root_id: &root_id };
    let range = match options.base {
        Some(base) => request.configured(base)?,
        None => request.choose()?,
    };
    if !is_mapped(range, uid_map) {
        return Err(UidError::Unmapped { range });
    }
    registry.record(range, &root_id, &root, &entries)?;
    Ok(Some(range))
}

/// The choice of a range for a root.
struct Request<'a> {
    options: &'a UidOptions,
    entries: &'a [Entry],
    taken: &'a [Taken],
    root_id: &'a str,
}

impl Request<'_> {
    fn configured(&self, base: u32) -> Result<UidRange, UidError> {
        let range = UidRange { base, count: self.options.count };
        if range.last().is_none_or(|last| last > LAST) {
            return Err(UidError::TooHigh { base, count: range.count });
        }
        if let Some(taken) = self.taken.iter().find(|taken| taken.range.overlaps(range)) {
            return Err(UidError::Overlap { range, taken: taken.by.clone() });
        }
        let is_other = |entry: &&Entry| entry.root_id != self.root_id && entry.root_exists();
        match self.entries.iter().filter(is_other).find(|entry| entry.range.overlaps(range)) {
            Some(entry) => Err(UidError::Reserved {
                range,
                root: entry.root.clone(),
                entry: entry.path.clone(),
            }),
            None => Ok(range),
        }
    }

    /// The root's range, or one that no root had, or the one reserved longest ago for a root that
    /// is gone. The search starts at random, for instances that cannot see each other's
    /// reservations.
    fn choose(&self) -> Result<UidRange, UidError> {
        let count = self.options.count;
        let exhausted = || UidError::Exhausted { count, registry: self.options.registry.clone() };
        let is_unused =
            |range: UidRange| !self.taken.iter().any(|taken| taken.range.overlaps(range));
        let own = self.entries.iter().filter(|entry| entry.root_id == self.root_id);
        if let Some(entry) =
            own.filter(|entry| entry.range.count == count).max_by_key(|entry| entry.made_at)
            && entry.range.base >= FIRST
            && is_unused(entry.range)
        {
            return Ok(entry.range);
        }
        let ranges = DEFAULT_RANGES.count / count;
        let first =
            u32::try_from(Uuid::new_v4().as_u128() % u128::from(ranges.max(1))).unwrap_or(0);
        let mut oldest: Option<(SystemTime, UidRange)> = None;
        for number in (first..ranges).chain(0..first.min(ranges)) {
            let range = UidRange { base: FIRST + number * count, count };
            let mut overlapping =
                self.entries.iter().filter(|entry| entry.range.overlaps(range)).peekable();
            if !is_unused(range) {
                continue;
            }
            if overlapping.peek().is_none() {
                return Ok(range);
            }
            let made_at = overlapping.try_fold(SystemTime::UNIX_EPOCH, |latest, entry| {
                (!entry.root_exists()).then_some(latest.max(entry.made_at))
            });
            if let Some(made_at) = made_at
                && oldest.is_none_or(|(time, _)| made_at < time)
            {
                oldest = Some((made_at, range));
            }
        }
        oldest.map(|(_, range)| range).ok_or_else(exhausted)
    }
}

/// The directory with the reservations, locked.
struct Registry<'a> {
    path: &'a Path,
    _lock: File,
}

impl<'a> Registry<'a> {
    fn lock(path: &'a Path) -> Result<Self, UidError> {
        let locked = || {
            fs::create_dir_all(path)?;
            fs::set_permissions(path, Permissions::from_mode(0o700))?;
            let lock =
                File::options().create(true).truncate(false).write(true).open(path.join(LOCK))?;
            flock(&lock, FlockOperation::LockExclusive)?;
            Ok(lock)
        };
        let lock = locked().map_err(registry_error("lock", path))?;
        Ok(Self { path, _lock: lock })
    }

    fn entries(&self) -> Result<Vec<Entry>, UidError> {
        let failed = || registry_error("read", self.path);
        let mut entries = Vec::new();
        for entry in fs::read_dir(self.path).map_err(failed())? {
            let path = entry.map_err(failed())?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let Some((base, count)) = name.split_once('-') else { continue };
            let (Ok(base), Ok(count)) = (base.parse(), count.parse()) else { continue };
            let text = fs::read_to_string(&path).map_err(registry_error("read", &path))?;
            let made_at = fs::metadata(&path)
                .and_then(|found| found.modified())
                .map_err(registry_error("read", &path))?;
            let (root_id, root) = text.trim_end_matches('\n').split_once(' ').unwrap_or_default();
            let root_id = root_id.to_owned();
            let root = PathBuf::from(root);
            entries.push(Entry { range: UidRange { base, count }, path, root_id, root, made_at });
        }
        Ok(entries)
    }

    /// Records the range, and forgets those of roots that are gone which it overlaps.
    fn record(
        &self,
        range: UidRange,
        id: &str,
        root: &Path,
        entries: &[Entry],
    ) -> Result<(), UidError> {
        let is_replaced = |entry: &&Entry| entry.root_id != id && entry.range.overlaps(range);
        for entry in entries.iter().filter(is_replaced) {
            fs::remove_file(&entry.path).map_err(registry_error("remove", &entry.path))?;
        }
        let path = self.path.join(format!("{}-{}", range.base, range.count));
        let new = self.path.join(format!("new.{}", Uuid::new_v4()));
        let write = || {
            fs::write(&new, format!("{id} {}\n", root.display()))?;
            File::open(&new)?.sync_all()?;
            fs::rename(&new, &path)?;
            File::open(self.path)?.sync_all()
        };
        write().map_err(registry_error("write", &path))
    }
}

impl Entry {
    /// Whether the root that has the range still exists. A damaged entry counts as existing.
    fn root_exists(&self) -> bool {
        self.root_id.is_empty()
            || fs::read_to_string(self.root.join("root-id"))
                .is_ok_and(|id| id.trim() == self.root_id)
    }
}

/// The ids of accounts and groups, and the subordinate ids of accounts.
fn taken_ids(etc: &Path) -> io::Result<Vec<Taken>> {
    let mut taken = Vec::new();
    // The field that holds the first id, and the field that holds the number of ids.
    for (name, first, count) in
        [("passwd", 2, None), ("group", 2, None), ("subuid", 1, Some(2)), ("subgid", 1, Some(2))]
    {
        let path = etc.join(name);
        let Some(text) = if_exists(fs::read_to_string(&path))? else { continue };
        for fields in text.lines().map(|line| line.split(':').collect::<Vec<_>>()) {
            let number = |at: usize| fields.get(at)?.trim().parse::<u32>().ok();
            let Some((base, count)) = number(first).zip(count.map_or(Some(1), number)) else {
                continue;
            };
            let by = format!("those of {} in {}", fields[0], path.display());
            taken.push(Taken { range: UidRange { base, count }, by });
        }
    }
    Ok(taken)
}

/// Whether a line of the map covers the whole range.
fn is_mapped(range: UidRange, uid_map: &str) -> bool {
    uid_map.lines().any(|line| {
        let mut numbers =
            line.split_ascii_whitespace().filter_map(|number| number.parse::<u64>().ok());
        let (Some(inside), Some(_), Some(count)) = (numbers.next(), numbers.next(), numbers.next())
        else {
            return false;
        };
        inside <= u64::from(range.base)
            && u64::from(range.base) + u64::from(range.count) <= inside.saturating_add(count)
    })
}

fn registry_error(step: &'static str, path: &Path) -> impl FnOnce(io::Error) -> UidError {
    move |source| UidError::Registry { step, path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: &str = "         0          0 4294967295\n";
    const SUBUID: &str = "ann:100000:65536\nbob:165536:65536\n";

    struct Host(tempfile::TempDir);

    impl Host {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            fs::create_dir(dir.path().join("etc")).unwrap();
            let host = Self(dir);
            host.write("passwd", "root:x:0:0::/:\nann:x:1000:1000::/:\n");
            host.write("subuid", SUBUID);
            host
        }

        fn write(&self, name: &str, text: &str) {
            fs::write(self.0.path().join("etc").join(name), text).unwrap();
        }

        fn root(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }

        fn reserve(
            &self,
            root: &str,
            base: Option<u32>,
            count: u32,
        ) -> Result<Option<UidRange>, UidError> {
            let registry = self.0.path().join("registry");
            let options = UidOptions { root: self.root(root), registry, base, count };
            reserve(&options, &self.0.path().join("etc"), WHOLE)
        }

        fn chosen(&self, root: &str, count: u32) -> UidRange {
            self.reserve(root, None, count).unwrap().unwrap()
        }
    }

    #[test]
    fn configured_range_must_not_overlap_accounts() {
        let host = Host::new();
        host.write("group", "late:x:500009:\n");
        for (base, named) in [(200_000, "bob"), (165_535, "ann"), (999, "ann"), (500_000, "late")] {
            let refused = host.reserve("a", Some(base), 10).unwrap_err().to_string();
            assert!(refused.contains("sandbox.uid_base") && refused.contains(named), "{refused}");
        }
        assert!(
            host.reserve("a", Some(500_010), 10).is_ok(),
            "the control: ids next to them are free"
        );
        assert!(matches!(host.reserve("a", Some(LAST), 2), Err(UidError::TooHigh { .. })));
    }

    #[test]
    fn instances_never_share_a_range() {
        let host = Host::new();
        let first = host.chosen("a", 65_536);
        assert!(
            first.base >= FIRST && first.last().unwrap() <= LAST,
            "outside of usual ranges: {first}"
        );
        assert_eq!(host.chosen("a", 65_536), first, "a root keeps its range");
        for number in 0..20 {
            let other = host.chosen(&format!("b{number}"), 65_536);
            assert!(!other.overlaps(first), "{other}");
        }
        let refused = host.reserve("c", Some(first.base + 1), 5).unwrap_err();
        assert!(
            matches!(&refused, UidError::Reserved { root, .. } if root.ends_with("a")),
            "{refused}"
        );
        fs::remove_dir_all(host.root("a")).unwrap();
        assert!(
            host.reserve("c", Some(first.base + 1), 5).is_ok(),
            "the control: its root is gone"
        );
    }

    #[test]
    fn range_is_reused_only_after_all_others() {
        let host = Host::new();
        let count = DEFAULT_RANGES.count / 3;
        let gone: Vec<_> = ["a", "b"].map(|root| host.chosen(root, count)).to_vec();
        for root in ["a", "b"] {
            fs::remove_dir_all(host.root(root)).unwrap();
        }
        let third = host.chosen("c", count);
        assert!(gone.iter().all(|range| !range.overlaps(third)), "an unused range comes first");
        assert_eq!(host.chosen("d", count), gone[0], "then the one that is gone longest");
        assert_eq!(host.chosen("e", count), gone[1]);
        let refused = host.reserve("f", None, count).unwrap_err();
        assert!(matches!(refused, UidError::Exhausted { .. }), "{refused}");
    }

    #[test]
    fn chosen_range_avoids_accounts() {
        let host = Host::new();
        let count = DEFAULT_RANGES.count / 2;
        host.write("subgid", &format!("ann:{FIRST}:65536\n"));
        assert_eq!(host.chosen("a", count).base, FIRST + count);
        host.write("subgid", &format!("ann:{FIRST}:65536\nbob:{}:1\n", FIRST + count));
        assert!(matches!(host.reserve("a", None, count), Err(UidError::Exhausted { .. })));
    }

    #[test]
    fn range_must_exist_in_user_namespace() {
        let range = UidRange { base: 10, count: 5 };
        assert!(is_mapped(range, WHOLE) && is_mapped(range, "0 100000 15\n"));
        assert!(!is_mapped(range, "0 100000 14\n") && !is_mapped(range, "11 100000 50\n"));
        let host = Host::new();
        let registry = host.root("registry");
        let mut options = UidOptions { root: host.root("a"), registry, base: None, count: 5 };
        let etc = host.root("etc");
        assert_eq!(reserve(&options, &etc, "0 100000 65536\n").unwrap(), None);
        options.base = Some(70_000);
        assert!(matches!(
            reserve(&options, &etc, "0 100000 65536\n"),
            Err(UidError::Unmapped { .. })
        ));
    }
}
