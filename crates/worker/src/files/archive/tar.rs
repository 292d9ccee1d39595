//! The tar format: members as an archive has them, without access to files.
//!
//! Reads ustar, pax and GNU archives; writes GNU ones. Sparse files are not supported. What a
//! header announces is not trusted: names are bounded before they are kept, and content is passed
//! on as it arrives.

use codelia_types::Reason;

use super::super::error::FileError;

/// Headers and content are padded to blocks.
pub(super) const BLOCK: usize = 512;
/// Bytes of an extended header: names, and attributes that are ignored.
pub(super) const MAX_EXTENSION: u64 = 256 * 1024;
const NAME: std::ops::Range<usize> = 0..100;
const LINK: std::ops::Range<usize> = 157..257;
pub(super) const CHECKSUM: std::ops::Range<usize> = 148..156;

/// The kind of a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    File,
    Directory,
    Symlink,
    HardLink,
    /// A device or FIFO.
    Special,
}

/// A member of an archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Member {
    pub(super) name: Vec<u8>,
    /// The target of a link.
    pub(super) link: Vec<u8>,
    pub(super) kind: Kind,
    /// Bytes of content.
    pub(super) size: u64,
    pub(super) mode: u32,
    /// Seconds since 1970.
    pub(super) modified: i64,
}

/// Receives the members of an archive, each with `begin`, `content` and `end`.
pub(super) trait Receiver {
    fn begin(&mut self, member: Member) -> Result<(), FileError>;
    fn content(&mut self, data: &[u8]) -> Result<(), FileError>;
    fn end(&mut self) -> Result<(), FileError>;
}

/// Reads an archive that arrives in pieces.
#[derive(Debug, Default)]
pub(super) struct Reader {
    state: State,
    /// The header or extended header that is arriving.
    buffer: Vec<u8>,
    extended: Extended,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Header,
    /// Content, and the padding after it.
    Content { left: u64, padding: u64 },
    /// An extended header of this type.
    Extension { kind: u8, left: u64, padding: u64 },
    /// Content that is ignored.
    Ignored { left: u64 },
    /// After the end of the archive.
    Ended,
}

/// Values of extended headers for the next member.
#[derive(Debug, Default)]
struct Extended {
    name: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    modified: Option<i64>,
}

fn invalid() -> FileError {
    Reason::ArchiveInvalid.into()
}

fn padding(size: u64) -> u64 {
    size.wrapping_neg() % BLOCK as u64
}

impl Reader {
    /// Reads the next piece.
    pub(super) fn read(
        &mut self,
        mut data: &[u8],
        receiver: &mut impl Receiver,
    ) -> Result<(), FileError> {
        while !data.is_empty() && self.state != State::Ended {
            let used = self.step(data, receiver)?;
            data = &data[used..];
        }
        Ok(())
    }

    /// Fails unless the end of the archive has been read.
    pub(super) fn finish(&self) -> Result<(), FileError> {
        if self.state == State::Ended { Ok(()) } else { Err(invalid()) }
    }

    /// Reads part of a piece and returns how many bytes it used.
    fn step(&mut self, data: &[u8], receiver: &mut impl Receiver) -> Result<usize, FileError> {
        let part = |left: u64| data.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        match self.state {
            State::Ended => Ok(data.len()),
            State::Header => {
                let count = part((BLOCK - self.buffer.len()) as u64);
                self.buffer.extend_from_slice(&data[..count]);
                if self.buffer.len() == BLOCK {
                    let header = std::mem::take(&mut self.buffer);
                    self.state = self.next_state(&header, receiver)?;
                }
                Ok(count)
            }
            State::Content { left, padding } => {
                let count = part(left);
                receiver.content(&data[..count])?;
                self.state = match left - count as u64 {
                    0 => {
                        receiver.end()?;
                        ignored(padding)
                    }
                    left => State::Content { left, padding },
                };
                Ok(count)
            }
            State::Extension { kind, left, padding } => {
                let count = part(left);
                self.buffer.extend_from_slice(&data[..count]);
                self.state = match left - count as u64 {
                    0 => {
                        let extension = std::mem::take(&mut self.buffer);
                        self.extended.add(kind, &extension)?;
                        ignored(padding)
                    }
                    left => State::Extension { kind, left, padding },
                };
                Ok(count)
            }
            State::Ignored { left } => {
                let count = part(left);
                self.state = ignored(left - count as u64);
                Ok(count)
            }
        }
    }

    fn next_state(
        &mut self,
        header: &[u8],
        receiver: &mut impl Receiver,
    ) -> Result<State, FileError> {
        if header.iter().all(|byte| *byte == 0) {
            return Ok(State::Ended);
        }
        check_sum(header)?;
        let size = u64::try_from(number(&header[124..136])?).map_err(|_| invalid())?;
        match header[156] {
            kind @ (b'x' | b'L' | b'K') => {
                if size > MAX_EXTENSION {
                    return Err(Reason::ArchiveTooLarge.into());
                }
                if size == 0 {
                    return Err(invalid());
                }
                Ok(State::Extension { kind, left: size, padding: padding(size) })
            }
            // Defaults for all members, and the name of the archive.
            b'g' | b'V' => Ok(ignored(size.checked_add(padding(size)).ok_or_else(invalid)?)),
            kind => {
                let member = self.member(header, kind, size)?;
                let size = member.size;
                receiver.begin(member)?;
                if size == 0 {
                    receiver.end()?;
                    return Ok(State::Header);
                }
                Ok(State::Content { left: size, padding: padding(size) })
            }
        }
    }

    fn member(&mut self, header: &[u8], kind: u8, size: u64) -> Result<Member, FileError> {
        let extended = std::mem::take(&mut self.extended);
        let name = extended.name.unwrap_or_else(|| header_name(header));
        let kind = match kind {
            b'0' | 0 | b'7' if name.ends_with(b"/") => Kind::Directory,
            b'0' | 0 | b'7' => Kind::File,
            b'1' => Kind::HardLink,
            b'2' => Kind::Symlink,
            b'5' => Kind::Directory,
            b'3' | b'4' | b'6' => Kind::Special,
            _ => return Err(invalid()),
        };
        let link = extended.link.unwrap_or_else(|| text(&header[LINK]).to_vec());
        // Only files have content, whatever the header says.
        let size = if kind == Kind::File { extended.size.unwrap_or(size) } else { 0 };
        let mode = u32::try_from(number(&header[100..108])? & 0o777).unwrap_or_default();
        let modified = extended.modified.map_or_else(|| number(&header[136..148]), Ok)?;
        Ok(Member { name, link, kind, size, mode, modified })
    }
}

fn ignored(left: u64) -> State {
    if left == 0 { State::Header } else { State::Ignored { left } }
}

impl Extended {
    fn add(&mut self, kind: u8, extension: &[u8]) -> Result<(), FileError> {
        match kind {
            b'L' => self.name = Some(text(extension).to_vec()),
            b'K' => self.link = Some(text(extension).to_vec()),
            _ => return self.add_records(extension),
        }
        Ok(())
    }

    /// Reads pax records: `LENGTH KEY=VALUE\n`.
    fn add_records(&mut self, mut records: &[u8]) -> Result<(), FileError> {
        while !records.is_empty() {
            let space = records.iter().position(|byte| *byte == b' ').ok_or_else(invalid)?;
            let length: usize = parse(&records[..space])?;
            let record = records.get(space + 1..length).ok_or_else(invalid)?;
            let record = record.strip_suffix(b"\n").ok_or_else(invalid)?;
            let equals = record.iter().position(|byte| *byte == b'=').ok_or_else(invalid)?;
            self.add_record(&record[..equals], &record[equals + 1..])?;
            records = &records[length..];
        }
        Ok(())
    }

    fn add_record(&mut self, key: &[u8], value: &[u8]) -> Result<(), FileError> {
        match key {
            b"path" => self.name = Some(value.to_vec()),
            b"linkpath" => self.link = Some(value.to_vec()),
            b"size" => self.size = Some(parse(value)?),
            b"mtime" => {
                let seconds = value.split(|byte| *byte == b'.').next().unwrap_or_default();
                self.modified = Some(parse(seconds)?);
            }
            key if key.starts_with(b"GNU.sparse.") => return Err(invalid()),
            _ => {}
        }
        Ok(())
    }
}

fn parse<T: std::str::FromStr>(digits: &[u8]) -> Result<T, FileError> {
    std::str::from_utf8(digits).ok().and_then(|digits| digits.parse().ok()).ok_or_else(invalid)
}

/// The bytes before the first NUL.
fn text(field: &[u8]) -> &[u8] {
    field.split(|byte| *byte == 0).next().unwrap_or_default()
}

fn header_name(header: &[u8]) -> Vec<u8> {
    let name = text(&header[NAME]);
    // GNU archives use the field of the prefix for times.
    let prefix = if &header[257..263] == b"ustar\0" { text(&header[345..500]) } else { b"" };
    if prefix.is_empty() { name.to_vec() } else { [prefix, b"/", name].concat() }
}

/// A number in octal digits, or in binary if the first bit is set.
fn number(field: &[u8]) -> Result<i64, FileError> {
    let [first, rest @ ..] = field else { return Err(invalid()) };
    if first & 0x80 != 0 {
        let negative = first & 0x40 != 0;
        let start = if negative { i128::from(*first) - 256 } else { i128::from(first & 0x3f) };
        let value =
            rest.iter().fold(start, |value, byte| value.saturating_mul(256) | i128::from(*byte));
        return i64::try_from(value).map_err(|_| invalid());
    }
    let digits = field.split(|byte| matches!(byte, 0 | b' ')).find(|part| !part.is_empty());
    let digits = std::str::from_utf8(digits.unwrap_or(b"0")).map_err(|_| invalid())?;
    i64::from_str_radix(digits, 8).ok().filter(|number| *number >= 0).ok_or_else(invalid)
}

/// The sum of all bytes of a header but its checksum.
pub(super) fn sum(header: &[u8]) -> i64 {
    let counted =
        |(at, byte): (usize, &u8)| i64::from(if CHECKSUM.contains(&at) { b' ' } else { *byte });
    header.iter().enumerate().map(counted).sum()
}

fn check_sum(header: &[u8]) -> Result<(), FileError> {
    if number(&header[CHECKSUM])? == sum(header) { Ok(()) } else { Err(invalid()) }
}

/// Appends the headers of a member. Its content and [`write_padding`] follow.
pub(super) fn write_member(out: &mut Vec<u8>, member: &Member) {
    for (kind, value, field) in [(b'K', &member.link, LINK), (b'L', &member.name, NAME)] {
        if value.len() > field.len() {
            // The content ends with NUL.
            let size = value.len() as u64 + 1;
            write_header(out, kind, b"././@LongLink", b"", (0, size, 0));
            out.extend_from_slice(value);
            out.push(0);
            write_padding(out, size);
        }
    }
    let kind = match member.kind {
        Kind::File => b'0',
        Kind::HardLink => b'1',
        Kind::Symlink => b'2',
        Kind::Directory => b'5',
        Kind::Special => b'6',
    };
    let numbers = (member.mode, member.size, member.modified);
    write_header(out, kind, &member.name, &member.link, numbers);
}

/// Appends the padding after content of this size.
pub(super) fn write_padding(out: &mut Vec<u8>, size: u64) {
    out.resize(out.len() + usize::try_from(padding(size)).unwrap_or_default(), 0);
}

/// Appends the end of an archive.
pub(super) fn write_end(out: &mut Vec<u8>) {
    out.resize(out.len() + 2 * BLOCK, 0);
}

fn write_header(out: &mut Vec<u8>, kind: u8, name: &[u8], link: &[u8], numbers: (u32, u64, i64)) {
    let (mode, size, modified) = numbers;
    let mut header = [0_u8; BLOCK];
    let mut put = |at: usize, max: usize, bytes: &[u8]| {
        let bytes = &bytes[..bytes.len().min(max)];
        header[at..at + bytes.len()].copy_from_slice(bytes);
    };
    put(0, NAME.len(), name);
    put(100, 8, &digits::<8>(u64::from(mode)));
    put(108, 8, &digits::<8>(0));
    put(116, 8, &digits::<8>(0));
    put(124, 12, &digits::<12>(size));
    put(136, 12, &digits::<12>(u64::try_from(modified).unwrap_or_default()));
    put(156, 1, &[kind]);
    put(157, LINK.len(), link);
    put(257, 8, b"ustar  \0");
    let sum = format!("{:06o}\0 ", sum(&header));
    header[CHECKSUM].copy_from_slice(sum.as_bytes());
    out.extend_from_slice(&header);
}

/// A number in octal digits and a NUL; in binary if it has too many digits.
fn digits<const WIDTH: usize>(value: u64) -> [u8; WIDTH] {
    let mut field = [0; WIDTH];
    let text = format!("{value:0width$o}", width = WIDTH - 1);
    if text.len() < WIDTH {
        field[..text.len()].copy_from_slice(text.as_bytes());
    } else {
        field[WIDTH - 8..].copy_from_slice(&value.to_be_bytes());
        field[0] = 0x80;
    }
    field
}

#[cfg(test)]
mod tests {
    use super::{super::fuzz, *};

    fn read(archive: &[u8], piece: usize) -> Result<Vec<(Member, Vec<u8>)>, Reason> {
        let (members, ended) = fuzz::read(archive, piece);
        ended.map(|()| members)
    }

    fn member(name: &[u8], link: &[u8], kind: Kind, size: u64) -> Member {
        Member {
            name: name.to_vec(),
            link: link.to_vec(),
            kind,
            size,
            mode: 0o640,
            modified: 1_700_000_000,
        }
    }

    #[test]
    fn members_round_trip_in_pieces_of_any_size() {
        let long = [b"d/".repeat(300), vec![0xff]].concat();
        let members = vec![
            (member(b"a", b"", Kind::File, 700), vec![7; 700]),
            (member(b"d", b"", Kind::Directory, 0), Vec::new()),
            (member(&long, b"", Kind::File, 512), vec![8; 512]),
            (member(b"s", &long, Kind::Symlink, 0), Vec::new()),
            (member(&[b'n'; 100], b"a", Kind::HardLink, 0), Vec::new()),
            (member(b"new\nline", b"", Kind::File, 0), Vec::new()),
        ];
        let archive = fuzz::write(&members);
        assert_eq!(archive.len() % BLOCK, 0);
        for piece in [1, 511, 512, 513, archive.len()] {
            assert_eq!(read(&archive, piece).unwrap(), members, "pieces of {piece}");
        }
    }

    #[test]
    fn incomplete_and_corrupt_archives_are_refused() {
        let whole = fuzz::write(&[(member(b"a", b"", Kind::File, 700), vec![7; 700])]);
        for end in [0, 100, 512, 1000, 1536] {
            assert_eq!(read(&whole[..end], 512), Err(Reason::ArchiveInvalid), "cut at {end}");
        }
        for at in [0, 100, 124, 148, 156] {
            let mut corrupt = whole.clone();
            corrupt[at] ^= 1;
            assert_eq!(read(&corrupt, 512), Err(Reason::ArchiveInvalid), "bit at {at}");
        }
        assert_eq!(read(b"PK\x03\x04".repeat(300).as_slice(), 512), Err(Reason::ArchiveInvalid));
    }

    #[test]
    fn large_numbers_are_binary() {
        for size in [0, (1 << 33) - 1, 1 << 33, 1 << 60] {
            assert_eq!(number(&digits::<12>(size)), Ok(i64::try_from(size).unwrap()));
        }
        assert_eq!(number(&[0xff; 12]), Ok(-1));
        assert_eq!(number(b" 644 \0"), Ok(0o644));
        assert!(
            number(&[0x80 | 0x3f; 12]).is_err()
                && number(b"9\0").is_err()
                && number(b"-1\0").is_err()
        );
    }

    #[test]
    fn extended_headers_are_bounded_and_checked() {
        let records = |text: &str| {
            let mut extended = Extended::default();
            extended.add_records(text.as_bytes()).map(|()| extended).map_err(|error| error.reason)
        };
        let good = records("12 path=a/b\n20 mtime=1500000000\n").unwrap();
        assert_eq!((good.name.as_deref(), good.modified), (Some(&b"a/b"[..]), Some(1_500_000_000)));
        for bad in [
            "",
            "x",
            "5 a=b\n",
            "99 path=a\n",
            "3 \n",
            "0 a=b\n",
            "9 size=-1\n",
            "22 GNU.sparse.major=1\n",
        ] {
            assert_eq!(records(bad).is_err(), !bad.is_empty(), "{bad:?}");
        }
        let mut out = Vec::new();
        write_header(&mut out, b'x', b"p", b"", (0, MAX_EXTENSION + 1, 0));
        assert_eq!(read(&out, 512), Err(Reason::ArchiveTooLarge));
    }
}
