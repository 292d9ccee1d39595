//! gRPC-Web: gRPC whose trailers are the last message of the body, as base64 if the caller wants.

use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::{Bytes, BytesMut};
use futures::stream;
use http::{HeaderMap, HeaderValue, Request, Response, header};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use tonic::{Status, body::Body};

use super::{grpc_headers::set_grpc_headers, message_reader::prefixed};

/// The flag of the message that holds the trailers.
const TRAILERS: u8 = 0x80;
/// Characters of base64 that are decoded together.
const QUANTUM: usize = 4;

/// The request as gRPC.
pub(crate) fn request(mut request: Request<Body>, is_text: bool) -> Request<Body> {
    set_grpc_headers(request.headers_mut());
    if !is_text {
        return request;
    }
    request.map(|body| {
        let decoded = stream::try_unfold((body, BytesMut::new()), async |(mut body, mut text)| {
            loop {
                let Some(frame) = body.frame().await.transpose()? else {
                    return if text.is_empty() { Ok(None) } else { Err(not_base64()) };
                };
                let Ok(data) = frame.into_data() else { continue };
                text.extend_from_slice(&data);
                let complete = text.len() - text.len() % QUANTUM;
                let bytes = decode(&text.split_to(complete)).ok_or_else(not_base64)?;
                return Ok::<_, Status>(Some((Frame::data(bytes), (body, text))));
            }
        });
        Body::new(StreamBody::new(decoded))
    })
}

fn not_base64() -> Status {
    Status::invalid_argument("the body is not base64, as application/grpc-web-text requires")
}

/// Decodes base64. A caller may write several encoded pieces one after the other.
fn decode(text: &[u8]) -> Option<Bytes> {
    let mut bytes = Vec::with_capacity(text.len() / QUANTUM * 3);
    let mut rest = text;
    while !rest.is_empty() {
        let end = memchr::memchr(b'=', rest).map_or(rest.len(), |at| at - at % QUANTUM + QUANTUM);
        let (piece, after) = rest.split_at_checked(end)?;
        STANDARD.decode_vec(piece, &mut bytes).ok()?;
        rest = after;
    }
    Some(bytes.into())
}

/// The response of gRPC as gRPC-Web. A status in the headers stays there.
pub(crate) fn response(response: Response<Body>, is_text: bool) -> Response<Body> {
    let (mut head, body) = response.into_parts();
    let content_type =
        if is_text { "application/grpc-web-text+proto" } else { "application/grpc-web+proto" };
    head.headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    head.headers.remove(header::CONTENT_LENGTH);
    let frames = stream::try_unfold(body, move |mut body: Body| async move {
        let Some(frame) = body.frame().await.transpose()? else { return Ok::<_, Status>(None) };
        let bytes = match frame.into_data() {
            Ok(data) => data,
            Err(other) => trailers(&other.into_trailers().unwrap_or_default())?,
        };
        let bytes = if is_text { STANDARD.encode(&bytes).into() } else { bytes };
        Ok(Some((Frame::data(bytes), body)))
    });
    Response::from_parts(head, Body::new(StreamBody::new(frames)))
}

/// The trailers as a message.
fn trailers(trailers: &HeaderMap) -> Result<Bytes, Status> {
    let mut lines = Vec::new();
    for (name, value) in trailers {
        lines.extend_from_slice(
            &[name.as_str().as_bytes(), b":", value.as_bytes(), b"\r\n"].concat(),
        );
    }
    prefixed(TRAILERS, &lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_padded_pieces_are_decoded() {
        assert_eq!(decode(b"YQ==YmM=ZGVm").unwrap(), "abcdef");
        assert_eq!(decode(b"").unwrap(), "");
        for bad in [b"Y===".as_slice(), b"????", b"YQ=a"] {
            assert_eq!(decode(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn trailers_are_a_flagged_message() {
        let headers =
            HeaderMap::from_iter([(header::HeaderName::from_static("grpc-status"), 0.into())]);
        assert_eq!(
            trailers(&headers).unwrap(),
            [&[0x80, 0, 0, 0, 15], b"grpc-status:0\r\n".as_slice()].concat()
        );
    }
}
