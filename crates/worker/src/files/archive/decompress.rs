//! The bytes of an archive as they arrive: plain, or compressed with zstd, which its first bytes
//! say.
//!
//! The compressed form is bounded by its window, which is memory, and by how much it grows.

use codelia_types::Reason;
use zstd::stream::raw::{DParameter, Decoder, InBuffer, Operation, OutBuffer};

use super::super::error::FileError;

/// The first bytes of a frame.
const MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// Windows of up to 8 MiB, which is what decoders must support.
const MAX_WINDOW_LOG: u32 = 23;
/// An archive of less than this may be compressed by any factor.
const SMALL: u64 = 64 << 20;
/// Text is seldom compressed by more than 20.
const MAX_RATIO: u64 = 1000;
/// Decompressed bytes that are handled at once.
const PIECE: usize = 128 * 1024;

/// Decompresses an archive, if it is compressed.
pub(super) struct Input {
    form: Form,
    received: u64,
    decompressed: u64,
}

enum Form {
    /// The first bytes, which do not tell yet.
    Unknown(Vec<u8>),
    Plain,
    Zstd {
        decoder: Box<Decoder<'static>>,
        is_frame_complete: bool,
    },
}

impl Default for Input {
    fn default() -> Self {
        Self { form: Form::Unknown(Vec::new()), received: 0, decompressed: 0 }
    }
}

impl Input {
    /// Passes the next piece on, decompressed.
    pub(super) fn read(
        &mut self,
        data: &[u8],
        pass_on: &mut impl FnMut(&[u8]) -> Result<(), FileError>,
    ) -> Result<(), FileError> {
        self.received += data.len() as u64;
        let mut first = Vec::new();
        if let Form::Unknown(start) = &mut self.form {
            start.extend_from_slice(data);
            if start.len() < MAGIC.len() {
                return Ok(());
            }
            first = std::mem::take(start);
            self.form = if first.starts_with(&MAGIC) { zstd_form()? } else { Form::Plain };
        }
        let data = if first.is_empty() { data } else { &first };
        match self.form {
            Form::Zstd { .. } => self.decompress(data, pass_on),
            _ => pass_on(data),
        }
    }

    /// Fails unless the compressed form is complete.
    pub(super) fn finish(&self) -> Result<(), FileError> {
        match self.form {
            Form::Plain | Form::Zstd { is_frame_complete: true, .. } => Ok(()),
            _ => Err(Reason::ArchiveInvalid.into()),
        }
    }

    fn decompress(
        &mut self,
        data: &[u8],
        pass_on: &mut impl FnMut(&[u8]) -> Result<(), FileError>,
    ) -> Result<(), FileError> {
        let Form::Zstd { decoder, is_frame_complete } = &mut self.form else { return Ok(()) };
        let mut input = InBuffer::around(data);
        let mut piece = vec![0; PIECE];
        loop {
            let mut output = OutBuffer::around(&mut piece[..]);
            let left = decoder.run(&mut input, &mut output).map_err(|error| reason(&error))?;
            *is_frame_complete = left == 0;
            let count = output.pos();
            self.decompressed += count as u64;
            if self.decompressed > SMALL && self.decompressed / MAX_RATIO > self.received {
                return Err(Reason::ArchiveTooLarge.into());
            }
            pass_on(&piece[..count])?;
            if count < PIECE && input.pos() == data.len() {
                return Ok(());
            }
        }
    }
}

fn zstd_form() -> Result<Form, FileError> {
    let mut decoder = Decoder::new()?;
    decoder.set_parameter(DParameter::WindowLogMax(MAX_WINDOW_LOG))?;
    Ok(Form::Zstd { decoder: Box::new(decoder), is_frame_complete: false })
}

fn reason(error: &std::io::Error) -> Reason {
    // The library has no other sign of a window that is too large.
    if error.to_string().contains("too much memory") {
        Reason::ArchiveTooLarge
    } else {
        Reason::ArchiveInvalid
    }
}

#[cfg(test)]
mod tests {
    use super::{super::fuzz::decompress, *};

    fn decompressed(data: &[u8], piece: usize) -> Result<Vec<u8>, Reason> {
        decompress(data, piece, usize::MAX)
    }

    fn compressed(data: &[u8], window_log: u32) -> Vec<u8> {
        let mut encoder = zstd::stream::write::Encoder::new(Vec::new(), 1).unwrap();
        encoder.window_log(window_log).unwrap();
        std::io::Write::write_all(&mut encoder, data).unwrap();
        encoder.finish().unwrap()
    }

    #[test]
    fn plain_and_compressed_input_is_recognized() {
        let text: Vec<u8> = (0..300_000_u32).flat_map(u32::to_le_bytes).collect();
        let frame = compressed(&text, 20);
        for piece in [1, 3, 4, 1000, frame.len()] {
            assert!(decompressed(&frame, piece) == Ok(text.clone()), "pieces of {piece}");
        }
        assert!(decompressed(&text, 3) == Ok(text.clone()));
        let twice = [frame.clone(), frame.clone()].concat();
        assert_eq!(
            decompressed(&twice, 1000).unwrap().len(),
            2 * text.len(),
            "frames may follow each other"
        );
        assert_eq!(decompressed(&frame[..frame.len() - 1], 1000), Err(Reason::ArchiveInvalid));
        assert_eq!(decompressed(b"abc", 1), Err(Reason::ArchiveInvalid));
        let mut corrupt = frame;
        corrupt[100] ^= 0xff;
        assert!(decompressed(&corrupt, 1000) != Ok(text));
    }

    #[test]
    fn large_window_and_ratio_are_refused() {
        let zeros = vec![0; usize::try_from(SMALL).unwrap() + 2 * PIECE];
        assert_eq!(
            decompressed(&compressed(&zeros, 23), 1 << 20),
            Err(Reason::ArchiveTooLarge),
            "ratio"
        );
        let small = &zeros[..zeros.len() / 4];
        assert_eq!(
            decompressed(&compressed(small, 23), 1 << 20).map(|whole| whole.len()),
            Ok(small.len())
        );
        assert_eq!(
            decompressed(&compressed(small, 24), 1 << 20),
            Err(Reason::ArchiveTooLarge),
            "window"
        );
    }
}
