//! Pagination: `page_size`, `page_token` and the token of the next page. Pure.

use std::{fmt::Display, str::FromStr};

use crate::status::ApiError;

const DEFAULT_SIZE: i64 = 50;
const MAX_SIZE: i64 = 1000;

/// The page that a caller requests.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Page<Id> {
    size: usize,
    /// The last id of the previous page.
    pub(crate) after: Option<Id>,
    /// Rows to read: one more than the page holds, to know whether another page follows.
    pub(crate) limit: i64,
}

impl<Id: FromStr + Display> Page<Id> {
    /// Parses `page_size` and `page_token`.
    pub(crate) fn parse(size: i32, token: &str) -> Result<Self, ApiError> {
        let size = match i64::from(size) {
            0 => DEFAULT_SIZE,
            size @ 1..=MAX_SIZE => size,
            _ => return Err(ApiError::invalid("page_size", format!("must be 0 to {MAX_SIZE}"))),
        };
        let limit = size + 1;
        Ok(Self {
            size: usize::try_from(size).map_err(ApiError::internal)?,
            after: decode_token(token)?,
            limit,
        })
    }

    /// Removes the extra row and returns the token of the next page; empty on the last page.
    pub(crate) fn truncate<T>(&self, rows: &mut Vec<T>, id: impl Fn(&T) -> Id) -> String {
        if rows.len() <= self.size {
            return String::new();
        }
        rows.truncate(self.size);
        rows.last().map(|last| encode_token(&id(last))).unwrap_or_default()
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
    use codelia_types::{RunId, TenantId};

    use super::*;

    #[test]
    fn page_size_defaults_to_50_and_ends_at_1000() {
        assert_eq!(Page::<RunId>::parse(0, "").unwrap().limit, 51);
        assert_eq!(Page::<RunId>::parse(1000, "").unwrap().limit, 1001);
        for bad in [-1, 1001, i32::MIN, i32::MAX] {
            let error = Page::<RunId>::parse(bad, "").unwrap_err();
            assert!(matches!(error, ApiError::InvalidField { field, .. } if field == "page_size"));
        }
    }

    #[test]
    fn token_continues_after_its_id() {
        let page = Page::<TenantId>::parse(2, "").unwrap();
        let mut rows: Vec<TenantId> = ["a", "b", "c"].iter().map(|id| id.parse().unwrap()).collect();
        let token = page.truncate(&mut rows, Clone::clone);
        assert_eq!(rows.len(), 2);
        assert_eq!(Page::<TenantId>::parse(2, &token).unwrap().after, Some("b".parse().unwrap()));
    }

    #[test]
    fn last_page_has_no_token() {
        let page = Page::<TenantId>::parse(2, "").unwrap();
        let mut rows: Vec<TenantId> = vec!["a".parse().unwrap(), "b".parse().unwrap()];
        assert_eq!(page.truncate(&mut rows, Clone::clone), "");
        assert_eq!(rows.len(), 2);
    }

    #[test]
    fn malformed_token_is_rejected() {
        for bad in ["x", "zz", "6", "é", "+1", "00", "41"] {
            let error = Page::<TenantId>::parse(0, bad).unwrap_err();
            assert!(matches!(error, ApiError::InvalidField { field, .. } if field == "page_token"), "{bad}");
        }
    }
}
