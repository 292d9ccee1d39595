//! Pagination: `page_size`, `page_token` and the token of the next page. A page ends at its number
//! of rows or at a number of bytes, whichever comes first. A token is valid only for the list that
//! it was made for: the same method, tenant, parent and filters.

use std::{collections::BTreeMap, fmt::Display, iter, mem::take, str::FromStr};

use codelia_proto::v1;
use codelia_types::TenantId;
use prost::Message;
use sha2::{Digest, Sha256};

use crate::error::ApiError;

const DEFAULT_SIZE: usize = 50;
const MAX_SIZE: usize = 1000;
/// A page ends before the row that would exceed this many bytes. Clients accept 4 MiB by default.
const MAX_BYTES: usize = 1024 * 1024;
/// Rows to read at once, so that long rows need little memory. A default page needs one read.
const MAX_BATCH: usize = 100;
/// Bytes that identify a list in its tokens. They prevent mistakes, not attacks: every row is
/// checked against the caller's tenant anyway.
const LIST_ID_BYTES: usize = 8;

/// A request for one page of a list.
pub(crate) trait ListRequest: Message + Clone {
    /// The name of the message.
    const NAME: &str;

    /// Takes `page_size` and `page_token`. The other fields select the list.
    fn take_page(&mut self) -> (i32, String);

    /// Takes the labels that select the list, sorted: a message has them in any order.
    fn take_labels(&mut self) -> BTreeMap<String, String>;
}

macro_rules! list_requests {
    ($($request:ident($($labels:ident)?)),+ $(,)?) => {$(
        impl ListRequest for v1::$request {
            const NAME: &str = stringify!($request);

            fn take_page(&mut self) -> (i32, String) {
                (take(&mut self.page_size), take(&mut self.page_token))
            }

            fn take_labels(&mut self) -> BTreeMap<String, String> {
                iter::empty()$(.chain(take(&mut self.$labels)))?.collect()
            }
        }
    )+};
}

list_requests!(
    DryRunScopePolicyRequest(),
    ListApprovalsRequest(),
    ListEventsRequest(),
    ListFilesRequest(),
    ListFlagHistoryRequest(),
    ListFlagsRequest(),
    ListKeysRequest(),
    ListProjectsRequest(),
    ListRunsRequest(labels),
    ListScopePolicyVersionsRequest(),
    ListSessionsRequest(labels),
    ListTenantRunsRequest(),
    ListTenantsRequest(),
    ListToolsRequest(),
    ListVolumesRequest(),
    ListWorkersRequest(),
);

/// Identifies a list in its tokens, as hexadecimal digits.
fn list_id<R: ListRequest>(tenant: &TenantId, mut list: R) -> String {
    let labels = list.take_labels();
    let fields = list.encode_to_vec();
    let parts = [R::NAME.as_bytes(), tenant.as_str().as_bytes(), &fields];
    let labels = labels.iter().flat_map(|(name, value)| [name.as_bytes(), value.as_bytes()]);
    let mut hash = Sha256::new();
    for part in parts.into_iter().chain(labels) {
        hash.update(part.len().to_be_bytes());
        hash.update(part);
    }
    hex::encode(&hash.finalize()[..LIST_ID_BYTES])
}

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
    list: String,
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
    /// Parses `page_size` and `page_token` of a request.
    pub(crate) fn parse<R: ListRequest>(tenant: &TenantId, request: &R) -> Result<Self, ApiError> {
        let mut list = request.clone();
        let (size, token) = list.take_page();
        let size = match usize::try_from(size) {
            Ok(0) => DEFAULT_SIZE,
            Ok(size) => size.min(MAX_SIZE),
            Err(_) => return Err(ApiError::invalid("page_size", "must not be negative")),
        };
        let list = list_id(tenant, list);
        Ok(Self {
            size,
            after: decode_token(&list, &token)?,
            list,
            messages: Vec::new(),
            bytes: 0,
            end: None,
        })
    }

    /// How many rows the page has at most, for a worker that makes it.
    pub(crate) fn size(&self) -> i32 {
        i32::try_from(self.size).unwrap_or(i32::MAX)
    }

    /// The token of the page after a row.
    pub(crate) fn token_after(&self, last: &impl Display) -> String {
        format!("{}{}", self.list, hex::encode(last.to_string()))
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
        let token = match (&self.end, &self.after) {
            (Some(End::Full), Some(last)) => self.token_after(last),
            _ => String::new(),
        };
        (self.messages, token)
    }
}

/// The id in a token, which must be of this list.
fn decode_token<Id: FromStr>(list: &str, token: &str) -> Result<Option<Id>, ApiError> {
    const FIELD: &str = "page_token";
    if token.is_empty() {
        return Ok(None);
    }
    let malformed =
        || ApiError::invalid(FIELD, "not a token of a previous response; omit it to start over");
    let (made_for, id) = token.split_at_checked(list.len()).ok_or_else(malformed)?;
    let id = unhex(id).and_then(|text| text.parse().ok()).ok_or_else(malformed)?;
    if made_for != list {
        let message =
            "belongs to another list; repeat the other fields of that request, or omit the token";
        return Err(ApiError::invalid(FIELD, message));
    }
    Ok(Some(id))
}

fn unhex(token: &str) -> Option<String> {
    String::from_utf8(hex::decode(token).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use codelia_types::TenantId;

    use super::*;

    type Row = (TenantId, String);

    fn rows(count: usize, bytes: usize) -> Vec<Row> {
        (0..count).map(|n| (format!("{n:05}").parse().unwrap(), "x".repeat(bytes))).collect()
    }

    fn parse(page_size: i32, page_token: &str) -> Result<Page<TenantId, String>, ApiError> {
        let request = v1::ListTenantsRequest { page_size, page_token: page_token.to_owned() };
        Page::parse(&"a".parse().unwrap(), &request)
    }

    /// The number of rows on a page, and the token of the next one.
    fn page(stored: &[Row], size: i32, token: &str) -> (usize, String) {
        let mut page = parse(size, token).unwrap();
        while let Some(limit) = page.batch() {
            let limit = usize::try_from(limit).unwrap();
            assert!((1..=MAX_BATCH).contains(&limit), "{limit}");
            let rest =
                stored.iter().filter(|(id, _)| page.after.as_ref().is_none_or(|after| id > after));
            page.add(rest.take(limit).cloned().collect(), |row: Row| row);
        }
        let (messages, token) = page.finish();
        (messages.len(), token)
    }

    #[test]
    fn page_size_defaults_to_50_and_is_at_most_1000() {
        let stored = rows(1001, 1);
        assert_eq!(page(&stored, 0, "").0, 50);
        let (count, token) = page(&stored, 1000, "");
        assert_eq!(count, 1000);
        assert_eq!(page(&stored, 1000, &token), (1, String::new()));
        for above in [1001, i32::MAX] {
            assert_eq!(page(&stored, above, "").0, 1000);
        }
        for bad in [-1, i32::MIN] {
            let error = parse(bad, "").unwrap_err();
            assert!(error.invalid_field() == Some("page_size"));
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
        let list = parse(0, "").unwrap().list;
        let cut = format!("{list}6");
        for bad in ["x", "zz", "6", "é", "+1", "00", "41", &"é".repeat(20), &list, &cut] {
            let error = parse(0, bad).unwrap_err();
            assert!(error.invalid_field() == Some("page_token"), "{bad}");
        }
    }

    #[test]
    fn token_of_another_list_is_rejected() {
        let runs = |parent: &str, state, page_token: &str| v1::ListRunsRequest {
            parent: parent.into(),
            state,
            page_token: page_token.into(),
            ..Default::default()
        };
        let (one, other): (TenantId, TenantId) = ("a".parse().unwrap(), "b".parse().unwrap());
        let parse = |tenant: &TenantId, request: &v1::ListRunsRequest| {
            Page::<TenantId, String>::parse(tenant, request)
        };
        let list = parse(&one, &runs("sessions/x", 1, "")).unwrap().list;
        let token = format!("{list}{}", hex::encode(b"z"));
        assert!(parse(&one, &runs("sessions/x", 1, &token)).unwrap().after.is_some());
        for (tenant, request) in [
            (&one, runs("sessions/y", 1, &token)),
            (&one, runs("sessions/x", 2, &token)),
            (&other, runs("sessions/x", 1, &token)),
        ] {
            let error = parse(tenant, &request).unwrap_err();
            assert!(error.text().starts_with("page_token: belongs to another list"), "{error:?}");
        }
        let labels =
            [("a", "1"), ("b", "2"), ("c", "3")].map(|(name, value)| (name.into(), value.into()));
        let of = |labels: &[(String, String)]| {
            let labels = labels.iter().cloned().collect();
            parse(&one, &v1::ListRunsRequest { labels, ..runs("sessions/x", 1, "") }).unwrap().list
        };
        assert_eq!(of(&labels), of(&[labels[2].clone(), labels[1].clone(), labels[0].clone()]));
        assert_ne!(of(&labels), of(&labels[1..]));
        let keys = v1::ListKeysRequest {
            parent: "sessions/x".into(),
            page_token: token,
            ..Default::default()
        };
        assert!(Page::<TenantId, String>::parse(&one, &keys).is_err());
    }
}
