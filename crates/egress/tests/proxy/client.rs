//! Programs in a sandbox: HTTP and SOCKS5 clients of the proxy, and a DNS client.

use std::net::{IpAddr, SocketAddr};

use hickory_proto::{
    op::{Message, MessageType, OpCode, Query, ResponseCode},
    rr::{Name, RData, RecordType},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpStream, UdpSocket},
    time::timeout,
};

use crate::rig::DEADLINE;

/// Why a connection was refused: the status of HTTP and its reason, or the code of SOCKS.
pub(crate) type Refused = (u16, String);

/// Sends bytes and reads the answer until the end of the connection.
pub(crate) async fn send_raw(address: SocketAddr, bytes: &[u8]) -> String {
    let exchange = async {
        // The proxy may have refused it already.
        let Ok(mut stream) = TcpStream::connect(address).await else { return String::new() };
        let _ = stream.write_all(bytes).await;
        read_text(&mut stream).await
    };
    timeout(DEADLINE, exchange).await.expect("no end of the connection")
}

/// Reads until the end, which may be a reset.
pub(crate) async fn read_text(stream: &mut TcpStream) -> String {
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    String::from_utf8_lossy(&answer).into_owned()
}

/// The status and the reason of a response.
pub(crate) fn status(response: &str) -> Refused {
    let status = response.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
    let reason = response.lines().find_map(|line| line.strip_prefix("x-codelia-reason: "));
    (status, reason.unwrap_or_default().to_owned())
}

/// Opens a tunnel with `CONNECT`.
pub(crate) async fn connect(proxy: SocketAddr, authority: &str) -> Result<TcpStream, Refused> {
    let mut stream = TcpStream::connect(proxy).await.unwrap();
    stream.write_all(format!("CONNECT {authority} HTTP/1.1\r\n\r\n").as_bytes()).await.unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match timeout(DEADLINE, stream.read_u8()).await.expect("no answer") {
            Ok(byte) => head.push(byte),
            Err(_) => break,
        }
    }
    let head = String::from_utf8(head).unwrap();
    if status(&head).0 == 200 { Ok(stream) } else { Err(status(&head)) }
}

/// Sends a request in absolute form and returns the response.
pub(crate) async fn get(proxy: SocketAddr, url: &str) -> String {
    let host = url.split('/').nth(2).unwrap_or_default();
    send_raw(proxy, format!("GET {url} HTTP/1.1\r\nHost: {host}\r\n\r\n").as_bytes()).await
}

/// Opens a tunnel with SOCKS5, by name.
pub(crate) async fn socks(proxy: SocketAddr, host: &str, port: u16) -> Result<TcpStream, Refused> {
    let length = u8::try_from(host.len()).unwrap();
    let request = [&[5, 1, 0, 3, length][..], host.as_bytes(), &port.to_be_bytes()].concat();
    socks_request(proxy, &request).await
}

/// Sends a request of SOCKS5.
pub(crate) async fn socks_request(proxy: SocketAddr, request: &[u8]) -> Result<TcpStream, Refused> {
    let exchange = async {
        let mut stream = TcpStream::connect(proxy).await.unwrap();
        stream.write_all(&[5, 1, 0]).await.unwrap();
        let mut answer = [0; 2];
        stream.read_exact(&mut answer).await.unwrap();
        assert_eq!(answer, [5, 0]);
        stream.write_all(request).await.unwrap();
        let mut reply = [0; 10];
        stream.read_exact(&mut reply).await.unwrap();
        if reply[1] == 0 { Ok(stream) } else { Err((u16::from(reply[1]), String::new())) }
    };
    timeout(DEADLINE, exchange).await.expect("no answer")
}

/// Asks the resolver over UDP.
pub(crate) async fn query(
    resolver: SocketAddr,
    name: &str,
    kind: RecordType,
) -> (ResponseCode, Vec<IpAddr>) {
    let name = Name::from_labels(name.split('.').map(str::as_bytes)).unwrap();
    let mut message = Message::new(7, MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(name, kind));
    let answer = query_raw(resolver, &message.to_vec().unwrap()).await;
    let answer = Message::from_vec(&answer).unwrap();
    assert_eq!((answer.metadata.id, answer.metadata.message_type), (7, MessageType::Response));
    let addresses = answer.answers.iter().filter_map(|record| match &record.data {
        RData::A(address) => Some(IpAddr::V4(address.0)),
        RData::AAAA(address) => Some(IpAddr::V6(address.0)),
        _ => None,
    });
    (answer.metadata.response_code, addresses.collect())
}

pub(crate) async fn query_raw(resolver: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    socket.send_to(bytes, resolver).await.unwrap();
    let mut buffer = vec![0; 4096];
    let count = timeout(DEADLINE, socket.recv(&mut buffer)).await.expect("no answer").unwrap();
    buffer.truncate(count);
    buffer
}

/// The address that stands for a name in the sandbox.
pub(crate) async fn resolve(resolver: SocketAddr, name: &str) -> IpAddr {
    let (code, addresses) = query(resolver, name, RecordType::A).await;
    assert_eq!((code, addresses.len()), (ResponseCode::NoError, 1), "{name}");
    addresses[0]
}

/// Connects to a name as a program does that knows no proxy.
pub(crate) async fn connect_transparently(
    resolver: SocketAddr,
    name: &str,
    port: u16,
) -> TcpStream {
    let address = resolve(resolver, name).await;
    TcpStream::connect((address, port)).await.unwrap()
}

/// Runs futures at the same time.
pub(crate) async fn join_all<T>(futures: impl Iterator<Item = impl Future<Output = T>>) -> Vec<T> {
    let mut pinned: Vec<_> = futures.map(Box::pin).collect();
    let mut done = Vec::new();
    std::future::poll_fn(|context| {
        pinned.retain_mut(|future| match future.as_mut().poll(context) {
            std::task::Poll::Ready(output) => {
                done.push(output);
                false
            }
            std::task::Poll::Pending => true,
        });
        if pinned.is_empty() { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
    done
}
