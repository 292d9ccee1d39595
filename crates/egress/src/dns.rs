//! The resolver inside a sandbox. It answers allowed names with the addresses that stand for them
//! there, and asks no other server: names are resolved when a program connects.

use std::{io, net::IpAddr, sync::Arc, time::Duration};

use codelia_telemetry::task;
use hickory_proto::{
    op::{Message, MessageType, OpCode, ResponseCode},
    rr::{
        DNSClass, Name, RData, Record as Resource, RecordType,
        rdata::{A, AAAA},
    },
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream, UdpSocket},
    time::{sleep, timeout},
};

use crate::{
    accept,
    control::{Report, Via},
    names::Family,
    record::{self, Record},
    refusal::{Reason, Refusal},
    sandbox::Sandbox,
    target::parse_name,
};

/// An address stands for its name as long as the sandbox lives.
const TTL_SECONDS: u32 = 300;
/// The largest query. Names have at most 255 bytes.
pub(crate) const MAX_QUERY: usize = 1232;
const HEADER: usize = 12;
/// Connections over TCP at a time, and how long each may take.
const TCP_QUERIES: u32 = 16;
const TCP_TIMEOUT: Duration = Duration::from_secs(10);
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// Serves queries until the sandbox is closed.
pub(crate) fn spawn(sandbox: &Arc<Sandbox>, udp: UdpSocket, tcp: TcpListener) {
    let own = sandbox.clone();
    let serve = async move {
        let serve = async { tokio::join!(serve_udp(&own, udp), serve_tcp(&own, tcp)) };
        own.closed.run_until_cancelled(serve).await;
    };
    task::background("resolver", sandbox.tasks.track_future(serve));
}

async fn serve_udp(sandbox: &Arc<Sandbox>, socket: UdpSocket) {
    let mut buffer = [0; MAX_QUERY];
    loop {
        match socket.recv_from(&mut buffer).await {
            Ok((count, peer)) => {
                pass(sandbox).await;
                if let Some(reply) = answer(sandbox, &buffer[..count]) {
                    // The program asks again if the answer is lost.
                    let _ = socket.send_to(&reply, peer).await;
                }
            }
            Err(error) => {
                tracing::debug!(%error, "cannot receive a query");
                sleep(RETRY_DELAY).await;
            }
        }
    }
}

async fn serve_tcp(sandbox: &Arc<Sandbox>, listener: TcpListener) {
    let queries = Arc::new(tokio::sync::Semaphore::new(TCP_QUERIES as usize));
    loop {
        let Ok(permit) = queries.clone().acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let own = sandbox.clone();
                let serve = async move {
                    let serve = timeout(TCP_TIMEOUT, serve_stream(&own, stream));
                    // The end of the connection, a timeout or the end of the sandbox.
                    let _ = own.closed.run_until_cancelled(serve).await;
                    drop(permit);
                };
                task::background("resolver", sandbox.tasks.track_future(serve));
            }
            Err(error) => {
                tracing::debug!(%error, "cannot accept a query");
                sleep(RETRY_DELAY).await;
            }
        }
    }
}

async fn serve_stream(sandbox: &Arc<Sandbox>, mut stream: TcpStream) -> io::Result<()> {
    loop {
        let length = usize::from(stream.read_u16().await?);
        if length > MAX_QUERY {
            return Ok(());
        }
        let mut query = vec![0; length];
        stream.read_exact(&mut query).await?;
        pass(sandbox).await;
        let Some(reply) = answer(sandbox, &query) else { return Ok(()) };
        stream.write_u16(u16::try_from(reply.len()).unwrap_or_default()).await?;
        stream.write_all(&reply).await?;
    }
}

/// Waits if the sandbox asks too often, and records that.
async fn pass(sandbox: &Sandbox) {
    if sandbox.query_rate.pass(sandbox.limits().queries_per_second).await {
        record::refused(sandbox, Via::Dns, None, Reason::QueryRate);
    }
}

/// The answer to a query. `None` if it is not one.
fn answer(sandbox: &Arc<Sandbox>, bytes: &[u8]) -> Option<Vec<u8>> {
    let question = match parse_query(bytes) {
        Ok(question) => question,
        Err(reply) => return reply,
    };
    let looked_up = look_up(sandbox, &question).map_err(|(name, refusal)| {
        let mut record = Record::new(Via::Dns);
        record.set_raw_host(&name);
        record.finish(sandbox, Some(refusal));
    });
    reply(question, looked_up)
}

/// The reply to a query: the address, none of this type, or that the query is refused.
pub(crate) fn reply(question: Question, looked_up: Result<Option<IpAddr>, ()>) -> Option<Vec<u8>> {
    let mut reply = question.message.into_response();
    // Only the question is sent back.
    reply.additionals.clear();
    reply.authorities.clear();
    reply.answers.clear();
    reply.signature = None;
    reply.edns = None;
    reply.metadata.recursion_available = true;
    reply.metadata.response_code = match looked_up {
        Ok(_) => ResponseCode::NoError,
        Err(()) => ResponseCode::Refused,
    };
    if let Ok(Some(address)) = looked_up {
        let data = match address {
            IpAddr::V4(address) => RData::A(A(address)),
            IpAddr::V6(address) => RData::AAAA(AAAA(address)),
        };
        reply.add_answer(Resource::from_rdata(question.owner, TTL_SECONDS, data));
    }
    reply.to_vec().ok()
}

/// A query for one name.
#[derive(Debug, Clone)]
pub(crate) struct Question {
    message: Message,
    pub(crate) owner: Name,
    pub(crate) kind: RecordType,
}

/// Parses a query. The error is the reply to one that is not valid, if it gets one.
pub(crate) fn parse_query(bytes: &[u8]) -> Result<Question, Option<Vec<u8>>> {
    let id =
        bytes.get(..HEADER).map(|header| u16::from_be_bytes([header[0], header[1]])).ok_or(None)?;
    let failed = |code| Message::error_msg(id, OpCode::Query, code).to_vec().ok();
    // A response is never answered.
    if bytes[2] & 0x80 != 0 {
        return Err(None);
    }
    let message = Message::from_vec(bytes).map_err(|_| failed(ResponseCode::FormErr))?;
    if message.metadata.message_type != MessageType::Query
        || message.metadata.op_code != OpCode::Query
    {
        return Err(failed(ResponseCode::NotImp));
    }
    match message.queries.as_slice() {
        [query] if query.query_class() == DNSClass::IN => {
            let owner = query.name().clone();
            let kind = query.query_type();
            Ok(Question { message, owner, kind })
        }
        [_] => Err(failed(ResponseCode::Refused)),
        _ => Err(failed(ResponseCode::FormErr)),
    }
}

/// The address of a name; `None` if the name is allowed but has no record of this type here.
fn look_up(
    sandbox: &Arc<Sandbox>,
    question: &Question,
) -> Result<Option<IpAddr>, (String, Refusal)> {
    let text = question.owner.to_ascii();
    let name = parse_name(&text).map_err(|reason| (text.clone(), reason.into()))?;
    let fail = |refusal: Refusal| (name.clone(), refusal);
    let rules = sandbox.check_name(&name).map_err(fail)?;
    match question.kind {
        RecordType::A => {
            let assigned = assign(sandbox, &name, Family::V4, &rules.allowed_ports);
            assigned.map(Some).map_err(|reason| fail(reason.into()))
        }
        // Without sockets for it or without IPv6, programs go on with the address of IPv4.
        RecordType::AAAA => Ok(assign(sandbox, &name, Family::V6, &rules.allowed_ports).ok()),
        // No service parameters.
        RecordType::HTTPS | RecordType::SVCB | RecordType::SRV => Ok(None),
        _ => Err(fail(Reason::QueryTypeNotAllowed.into())),
    }
}

fn assign(
    sandbox: &Arc<Sandbox>,
    name: &str,
    family: Family,
    ports: &[u16],
) -> Result<IpAddr, Reason> {
    let mut names = sandbox.names.lock();
    let assignment = names.assign(name, family, ports)?;
    drop(names);
    for assigned in assignment.assigned {
        sandbox.proxy.reports.send(Report::Assigned { sandbox: sandbox.id, assigned });
    }
    accept::spawn_targets(sandbox, assignment.listeners);
    assignment.failed.map_or(Ok(assignment.address), Err)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_query_is_parsed_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse_query(&bytes);
            let _ = parse_query(&[&[0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0][..], &bytes].concat());
        }
    }
}
