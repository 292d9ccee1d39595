//! Pagination: `page_size`, `page_token` and the token of the next page. A page ends at its number of
//! rows or at a number of bytes, whichever comes first.

use std::{fmt::Display, str::FromStr};

use prost::Message;

use crate::status::ApiError;

const DEFAULT_SIZE: i64 = 50;
const MAX_SIZE: i64 = 1000;
/// A page ends before the row that would exceed this many bytes. Clients accept 4 MiB by default.
const MAX_BYTES: usize = 1024 * 1024;
/// Rows to read at once, so that long rows need little memory. A default page needs one read.
const MAX_BATCH: usize = 100;

/// The page that a caller requests, and the messages on it so far.
///
/// ```text
/// while let Some(limit) = page.batch() {
///     page.add(read(&page.after, limit), convert);
/// }
/// page.finish()
/// ```
#[derive(Debug)]
pub(crate) struct Page<Id, M> {
    size: usize,
    /// The id of the last row so far; first, that of the previous page.
    pub(crate) after: Option<Id>,
    messages: Vec<M>,
    bytes: usize,
    end: Option<End>,
}

/// Why a page is complete.
#[derive(Debug, PartialEq, Eq)]
enum End {
    /// It is full, and other rows follow.
    Full,
    /// This is the last page.
    Last,
}

impl<Id: FromStr + Display, M: Message> Page<Id, M> {
    /// Parses `page_size` and `page_token`.
    pub(crate) fn parse(size: i32, token: &str) -> Result<Self, ApiError> {
        let size = match i64::from(size) {
            0 => DEFAULT_SIZE,
            size @ 1..=MAX_SIZE => size,
            _ => return Err(ApiError::invalid("page_size", format!("must be 0 to {MAX_SIZE}"))),
        };
        Ok(Self {
            size: usize::try_from(size).map_err(ApiError::internal)?,
            after: decode_token(token)?,
            messages: Vec::new(),
            bytes: 0,
            end: None,
        })
    }

    /// How many rows to read next; `None` if the page is complete.
    pub(crate) fn batch(&self) -> Option<i64> {
        self.end.is_none().then(|| i64::try_from(self.batch_size()).unwrap_or(1))
    }

    fn batch_size(&self) -> usize {
        // One row more than the page holds, to know whether another page follows.
        (self.size + 1).saturating_sub(self.messages.len()).min(MAX_BATCH)
    }

    /// Adds the rows that [`Page::batch`] asked for, as far as they fit.
    pub(crate) fn add<Row>(&mut self, rows: Vec<Row>, convert: impl Fn(Row) -> (Id, M)) {
        let is_last = rows.len() < self.batch_size();
        for (id, message) in rows.into_iter().map(convert) {
            self.bytes += message.encoded_len();
            let is_too_large = self.bytes > MAX_BYTES && !self.messages.is_empty();
            if is_too_large || self.messages.len() == self.size {
                self.end = Some(End::Full);
                return;
            }
            self.after = Some(id);
            self.messages.push(message);
        }
        if is_last {
            self.end = Some(End::Last);
        }
    }

    /// Returns the messages and the token of the next page; empty on the last page.
    pub(crate) fn finish(self) -> (Vec<M>, String) {
        let token = match (self.end, &self.after) {
            (Some(End::Full), Some(last)) => encode_token(last),
            _ => String::new(),
        };
        (self.messages, token)
    }
}

fn encode_token(id: &impl Display) -> String {
    id.to_string().bytes().map(|byte| format!("{byte:02x}")).collect()
}

fn decode_token<Id: FromStr>(token: &str) -> Result<Option<Id>, ApiError> {
    if token.is_empty() {
        return Ok(None);
    }
    let id = unhex(token).and_then(|text| text.parse().ok());
    id.map(Some).ok_or_else(|| {
        ApiError::invalid("page_token", "not a token of a previous response; omit it to start over")
    })
}

fn unhex(token: &str) -> Option<String> {
    if !token.is_ascii() || !token.len().is_multiple_of(2) {
        return None;
    }
    let bytes: Option<Vec<u8>> = (0..token.len())
        .step_by(2)
        .map(|at| token.get(at..at + 2).and_then(|pair| u8::from_str_radix(pair, 16).ok()))
        .collect();
    String::from_utf8(bytes?).ok()
}

#[cfg(test)]
mod tests {
    use codelia_types::TenantId;

    use super::*;

    type Row = (TenantId, String);

    fn rows(count: usize, bytes: usize) -> Vec<Row> {
        (0..count).map(|n| (format!("{n:05}").parse().unwrap(), "x".repeat(bytes))).collect()
    }

    /// The number of rows on a page, and the token of the next one.
    fn page(stored: &[Row], size: i32, token: &str) -> (usize, String) {
        let mut page = Page::<TenantId, String>::parse(size, token).unwrap();
        while let Some(limit) = page.batch() {
            let limit = usize::try_from(limit).unwrap();
            assert!((1..=MAX_BATCH).contains(&limit), "{limit}");
            let rest = stored.iter().filter(|(id, _)| page.after.as_ref().is_none_or(|after| id > after));
            page.add(rest.take(limit).cloned().collect(), |row: Row| row);
        }
        let (messages, token) = page.finish();
        (messages.len(), token)
    }

    #[test]
    fn page_size_defaults_to_50_and_ends_at_1000() {
        let stored = rows(1001, 1);
        assert_eq!(page(&stored, 0, "").0, 50);
        let (count, token) = page(&stored, 1000, "");
        assert_eq!(count, 1000);
        assert_eq!(page(&stored, 1000, &token), (1, String::new()));
        for bad in [-1, 1001, i32::MIN, i32::MAX] {
            let error = Page::<TenantId, String>::parse(bad, "").unwrap_err();
            assert!(matches!(error, ApiError::InvalidField { field, .. } if field == "page_size"));
        }
    }

    #[test]
    fn page_ends_before_too_many_bytes() {
        let stored = rows(250, MAX_BYTES / 100);
        let (mut token, mut counts) = (String::new(), Vec::new());
        loop {
            let (count, next) = page(&stored, 1000, &token);
            counts.push(count);
            token = next;
            if token.is_empty() {
                break;
            }
        }
        assert_eq!(counts, [99, 99, 52]);
        assert_eq!(page(&rows(2, MAX_BYTES * 2), 10, "").0, 1, "a page has at least one row");
    }

    #[test]
    fn last_page_has_no_token() {
        for count in [0, 2, 100] {
            assert_eq!(page(&rows(count, 1), 100, ""), (count, String::new()));
        }
    }

    #[test]
    fn malformed_token_is_rejected() {
        for bad in ["x", "zz", "6", "é", "+1", "00", "41"] {
            let error = Page::<TenantId, String>::parse(0, bad).unwrap_err();
            assert!(matches!(error, ApiError::InvalidField { field, .. } if field == "page_token"), "{bad}");
        }
    }
}
