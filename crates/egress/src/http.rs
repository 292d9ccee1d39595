//! HTTP on the proxy's listener: `CONNECT`, and requests in absolute form, one for each connection.

use std::sync::Arc;

use tokio::{io::AsyncWriteExt, net::TcpStream};

use crate::{
    answer::answer,
    control::Via,
    head::{BodyLength, Head},
    read::{Program, drain},
    record::Record,
    refusal::{Reason, Refusal},
    sandbox::Sandbox,
    target::{Target, parse_absolute_uri},
    tunnel::Tunnel,
};

/// Serves one connection.
pub(crate) async fn serve(
    sandbox: &Arc<Sandbox>,
    mut program: Program,
    record: &mut Record,
) -> Result<(), Refusal> {
    record.via = Via::Http;
    let head = program.read(Head::parse).await;
    let Program { stream, start, .. } = program;
    match head {
        Ok(head) if head.method == "CONNECT" => {
            record.via = Via::Connect;
            connect(sandbox, stream, &head, start, record).await
        }
        Ok(head) => request(sandbox, stream, &head, &start, record).await,
        Err(refusal) => refuse(stream, refusal, None).await,
    }
}

async fn connect(
    sandbox: &Arc<Sandbox>,
    mut stream: TcpStream,
    head: &Head,
    rest: Vec<u8>,
    record: &mut Record,
) -> Result<(), Refusal> {
    record.set_raw_host(&head.uri);
    let target = match Target::from_authority(&head.uri, None)
        .and_then(|target| check_connect(head, target))
    {
        Ok(target) => target,
        Err(reason) => return refuse(stream, reason.into(), None).await,
    };
    let tunnel = match Tunnel::open(sandbox, target.clone(), record).await {
        Ok(tunnel) => tunnel,
        Err(refusal) => return refuse(stream, refusal, Some(&target)).await,
    };
    if stream.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n").await.is_err() {
        return Ok(());
    }
    tunnel.run(sandbox, stream, rest, record).await
}

/// A `CONNECT` has no body, and its `Host` header, which is optional, names the target.
fn check_connect(head: &Head, target: Target) -> Result<Target, Reason> {
    if head.body != BodyLength::Bytes(0) {
        return Err(Reason::InvalidRequest);
    }
    if head.has_host() {
        head.check_host(&target)?;
    }
    Ok(target)
}

async fn request(
    sandbox: &Arc<Sandbox>,
    mut stream: TcpStream,
    head: &Head,
    rest: &[u8],
    record: &mut Record,
) -> Result<(), Refusal> {
    record.set_raw_host(&head.uri);
    let parsed = parse_absolute_uri(&head.uri)
        .and_then(|parsed| head.check_host(&parsed.0).map(|()| parsed));
    let (target, path) = match parsed {
        Ok(parsed) => parsed,
        Err(reason) => return refuse(stream, reason.into(), None).await,
    };
    let tunnel = match Tunnel::open(sandbox, target.clone(), record).await {
        Ok(tunnel) => tunnel,
        Err(refusal) => return refuse(stream, refusal, Some(&target)).await,
    };
    let forwarded = head.forwarded(&target, path, None);
    tunnel.exchange(sandbox, &mut stream, &forwarded, rest, record).await
}

/// Answers with the reason and ends the connection.
async fn refuse(
    mut stream: TcpStream,
    refusal: Refusal,
    target: Option<&Target>,
) -> Result<(), Refusal> {
    let answer = answer(refusal.reason, target);
    if stream.write_all(&answer).await.is_ok() && stream.shutdown().await.is_ok() {
        drain(&mut stream).await;
    }
    Err(refusal)
}
