//! Properties of archives. The entry point of the fuzz target panics if one does not hold.

#![allow(clippy::expect_used, clippy::missing_panics_doc, reason = "a panic is a finding")]

use codelia_types::Reason;

use super::{
    super::error::FileError,
    decompress::Input,
    tar::{
        BLOCK, CHECKSUM, Kind, MAX_EXTENSION, Member, Reader, Receiver, sum, write_end,
        write_member, write_padding,
    },
};

/// What is decompressed at most: a fuzzer learns little from more.
const MAX_DECOMPRESSED: usize = 256 * 1024;

/// Keeps the members and their content.
#[derive(Debug, Default)]
struct Members {
    members: Vec<(Member, Vec<u8>)>,
    is_open: bool,
}

impl Receiver for Members {
    fn begin(&mut self, member: Member) -> Result<(), FileError> {
        assert!(!self.is_open, "a member begins within another");
        self.is_open = true;
        self.members.push((member, Vec::new()));
        Ok(())
    }

    fn content(&mut self, data: &[u8]) -> Result<(), FileError> {
        assert!(self.is_open, "content without a member");
        self.members.last_mut().expect("a member").1.extend_from_slice(data);
        Ok(())
    }

    fn end(&mut self) -> Result<(), FileError> {
        assert!(self.is_open, "a member ends twice");
        self.is_open = false;
        let (member, content) = self.members.last().expect("a member");
        assert_eq!(member.size, content.len() as u64);
        Ok(())
    }
}

/// The members of an archive with their contents, and how reading it ended.
pub(super) type ReadArchive = (Vec<(Member, Vec<u8>)>, Result<(), Reason>);

/// The members of an archive that arrives in pieces, and how reading it ended.
pub(super) fn read(archive: &[u8], piece: usize) -> ReadArchive {
    let (mut reader, mut receiver) = (Reader::default(), Members::default());
    let read = archive.chunks(piece).try_for_each(|piece| reader.read(piece, &mut receiver));
    let ended = read.and_then(|()| reader.finish()).map_err(|error| error.reason);
    assert!(ended.is_err() || !receiver.is_open, "the archive ends within a member");
    (receiver.members, ended)
}

/// An archive of these members.
pub(super) fn write(members: &[(Member, Vec<u8>)]) -> Vec<u8> {
    let mut out = Vec::new();
    for (member, content) in members {
        write_member(&mut out, member);
        out.extend_from_slice(content);
        write_padding(&mut out, member.size);
    }
    write_end(&mut out);
    out
}

/// What an input has that arrives in pieces, without compression.
pub(super) fn decompress(data: &[u8], piece: usize, max: usize) -> Result<Vec<u8>, Reason> {
    let (mut input, mut whole) = (Input::default(), Vec::new());
    let mut keep = |data: &[u8]| {
        whole.extend_from_slice(data);
        if whole.len() > max { Err(Reason::ArchiveTooLarge.into()) } else { Ok(()) }
    };
    let read = data.chunks(piece).try_for_each(|piece| input.read(piece, &mut keep));
    read.and_then(|()| input.finish()).map_err(|error| error.reason)?;
    Ok(whole)
}

/// An archive, plain or compressed.
pub fn tar(bytes: &[u8]) {
    let whole = decompress(bytes, bytes.len().max(1), MAX_DECOMPRESSED);
    for size in piece_sizes(bytes.len()) {
        let pieces = decompress(bytes, size, MAX_DECOMPRESSED);
        // Of two errors either may be seen first.
        assert!(
            pieces == whole || pieces.is_err() && whole.is_err(),
            "decompressed in pieces of {size}"
        );
    }
    let Ok(archive) = whole else { return };
    check_members(&archive);
    // Most changes break a checksum, and nothing behind it is reached.
    check_members(&with_checksums(archive));
}

/// Sizes of the pieces in which an input arrives. A long one comes in few.
fn piece_sizes(length: usize) -> [usize; 2] {
    [length / 512 + 1, length / 16 + 7]
}

/// Corrects the checksum of every block that looks like a header.
fn with_checksums(mut archive: Vec<u8>) -> Vec<u8> {
    for block in archive.chunks_exact_mut(BLOCK) {
        if &block[257..262] == b"ustar" {
            let sum = format!("{:06o}\0 ", sum(block));
            block[CHECKSUM].copy_from_slice(sum.as_bytes());
        }
    }
    archive
}

/// Members are the same however they arrive and whatever follows, bounded, and written as they are
/// read.
fn check_members(archive: &[u8]) {
    let whole = read(archive, archive.len().max(1));
    for size in piece_sizes(archive.len()) {
        assert_eq!(read(archive, size), whole, "in pieces of {size}");
    }
    let (members, ended) = whole;
    assert!(members.len() <= archive.len() / BLOCK, "a member has a header");
    let content: usize = members.iter().map(|(_, content)| content.len()).sum();
    assert!(content <= archive.len());
    for (member, content) in &members {
        let max = usize::try_from(MAX_EXTENSION).expect("small");
        assert!(member.name.len() <= max && member.link.len() <= max && member.mode <= 0o777);
        assert!(member.kind == Kind::File || content.is_empty());
    }
    if ended.is_err() {
        return;
    }
    let (followed, ended) = read(&[archive, &[0xff; 2 * BLOCK]].concat(), BLOCK);
    assert_eq!((&followed, ended), (&members, Ok(())), "what follows the end matters");
    let written: Vec<_> = members.into_iter().filter(|(member, _)| is_writable(member)).collect();
    assert_eq!(read(&write(&written), BLOCK), (written, Ok(())), "what is written is read");
}

/// Whether a file system can have the member. An export writes no other.
fn is_writable(member: &Member) -> bool {
    let is_text = |text: &[u8]| !text.contains(&0);
    is_text(&member.name) && is_text(&member.link) && member.modified >= 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tar_holds_for_mutations() {
        codelia_fuzz::check("tar", 1000, tar);
    }
}
