//! Accepts the connections of a sandbox: on the proxy's listener, and on the sockets that stand for
//! names.

use std::{sync::Arc, time::Duration};

use codelia_telemetry::task;
use tokio::{
    io::AsyncWriteExt,
    net::{TcpListener, TcpStream},
    time::sleep,
};

use crate::{
    control::Via,
    http, names,
    read::{Program, ReadError, read_until},
    record::{self, Record},
    refusal::Refusal,
    sandbox::Sandbox,
    socks,
    target::Target,
    tunnel::Tunnel,
};

/// After `accept` fails, which it does when this process has no descriptors left.
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// Serves the proxy's listener until the sandbox is closed.
pub(crate) fn spawn_proxy(sandbox: &Arc<Sandbox>, listener: TcpListener) {
    spawn(sandbox, listener, None);
}

/// Serves sockets that stand for names until the sandbox is closed.
pub(crate) fn spawn_targets(sandbox: &Arc<Sandbox>, listeners: Vec<names::Listener>) {
    for names::Listener { socket, target } in listeners {
        match socket.set_nonblocking(true).and_then(|()| TcpListener::from_std(socket)) {
            Ok(listener) => spawn(sandbox, listener, Some(target)),
            Err(error) => tracing::error!(host = target.host, %error, "cannot serve a name"),
        }
    }
}

fn spawn(sandbox: &Arc<Sandbox>, listener: TcpListener, target: Option<Target>) {
    let own = sandbox.clone();
    let accept = async move {
        let accept = accept_all(&own, listener, target.as_ref());
        own.closed.run_until_cancelled(accept).await;
    };
    task::background("accept", sandbox.tasks.track_future(accept));
}

/// Accepts no faster than the sandbox may connect: further connections wait in the backlog.
async fn accept_all(sandbox: &Arc<Sandbox>, listener: TcpListener, target: Option<&Target>) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                sandbox.connection_rate.pass(sandbox.limits().connections_per_second).await;
                start(sandbox, stream, target);
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                sleep(RETRY_DELAY).await;
            }
        }
    }
}

fn start(sandbox: &Arc<Sandbox>, stream: TcpStream, target: Option<&Target>) {
    let via = if target.is_some() { Via::Transparent } else { Via::Connect };
    let permit = match sandbox.permit() {
        Ok(permit) => permit,
        Err(reason) => {
            reset(&stream);
            return record::refused(sandbox, via, target, reason);
        }
    };
    let own = sandbox.clone();
    let target = target.cloned();
    let connection = async move {
        let mut record = Record::new(via);
        // A connection that the end of the sandbox cuts off was allowed.
        let result = own.closed.run_until_cancelled(serve(&own, stream, target, &mut record)).await;
        record.finish(&own, result.and_then(Result::err));
        drop(permit);
    };
    task::background("connection", sandbox.tasks.track_future(connection));
}

async fn serve(
    sandbox: &Arc<Sandbox>,
    stream: TcpStream,
    target: Option<Target>,
    record: &mut Record,
) -> Result<(), Refusal> {
    // Nagle's algorithm only delays small packets.
    let _ = stream.set_nodelay(true);
    match target {
        Some(target) => transparent(sandbox, stream, target, record).await,
        None => explicit(sandbox, stream, record).await,
    }
}

/// The program connected to the address of a name. It gets a reset if that is refused.
async fn transparent(
    sandbox: &Arc<Sandbox>,
    stream: TcpStream,
    target: Target,
    record: &mut Record,
) -> Result<(), Refusal> {
    match Tunnel::open(sandbox, target, record).await {
        Ok(tunnel) => tunnel.run(sandbox, stream, Vec::new(), record).await,
        Err(refusal) => {
            reset(&stream);
            Err(refusal)
        }
    }
}

/// The program speaks HTTP or SOCKS5 with the proxy.
async fn explicit(
    sandbox: &Arc<Sandbox>,
    stream: TcpStream,
    record: &mut Record,
) -> Result<(), Refusal> {
    let mut program =
        Program { stream, start: Vec::new(), limit: sandbox.proxy.config.options.header_timeout };
    let Program { stream, start, limit } = &mut program;
    let first = read_until(stream, start, *limit, |bytes| Ok(bytes.first().copied())).await;
    match first {
        Ok(socks::VERSION) => socks::serve(sandbox, program, record).await,
        Ok(_) => http::serve(sandbox, program, record).await,
        // Some programs open connections that they do not use.
        Err(ReadError::Ended) => Ok(()),
        Err(ReadError::Refused(refusal)) => {
            let _ = stream.shutdown().await;
            Err(refusal)
        }
    }
}

/// Makes the end of the connection a reset.
fn reset(stream: &TcpStream) {
    // Without it the program sees an ordinary end.
    let _ = stream.set_zero_linger();
}
