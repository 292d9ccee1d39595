//! A DNS server with scripted answers. Counts the queries for each name.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex},
};

use hickory_proto::{
    op::{Message, ResponseCode},
    rr::{
        Name, RData, Record, RecordType,
        rdata::{A, AAAA, CNAME},
    },
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, UdpSocket},
};

/// What the server answers for a name.
#[derive(Debug, Clone)]
pub(crate) enum Answer {
    Addresses(Vec<IpAddr>),
    /// Another list for each query, the last one again and again.
    Sequence(Vec<Vec<IpAddr>>),
    /// Aliases, and the addresses of the last one.
    Aliases(Vec<&'static str>, Vec<IpAddr>),
    Fail(ResponseCode),
    Nothing,
    /// An empty answer over UDP that asks for TCP.
    Truncated(Vec<IpAddr>),
    /// Bytes that are not a DNS message.
    Garbage,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct DnsServer {
    answers: Arc<Mutex<HashMap<String, Answer>>>,
    queries: Arc<Mutex<HashMap<String, usize>>>,
}

impl DnsServer {
    /// Starts a server and returns its address.
    pub(crate) async fn start() -> (Self, SocketAddr) {
        let server = Self::default();
        let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = tcp.local_addr().unwrap();
        let udp = UdpSocket::bind(address).await.unwrap();
        let (over_udp, over_tcp) = (server.clone(), server.clone());
        #[allow(clippy::disallowed_methods)]
        tokio::spawn(async move { over_udp.serve_udp(udp).await });
        #[allow(clippy::disallowed_methods)]
        tokio::spawn(async move { over_tcp.serve_tcp(tcp).await });
        (server, address)
    }

    pub(crate) fn set(&self, name: &str, answer: Answer) {
        self.answers.lock().unwrap().insert(name.to_owned(), answer);
    }

    pub(crate) fn set_address(&self, name: &str, address: &str) {
        self.set(name, Answer::Addresses(vec![address.parse().unwrap()]));
    }

    /// How often a name was asked for.
    pub(crate) fn queries(&self, name: &str) -> usize {
        self.queries.lock().unwrap().get(name).copied().unwrap_or(0)
    }

    pub(crate) fn all_queries(&self) -> usize {
        self.queries.lock().unwrap().values().sum()
    }

    async fn serve_udp(&self, socket: UdpSocket) {
        let mut buffer = [0; 4096];
        while let Ok((count, peer)) = socket.recv_from(&mut buffer).await {
            if let Some(reply) = self.reply(&buffer[..count], false) {
                socket.send_to(&reply, peer).await.unwrap();
            }
        }
    }

    async fn serve_tcp(&self, listener: TcpListener) {
        while let Ok((mut stream, _)) = listener.accept().await {
            let length = stream.read_u16().await.unwrap();
            let mut query = vec![0; usize::from(length)];
            stream.read_exact(&mut query).await.unwrap();
            if let Some(reply) = self.reply(&query, true) {
                stream.write_u16(u16::try_from(reply.len()).unwrap()).await.unwrap();
                stream.write_all(&reply).await.unwrap();
            }
        }
    }

    fn reply(&self, query: &[u8], tcp: bool) -> Option<Vec<u8>> {
        let query = Message::from_vec(query).unwrap();
        let (owner, kind) = (query.queries[0].name().clone(), query.queries[0].query_type());
        let name = owner.to_ascii().trim_end_matches('.').to_owned();
        let number = {
            let mut queries = self.queries.lock().unwrap();
            let count = queries.entry(name.clone()).or_default();
            *count += 1;
            // A name is asked for twice each time: for IPv4 and for IPv6.
            (*count - 1) / 2
        };
        let mut reply = query.into_response();
        let answer = self.answers.lock().unwrap().get(&name).cloned();
        match answer.unwrap_or(Answer::Fail(ResponseCode::NXDomain)) {
            Answer::Addresses(addresses) => add(&mut reply, &owner, kind, &addresses),
            Answer::Sequence(lists) => {
                add(&mut reply, &owner, kind, &lists[number.min(lists.len() - 1)]);
            }
            Answer::Aliases(aliases, addresses) => {
                let mut owner = owner;
                for alias in aliases {
                    let alias = Name::from_ascii(alias).unwrap();
                    reply.add_answer(Record::from_rdata(
                        owner,
                        0,
                        RData::CNAME(CNAME(alias.clone())),
                    ));
                    owner = alias;
                }
                add(&mut reply, &owner, kind, &addresses);
            }
            Answer::Fail(code) => reply.metadata.response_code = code,
            Answer::Nothing => return None,
            Answer::Truncated(_) if !tcp => reply.metadata.truncation = true,
            Answer::Truncated(addresses) => add(&mut reply, &owner, kind, &addresses),
            Answer::Garbage => return Some(vec![0xff; 40]),
        }
        Some(reply.to_vec().unwrap())
    }
}

/// Adds the addresses of this type, with a TTL of 0.
fn add(reply: &mut Message, owner: &Name, kind: RecordType, addresses: &[IpAddr]) {
    for address in addresses {
        let data = match address {
            IpAddr::V4(address) if kind == RecordType::A => RData::A(A(*address)),
            IpAddr::V6(address) if kind == RecordType::AAAA => RData::AAAA(AAAA(*address)),
            _ => continue,
        };
        reply.add_answer(Record::from_rdata(owner.clone(), 0, data));
    }
}
