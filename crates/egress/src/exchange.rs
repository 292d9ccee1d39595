//! Sends one HTTP request on and its response back. The connection ends then, so that it cannot
//! carry a request for another host. Only a WebSocket continues, after the destination has agreed.

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::{
    body::Body,
    head::{BodyLength, Forwarded, opens_websocket},
    read::drain,
    relay::{Ended, Traffic, copy_to_end, until_response},
    sandbox::Direction,
};

/// Copies one exchange: this request, of whose body `start` was read already; then the response
/// until its end.
pub(crate) async fn copy_exchange(
    traffic: &Traffic<'_>,
    program: &mut (impl AsyncRead + AsyncWrite + Unpin),
    destination: &mut (impl AsyncRead + AsyncWrite + Unpin),
    request: &Forwarded,
    start: &[u8],
) -> Result<(), Ended> {
    traffic.count(Direction::Sent, request.head.len())?;
    destination.write_all(&request.head).await?;
    if request.asks_for_websocket {
        destination.flush().await?;
        return copy_websocket(traffic, program, destination, start).await;
    }
    let (mut from_program, mut to_program) = tokio::io::split(program);
    let (mut from_destination, mut to_destination) = tokio::io::split(destination);
    let body = copy_body(traffic, &mut from_program, &mut to_destination, request.body, start);
    let response =
        copy_to_end(traffic, Direction::Received, &mut from_destination, &mut to_program);
    until_response(body, response).await?;
    drain(&mut from_program).await;
    Ok(())
}

/// Copies the answer to a request for a WebSocket. What the program sends after the request reaches
/// the destination only if that agreed: it would take it for a second request otherwise.
async fn copy_websocket(
    traffic: &Traffic<'_>,
    program: &mut (impl AsyncRead + AsyncWrite + Unpin),
    destination: &mut (impl AsyncRead + AsyncWrite + Unpin),
    start: &[u8],
) -> Result<(), Ended> {
    let mut answer = Vec::new();
    let opened = loop {
        match opens_websocket(&answer) {
            Some(opened) => break opened,
            None if destination.read_buf(&mut answer).await? == 0 => break false,
            None => {}
        }
    };
    traffic.count(Direction::Received, answer.len())?;
    program.write_all(&answer).await?;
    program.flush().await?;
    if opened {
        traffic.count(Direction::Sent, start.len())?;
        destination.write_all(start).await?;
        destination.flush().await?;
    } else {
        // The destination was not asked to close the connection after its answer.
        destination.shutdown().await?;
    }
    let (mut from_program, mut to_program) = tokio::io::split(program);
    let (mut from_destination, mut to_destination) = tokio::io::split(destination);
    let received =
        copy_to_end(traffic, Direction::Received, &mut from_destination, &mut to_program);
    if opened {
        let sent = copy_to_end(traffic, Direction::Sent, &mut from_program, &mut to_destination);
        return tokio::try_join!(sent, received).map(|_| ());
    }
    received.await?;
    drain(&mut from_program).await;
    Ok(())
}

/// Copies the body and then waits for the program to end the connection or to send more, which is
/// not read.
async fn copy_body(
    traffic: &Traffic<'_>,
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
    length: BodyLength,
    start: &[u8],
) -> Result<(), Ended> {
    let mut body = Body::new(length);
    let mut buffer = start.to_vec();
    loop {
        let count = body.read(&buffer)?;
        traffic.count(Direction::Sent, count)?;
        to.write_all(&buffer[..count]).await?;
        to.flush().await?;
        let more_follows = count < buffer.len();
        if body.is_complete() && more_follows {
            return Ok(());
        }
        buffer.clear();
        let ended = from.read_buf(&mut buffer).await? == 0;
        match (ended, body.is_complete()) {
            // A program may stop writing when its request is complete.
            (true, true) | (false, true) => return Ok(()),
            (true, false) => return Err(Ended::Broken),
            (false, false) => {}
        }
    }
}
