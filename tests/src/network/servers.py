"""Servers in the network namespace of a test: HTTP, TLS, plain TCP, DNS and a capture of all packets.

servers.py ADDRESS DIRECTORY [capture] serves DIRECTORY/www on ports 80 and 443 and appends to
DIRECTORY/{requests,queries,packets}.log. Names are in DIRECTORY/names: `name address…` on each line.
"""

import base64
import hashlib
import http.server
import os
import socket
import socketserver
import ssl
import struct
import sys
import threading
import time

ADDRESS, DIRECTORY = sys.argv[1], sys.argv[2]
LOCK = threading.Lock()


def log(name, line):
    with LOCK, open(os.path.join(DIRECTORY, name + ".log"), "a") as file:
        file.write(line + "\n")


class Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, *args):
        super().__init__(*args, directory=os.path.join(DIRECTORY, "www"))

    def end_headers(self):
        # As registries do: what has a version never changes.
        if getattr(self, "path", "").startswith(("/files/", "/dl/")):
            self.send_header("Cache-Control", "max-age=31536000, immutable")
        super().end_headers()

    def record(self):
        scheme = "https" if isinstance(self.connection, ssl.SSLSocket) else "http"
        secret = self.headers.get("Authorization") or "-"
        log("requests", f"{scheme} {self.command} {self.headers.get('Host')} {self.path} {secret}")

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.record()
        path, _, query = self.path.partition("?")
        if path == "/redirect":
            self.answer(302, Location=query)
        elif path == "/slow":
            self.slow()
        elif path == "/ws":
            self.websocket()
        elif path == "/hello":
            self.answer(200, b"hello from " + (self.headers.get("Host") or "").encode() + b"\n")
        else:
            super().do_GET()

    def slow(self):
        """A line every 20 ms, without end."""
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        try:
            while True:
                self.wfile.write(b"tick\n")
                self.wfile.flush()
                time.sleep(0.02)
        except OSError:
            pass

    def websocket(self):
        """Sends back each short text message."""
        key = self.headers.get("Sec-WebSocket-Key", "") + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        self.send_response(101)
        self.send_header("Connection", "Upgrade")
        self.send_header("Upgrade", "websocket")
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key.encode()).digest()).decode())
        self.end_headers()
        self.close_connection = True
        while len(head := self.rfile.read(2)) == 2 and head[0] == 0x81:
            mask, data = self.rfile.read(4), self.rfile.read(head[1] & 0x7F)
            self.wfile.write(bytes([0x81, len(data)]) + bytes(b ^ mask[i % 4] for i, b in enumerate(data)))

    def do_POST(self):
        self.record()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.answer(200, body)

    def log_message(self, *args):
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, port, context=None):
        super().__init__((ADDRESS, port), Handler)
        self.context = context

    def finish_request(self, request, client):
        # The handshake is here, in the thread of the connection.
        if self.context:
            request = self.context.wrap_socket(request, server_side=True)
        super().finish_request(request, client)

    def handle_error(self, request, client):
        pass


class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        while data := self.request.recv(65536):
            self.request.sendall(b"echo:" + data)


class Source(socketserver.BaseRequestHandler):
    """Sends as many bytes as the first 8 bytes say."""

    def handle(self):
        left, block = int.from_bytes(self.request.recv(8, socket.MSG_WAITALL), "big"), bytes(1 << 20)
        while left > 0:
            self.request.sendall(block[:left])
            left -= len(block)


class EchoServer(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, request, client):
        pass


def names():
    found = {}
    with open(os.path.join(DIRECTORY, "names")) as file:
        for line in file:
            name, *addresses = line.split()
            found[name] = addresses
    return found


# How often each name was asked for: a name with several addresses gets the next one each time.
ASKED = {}


def answer(query):
    at, labels = 12, []
    while query[at]:
        labels.append(query[at + 1 : at + 1 + query[at]].decode("latin-1"))
        at += 1 + query[at]
    end = at + 5
    kind = struct.unpack(">H", query[at + 1 : at + 3])[0]
    name = ".".join(labels).lower()
    log("queries", f"{kind} {name}")
    addresses = names().get(name)
    records = []
    if addresses and kind == 1:
        if addresses[0] == "next":
            count = ASKED[name] = ASKED.get(name, 0) + 1
            addresses = [addresses[min(count, len(addresses) - 1)]]
        records = [socket.inet_aton(address) for address in addresses if ":" not in address]
    elif addresses and kind == 28:
        six = [address for address in addresses if ":" in address]
        records = [socket.inet_pton(socket.AF_INET6, address) for address in six]
    flags = 0x8180 if addresses else 0x8183
    head = query[:2] + struct.pack(">HHHHH", flags, 1, len(records), 0, 0)
    body = b"".join(
        b"\xc0\x0c" + struct.pack(">HHIH", kind, 1, 0, len(record)) + record for record in records
    )
    return head + query[12:end] + body


def dns_udp(server):
    while True:
        query, client = server.recvfrom(4096)
        try:
            server.sendto(answer(query), client)
        except (IndexError, OSError, struct.error):
            pass


class DnsTcp(socketserver.BaseRequestHandler):
    def handle(self):
        while length := self.request.recv(2):
            reply = answer(self.request.recv(struct.unpack(">H", length)[0]))
            self.request.sendall(struct.pack(">H", len(reply)) + reply)


HOP_BY_HOP, ICMP6 = 0, 58
# Multicast listeners (130-132, 143), routers (133, 134) and neighbours (135, 136).
HOUSEKEEPING = {*range(130, 137), 143}


def is_housekeeping(data):
    """Whether it is an IPv6 packet that the kernel of the host sends by itself, at any time and also to
    one address: it confirms a neighbour some seconds after it was used. These hop limits prove that no
    router forwarded it."""
    number, hop_limit, start = data[6], data[7], 40
    if number == HOP_BY_HOP and len(data) > 41:
        number, start = data[40], 48 + data[41] * 8
    is_local = hop_limit in (1, 255)
    return is_local and number == ICMP6 and len(data) > start and data[start] in HOUSEKEEPING


def capture(packets):
    """Every packet that arrives, as `protocol source destination port`."""
    while True:
        data, (_, protocol, kind, *_) = packets.recvfrom(65536)
        if kind == socket.PACKET_OUTGOING:
            continue
        if protocol == 0x0800:
            size, number = (data[0] & 15) * 4, data[9]
            source, target = socket.inet_ntoa(data[12:16]), socket.inet_ntoa(data[16:20])
        elif protocol == 0x86DD:
            size, number = 40, data[6]
            source = socket.inet_ntop(socket.AF_INET6, data[8:24])
            target = socket.inet_ntop(socket.AF_INET6, data[24:40])
            if is_housekeeping(data):
                continue
        else:
            continue
        port = struct.unpack(">H", data[size + 2 : size + 4])[0] if number in (6, 17) else 0
        log("packets", f"{number} {source} {target} {port}")


def main():
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind((ADDRESS, 53))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(os.path.join(DIRECTORY, "server.pem"), os.path.join(DIRECTORY, "server.key"))
    servers = [
        Server(80),
        Server(443, context),
        EchoServer((ADDRESS, 9000), Echo),
        EchoServer((ADDRESS, 9001), Source),
        EchoServer((ADDRESS, 53), DnsTcp),
    ]
    tasks = [(server.serve_forever, ()) for server in servers] + [(dns_udp, (udp,))]
    if "capture" in sys.argv[3:]:
        packets = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(3))
        tasks.append((capture, (packets,)))
    for task, arguments in tasks:
        threading.Thread(target=task, args=arguments, daemon=True).start()
    print("ready", flush=True)
    threading.Event().wait()


main()
