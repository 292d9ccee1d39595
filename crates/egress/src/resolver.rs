//! Resolves an allowed name with the configured DNS servers, without a cache: each connection asks
//! once and uses only the addresses that it checked.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use hickory_proto::{
    op::{Edns, Message, MessageType, OpCode, Query, ResponseCode},
    rr::{Name, RData, RecordType},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpStream, UdpSocket},
    time::timeout,
};

use crate::refusal::Reason;

/// Where the system names its DNS servers.
pub(crate) const RESOLV_CONF: &str = "/etc/resolv.conf";
/// For one answer of one server.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// Questions to all servers before a name is given up.
const ROUNDS: usize = 2;
const MAX_SERVERS: usize = 3;
/// The size of an answer that is never fragmented.
const UDP_PAYLOAD: u16 = 1232;
const MAX_RECORDS: usize = 64;
const MAX_ALIASES: usize = 8;

/// A client of DNS servers.
#[derive(Debug)]
pub(crate) struct Resolver {
    servers: Vec<SocketAddr>,
}

impl Resolver {
    pub(crate) fn new(mut servers: Vec<SocketAddr>) -> Self {
        servers.truncate(MAX_SERVERS);
        Self { servers }
    }

    /// All addresses of a name, IPv4 first.
    pub(crate) async fn resolve(&self, name: &str) -> Result<Vec<IpAddr>, Reason> {
        let mut name = Name::from_ascii(name).map_err(|_| Reason::InvalidTarget)?;
        name.set_fqdn(true);
        let (v4, v6) =
            tokio::join!(self.query(&name, RecordType::A), self.query(&name, RecordType::AAAA));
        // Only addresses that were returned are used, so the failure of one question is harmless.
        let mut addresses = v4.unwrap_or_default();
        addresses.extend(v6.unwrap_or_default());
        if addresses.is_empty() { Err(Reason::ResolveFailed) } else { Ok(addresses) }
    }

    async fn query(&self, name: &Name, kind: RecordType) -> Option<Vec<IpAddr>> {
        for server in std::iter::repeat_n(&self.servers, ROUNDS).flatten() {
            match timeout(ANSWER_TIMEOUT, exchange(*server, name, kind)).await {
                Ok(Some(answer)) => match answer.metadata.response_code {
                    ResponseCode::NoError => return addresses(&answer, name, kind),
                    ResponseCode::NXDomain => return Some(Vec::new()),
                    code => tracing::debug!(%server, %name, %code, "DNS server failed"),
                },
                Ok(None) => tracing::debug!(%server, %name, "no valid answer of the DNS server"),
                Err(_) => tracing::debug!(%server, %name, "DNS server timed out"),
            }
        }
        None
    }
}

/// Asks over UDP, and over TCP if the answer does not fit.
async fn exchange(server: SocketAddr, name: &Name, kind: RecordType) -> Option<Message> {
    let query = new_query(name, kind);
    let bytes = query.to_vec().ok()?;
    let answer = ask_udp(server, &bytes, &query).await?;
    if answer.metadata.truncation { ask_tcp(server, &bytes, &query).await } else { Some(answer) }
}

fn new_query(name: &Name, kind: RecordType) -> Message {
    let mut query = Message::new(rand::random(), MessageType::Query, OpCode::Query);
    query.metadata.recursion_desired = true;
    query.add_query(Query::query(name.clone(), kind));
    let mut edns = Edns::new();
    edns.set_max_payload(UDP_PAYLOAD);
    query.set_edns(edns);
    query
}

/// Waits for the answer and ignores everything else that arrives.
async fn ask_udp(server: SocketAddr, bytes: &[u8], query: &Message) -> Option<Message> {
    let any: IpAddr =
        if server.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).await.ok()?;
    socket.connect(server).await.ok()?;
    socket.send(bytes).await.ok()?;
    let mut buffer = vec![0; usize::from(UDP_PAYLOAD)];
    loop {
        let count = socket.recv(&mut buffer).await.ok()?;
        if let Some(answer) = parse_answer(&buffer[..count], query) {
            return Some(answer);
        }
    }
}

async fn ask_tcp(server: SocketAddr, bytes: &[u8], query: &Message) -> Option<Message> {
    let mut stream = TcpStream::connect(server).await.ok()?;
    let length = u16::try_from(bytes.len()).ok()?;
    stream.write_all(&[&length.to_be_bytes(), bytes].concat()).await.ok()?;
    let length = stream.read_u16().await.ok()?;
    let mut buffer = vec![0; usize::from(length)];
    stream.read_exact(&mut buffer).await.ok()?;
    parse_answer(&buffer, query)
}

fn parse_answer(bytes: &[u8], query: &Message) -> Option<Message> {
    let answer = Message::from_vec(bytes).ok()?;
    let matches = answer.metadata.id == query.metadata.id
        && answer.metadata.message_type == MessageType::Response
        && answer.queries == query.queries;
    matches.then_some(answer)
}

/// The addresses at the end of the chain of aliases. `None` if the answer is too large.
fn addresses(answer: &Message, name: &Name, kind: RecordType) -> Option<Vec<IpAddr>> {
    if answer.answers.len() > MAX_RECORDS {
        return None;
    }
    let mut owner = name;
    for _ in 0..MAX_ALIASES {
        let alias = answer.answers.iter().find_map(|record| match &record.data {
            RData::CNAME(alias) if record.name == *owner => Some(&alias.0),
            _ => None,
        });
        match alias {
            Some(alias) => owner = alias,
            None => {
                let of_owner = answer.answers.iter().filter(|record| record.name == *owner);
                return Some(of_owner.filter_map(|record| address(&record.data, kind)).collect());
            }
        }
    }
    None
}

fn address(data: &RData, kind: RecordType) -> Option<IpAddr> {
    match data {
        RData::A(address) if kind == RecordType::A => Some(IpAddr::V4(address.0)),
        RData::AAAA(address) if kind == RecordType::AAAA => Some(IpAddr::V6(address.0)),
        _ => None,
    }
}

/// The servers in the text of a `resolv.conf`.
pub(crate) fn parse_servers(text: &str) -> Vec<SocketAddr> {
    let address = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let address = (words.next()? == "nameserver").then(|| words.next())??;
        Some(SocketAddr::new(address.parse().ok()?, 53))
    };
    text.lines().filter_map(address).collect()
}

#[cfg(test)]
mod tests {
    use hickory_proto::rr::{
        Record,
        rdata::{A, CNAME},
    };
    use proptest::prelude::*;

    use super::*;

    fn name(text: &str) -> Name {
        Name::from_ascii(text).unwrap()
    }

    fn alias(from: &str, to: &str) -> Record {
        Record::from_rdata(name(from), 0, RData::CNAME(CNAME(name(to))))
    }

    fn answer(records: Vec<Record>) -> Message {
        let mut answer = Message::new(1, MessageType::Response, OpCode::Query);
        answer.add_answers(records);
        answer
    }

    #[test]
    fn aliases_are_followed_to_their_addresses_only() {
        let a = |owner: &str, last| {
            Record::from_rdata(name(owner), 0, RData::A(A::new(10, 0, 0, last)))
        };
        let records =
            vec![a("c.", 3), alias("a.", "b."), alias("b.", "c."), a("other.", 9), a("c.", 4)];
        let found = addresses(&answer(records), &name("a."), RecordType::A).unwrap();
        assert_eq!(found, [IpAddr::from([10, 0, 0, 3]), IpAddr::from([10, 0, 0, 4])]);
        let circle = vec![alias("a.", "b."), alias("b.", "a.")];
        assert_eq!(addresses(&answer(circle), &name("a."), RecordType::A), None);
        let many = (0..=MAX_RECORDS).map(|_| a("a.", 1)).collect();
        assert_eq!(addresses(&answer(many), &name("a."), RecordType::A), None);
    }

    #[test]
    fn answers_to_other_questions_are_ignored() {
        let query = new_query(&name("a."), RecordType::A);
        let mut reply = query.clone().into_response();
        reply.metadata.message_type = MessageType::Response;
        assert!(parse_answer(&reply.to_vec().unwrap(), &query).is_some());
        assert!(parse_answer(&query.to_vec().unwrap(), &query).is_none(), "not a response");
        let mut other_id = reply.clone();
        other_id.metadata.id ^= 1;
        assert!(parse_answer(&other_id.to_vec().unwrap(), &query).is_none());
        let mut other_name = reply;
        other_name.queries = vec![Query::query(name("b."), RecordType::A)];
        assert!(parse_answer(&other_name.to_vec().unwrap(), &query).is_none());
    }

    #[test]
    fn servers_are_read() {
        let text =
            "# nameserver 9.9.9.9\nsearch a\nnameserver 127.0.0.53\nnameserver ::1\nnameserver x\n";
        assert_eq!(
            parse_servers(text),
            ["127.0.0.53:53".parse().unwrap(), "[::1]:53".parse().unwrap()]
        );
    }

    proptest! {
        #[test]
        fn any_answer_is_parsed_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let query = new_query(&name("a."), RecordType::A);
            let _ = parse_answer(&bytes, &query);
        }
    }
}
