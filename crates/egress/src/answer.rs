//! The proxy's own answers to HTTP requests.

use crate::{
    refusal::{Class, Reason},
    target::Target,
};

/// A response that says why a request was refused or failed.
pub(crate) fn answer(reason: Reason, target: Option<&Target>) -> Vec<u8> {
    let status = match reason.class() {
        Class::Refused => "403 Forbidden",
        Class::Invalid => "400 Bad Request",
        Class::Failed => "502 Bad Gateway",
        Class::TimedOut => "504 Gateway Timeout",
    };
    let code = reason.code();
    let remedy = reason.remedy();
    let target = target.map(|target| format!("host: {}\nport: {}\n", target.host, target.port));
    let body = format!("codelia: {code}\n{}{remedy}\n", target.unwrap_or_default());
    let length = body.len();
    format!(
        "HTTP/1.1 {status}\r\nx-codelia-reason: {code}\r\ncontent-type: text/plain; charset=utf-8\r\n\
         content-length: {length}\r\nconnection: close\r\n\r\n{body}"
    )
    .into_bytes()
}
