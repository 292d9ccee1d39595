//! Sends one HTTP request on and its response back. The connection ends then, so that it cannot
//! carry a request for another host.

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::{
    body::Body,
    head::BodyLength,
    read::drain,
    relay::{Ended, Traffic, copy, until_response},
    sandbox::Direction,
};

/// Copies one exchange: this head and the body that follows it, of which `body_start` was read
/// already; then the response until its end.
pub(crate) async fn copy_exchange(
    traffic: &Traffic<'_>,
    program: &mut (impl AsyncRead + AsyncWrite + Unpin),
    destination: &mut (impl AsyncRead + AsyncWrite + Unpin),
    head: &[u8],
    length: BodyLength,
    body_start: &[u8],
) -> Result<(), Ended> {
    traffic.count(Direction::Sent, head.len())?;
    destination.write_all(head).await?;
    let (mut from_program, mut to_program) = tokio::io::split(program);
    let (mut from_destination, mut to_destination) = tokio::io::split(destination);
    let request = copy_body(traffic, &mut from_program, &mut to_destination, length, body_start);
    let response = async {
        copy(traffic, Direction::Received, &mut from_destination, &mut to_program).await?;
        Ok(to_program.shutdown().await?)
    };
    until_response(request, response).await?;
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
