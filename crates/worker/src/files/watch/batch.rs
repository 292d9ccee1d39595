//! The events of one message or a few: bounded, and without repetitions.

use std::{
    collections::HashMap,
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

use codelia_proto::v1::{FileEvent, FileEventKind as Kind, WatchFilesResponse};
use std::os::unix::ffi::OsStrExt;

/// Events that are collected before some are dropped.
const MAX_EVENTS: usize = 4_096;
/// Bytes of paths that are collected before some are dropped.
const MAX_BYTES: usize = 1 << 20;
/// Bytes of paths in one message, and one path more.
const MESSAGE_BYTES: usize = 256 * 1024;

/// Events that were not sent.
#[derive(Debug, Default)]
pub(super) struct Batch {
    events: Vec<FileEvent>,
    /// The last event of each path.
    last: HashMap<String, Kind>,
    bytes: usize,
    /// Whether events are missing.
    has_lost: bool,
}

impl Batch {
    /// Adds an event about a path, unless the last one about it says the same.
    pub(super) fn add(&mut self, kind: Kind, path: &Path) {
        let path = shown(path);
        if self.last.get(&path) != Some(&kind) {
            self.push(kind, path, String::new());
        }
    }

    /// Adds the event that a file was renamed.
    pub(super) fn add_renamed(&mut self, from: &Path, to: &Path) {
        let from = shown(from);
        self.last.insert(from.clone(), Kind::Removed);
        self.push(Kind::Renamed, shown(to), from);
    }

    /// Records that events are missing.
    pub(super) fn lose(&mut self) {
        self.has_lost = true;
    }

    fn push(&mut self, kind: Kind, path: String, previous_path: String) {
        self.bytes += path.len() + previous_path.len();
        if self.events.len() >= MAX_EVENTS || self.bytes > MAX_BYTES {
            self.has_lost = true;
            return;
        }
        self.last.insert(path.clone(), kind);
        self.events.push(FileEvent { kind: kind.into(), path, previous_path, time: now() });
    }

    /// The messages with all events. An overflow comes last: what a listing shows after it is
    /// complete.
    pub(super) fn into_messages(mut self) -> Vec<WatchFilesResponse> {
        if self.has_lost {
            self.events.push(FileEvent {
                kind: Kind::Overflow.into(),
                time: now(),
                ..FileEvent::default()
            });
        }
        let mut messages: Vec<WatchFilesResponse> = Vec::new();
        let mut bytes = MESSAGE_BYTES;
        for event in self.events {
            if bytes >= MESSAGE_BYTES {
                messages.push(WatchFilesResponse::default());
                bytes = 0;
            }
            bytes += event.path.len() + event.previous_path.len();
            if let Some(message) = messages.last_mut() {
                message.events.push(event);
            }
        }
        messages
    }
}

fn shown(path: &Path) -> String {
    String::from_utf8_lossy(path.as_os_str().as_bytes()).into_owned()
}

fn now() -> Option<prost_types::Timestamp> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
    Some(prost_types::Timestamp {
        seconds: i64::try_from(now.as_secs()).ok()?,
        nanos: i32::try_from(now.subsec_nanos()).ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(batch: Batch) -> Vec<(Kind, String)> {
        let messages = batch.into_messages();
        let events = messages.into_iter().flat_map(|message| message.events);
        events.map(|event| (event.kind(), event.path)).collect()
    }

    #[test]
    fn repetitions_are_one_event() {
        let mut batch = Batch::default();
        let a = Path::new("a");
        for kind in [Kind::Created, Kind::Modified, Kind::Modified, Kind::Removed, Kind::Created] {
            batch.add(kind, a);
        }
        batch.add_renamed(a, Path::new("b"));
        batch.add(Kind::Removed, a);
        let expected = [Kind::Created, Kind::Modified, Kind::Removed, Kind::Created];
        let mut expected = expected.map(|kind| (kind, "a".to_owned())).to_vec();
        expected.push((Kind::Renamed, "b".to_owned()));
        assert_eq!(kinds(batch), expected);
    }

    #[test]
    fn large_batch_ends_with_an_overflow() {
        let mut batch = Batch::default();
        (0..MAX_EVENTS + 1)
            .for_each(|number| batch.add(Kind::Created, Path::new(&number.to_string())));
        let kinds = kinds(batch);
        assert_eq!(kinds.len(), MAX_EVENTS + 1);
        assert_eq!(kinds.last(), Some(&(Kind::Overflow, String::new())));
        let mut batch = Batch::default();
        (0..400).for_each(|number| batch.add(Kind::Created, Path::new(&format!("{number:04000}"))));
        let messages = batch.into_messages();
        assert_eq!(messages.len(), 4);
        assert!(
            messages.iter().all(|message| message.events.len() <= 70),
            "a message is too large"
        );
        assert!(Batch::default().into_messages().is_empty());
    }
}
