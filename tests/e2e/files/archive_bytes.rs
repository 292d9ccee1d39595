//! Tar archives with members that no packer makes.

use std::io::Write;

use anyhow::Result;

const BLOCK: usize = 512;

/// An archive that is being made.
#[derive(Debug, Clone, Default)]
pub(super) struct Archive(Vec<u8>);

impl Archive {
    /// Adds a member of any type.
    pub(super) fn member(mut self, kind: u8, name: &[u8], link: &[u8], content: &[u8]) -> Self {
        let mut header = [0_u8; BLOCK];
        let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &name[..name.len().min(100)]);
        put(100, b"0006755\0");
        put(108, b"0000000\0");
        put(116, b"0000000\0");
        put(124, format!("{:011o}\0", content.len()).as_bytes());
        put(136, b"14524730400\0");
        put(148, b"        ");
        put(156, &[kind]);
        put(157, link);
        put(257, b"ustar\x0000");
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        self.0.extend_from_slice(&header);
        self.0.extend_from_slice(content);
        self.0.resize(self.0.len().next_multiple_of(BLOCK), 0);
        self
    }

    pub(super) fn file(self, name: &str, content: &str) -> Self {
        self.member(b'0', name.as_bytes(), b"", content.as_bytes())
    }

    /// Adds a file with a name of any length.
    pub(super) fn long_name(self, name: &[u8]) -> Self {
        self.member(b'L', b"././@LongLink", b"", &[name, b"\0"].concat())
            .member(b'0', b"cut", b"", b"x")
    }

    pub(super) fn symlink(self, name: &str, to: &str) -> Self {
        self.member(b'2', name.as_bytes(), to.as_bytes(), b"")
    }

    pub(super) fn hard_link(self, name: &str, to: &str) -> Self {
        self.member(b'1', name.as_bytes(), to.as_bytes(), b"")
    }

    /// The archive without its end.
    pub(super) fn unfinished(self) -> Vec<u8> {
        self.0
    }

    pub(super) fn finish(mut self) -> Vec<u8> {
        self.0.resize(self.0.len() + 2 * BLOCK, 0);
        self.0
    }
}

/// Compresses with zstd, with a window of 2 to the power of `window_log` bytes.
pub(super) fn zstd(archive: &[u8], window_log: u32) -> Result<Vec<u8>> {
    let mut encoder = zstd::stream::write::Encoder::new(Vec::new(), 1)?;
    encoder.window_log(window_log)?;
    encoder.write_all(archive)?;
    Ok(encoder.finish()?)
}
