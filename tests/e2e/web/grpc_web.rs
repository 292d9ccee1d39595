//! gRPC-Web in both of its encodings.

use anyhow::{Context, Result};
use base64::{Engine, engine::general_purpose::STANDARD};
use codelia_proto::v1::{GetSessionRequest, WatchRunRequest, WatchRunResponse, run_event::Kind};
use codelia_tests::Cluster;
use prost::Message;

use super::{WebCaller, prefixed, split};

const TRAILERS: u8 = 0x80;

/// Decodes pieces of base64, each with its own padding.
fn decode_pieces(text: &[u8]) -> Result<Vec<u8>> {
    let decoded =
        text.chunks(4).map(|quantum| STANDARD.decode(quantum)).collect::<Result<Vec<_>, _>>()?;
    Ok(decoded.concat())
}

#[tokio::test]
async fn grpc_web_streams_in_both_encodings() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let caller = WebCaller::new(&cluster, &client);
    let run = caller.start(&client.session().await?.name, "echo to the browser").await?;
    let request = prefixed(&WatchRunRequest { name: run, ..Default::default() }.encode_to_vec());
    for is_text in [false, true] {
        let (content_type, body) = if is_text {
            ("application/grpc-web-text", STANDARD.encode(&request).into_bytes())
        } else {
            ("application/grpc-web+proto", request.clone())
        };
        let response = caller.call("RunService/WatchRun", content_type, body).await?;
        assert_eq!(response.status, 200);
        assert!(
            response.header("content-type").starts_with(content_type),
            "{:?}",
            response.headers
        );
        let body = response.bytes().await?;
        let mut messages = split(&if is_text { decode_pieces(&body)? } else { body.to_vec() });
        let (flags, trailers) = messages.pop().context("the trailers")?;
        assert_eq!(flags, TRAILERS);
        assert!(String::from_utf8(trailers)?.contains("grpc-status:0\r\n"));
        let mut output = Vec::new();
        for (_, message) in messages {
            let event =
                WatchRunResponse::decode(message.as_slice())?.event.and_then(|event| event.kind);
            if let Some(Kind::Output(event)) = event {
                output.extend_from_slice(&event.data);
            }
        }
        assert_eq!(String::from_utf8(output)?, "to the browser\n");
    }
    cluster.end().await
}

#[tokio::test]
async fn grpc_web_error_has_a_readable_status() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let caller = WebCaller::new(&cluster, &cluster.tenant("a").await?);
    let request = prefixed(&GetSessionRequest { name: "sessions/nosuch".into() }.encode_to_vec());
    let refused = caller.call("SessionService/GetSession", "application/grpc-web", request).await?;
    assert_eq!((refused.status, refused.header("grpc-status")), (200, "5"));
    assert!(refused.header("grpc-message").contains("nosuch"), "{:?}", refused.headers);
    let refused =
        caller.call("SessionService/GetSession", "application/grpc-web-text", "????").await?;
    assert_ne!(refused.header("grpc-status"), "0", "{:?}", refused.headers);
    cluster.end().await
}
