//! Pages: how many, from where, and whether there are more. Pure.

use std::{fmt::Display, str::FromStr};

use crate::status::ApiError;

const DEFAULT_SIZE: i64 = 50;
const MAX_SIZE: i64 = 1000;

/// A page as a caller asked for it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Page<Id> {
    size: usize,
    /// The last id of the page before.
    pub(crate) after: Option<Id>,
    /// How many rows to read: one more than are shown, to know whether there are more.
    pub(crate) limit: i64,
}

impl<Id: FromStr + Display> Page<Id> {
    /// Reads `page_size` and `page_token`.
    pub(crate) fn read(size: i32, token: &str) -> Result<Self, ApiError> {
        let size = match i64::from(size) {
            0 => DEFAULT_SIZE,
            size @ 1..=MAX_SIZE => size,
            _ => return Err(ApiError::invalid("page_size", format!("must be 0 to {MAX_SIZE}"))),
        };
        let size_here = usize::try_from(size).map_err(ApiError::internal)?;
        Ok(Self { size: size_here, after: read_token(token)?, limit: size + 1 })
    }

    /// Cuts the surplus row and returns the token of the next page; empty on the last.
    pub(crate) fn cut<T>(&self, rows: &mut Vec<T>, id: impl Fn(&T) -> Id) -> String {
        if rows.len() <= self.size {
            return String::new();
        }
        rows.truncate(self.size);
        rows.last().map(|last| write_token(&id(last))).unwrap_or_default()
    }
}

fn write_token(id: &impl Display) -> String {
    id.to_string().bytes().map(|byte| format!("{byte:02x}")).collect()
}

fn read_token<Id: FromStr>(token: &str) -> Result<Option<Id>, ApiError> {
    if token.is_empty() {
        return Ok(None);
    }
    let id = unhex(token).and_then(|text| text.parse().ok());
    id.map(Some).ok_or_else(|| ApiError::invalid("page_token", "is not one of a previous response"))
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
    fn zero_means_fifty_and_more_than_a_thousand_is_refused() {
        assert_eq!(Page::<RunId>::read(0, "").unwrap().limit, 51);
        assert_eq!(Page::<RunId>::read(1000, "").unwrap().limit, 1001);
        for bad in [-1, 1001, i32::MIN, i32::MAX] {
            let error = Page::<RunId>::read(bad, "").unwrap_err();
            assert!(matches!(error, ApiError::Invalid { field, .. } if field == "page_size"));
        }
    }

    #[test]
    fn a_token_leads_to_the_page_after_its_id() {
        let page = Page::<TenantId>::read(2, "").unwrap();
        let mut rows: Vec<TenantId> = ["a", "b", "c"].iter().map(|id| id.parse().unwrap()).collect();
        let token = page.cut(&mut rows, Clone::clone);
        assert_eq!(rows.len(), 2);
        assert_eq!(Page::<TenantId>::read(2, &token).unwrap().after, Some("b".parse().unwrap()));
    }

    #[test]
    fn the_last_page_has_no_token() {
        let page = Page::<TenantId>::read(2, "").unwrap();
        let mut rows: Vec<TenantId> = vec!["a".parse().unwrap(), "b".parse().unwrap()];
        assert_eq!(page.cut(&mut rows, Clone::clone), "");
        assert_eq!(rows.len(), 2);
    }

    #[test]
    fn a_malformed_token_is_refused() {
        for bad in ["x", "zz", "6", "é", "+1", "00", "41"] {
            let error = Page::<TenantId>::read(0, bad).unwrap_err();
            assert!(matches!(error, ApiError::Invalid { field, .. } if field == "page_token"), "{bad}");
        }
    }
}
