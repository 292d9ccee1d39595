"""websocket.py WAY HOST HEADER opens a WebSocket at HOST, with HEADER as the Host, and prints two echoes."""

import base64
import hashlib
import os
import socket
import sys

way, host, header = sys.argv[1:]
uri = f"http://{host}/ws" if way == "absolute" else "/ws"
stream = socket.create_connection((host, 80) if way == "transparent" else ("127.0.0.1", 3128), 20)


def read_head():
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = stream.recv(1)
        if not byte:
            sys.exit(1)
        head += byte
    return head.decode()


def frame(text):
    """A text in one frame. What clients send is masked."""
    mask = os.urandom(4)
    return bytes([0x81, 0x80 | len(text)]) + mask + bytes(b ^ mask[i % 4] for i, b in enumerate(text))


if way == "connect":
    stream.sendall(f"CONNECT {host}:80 HTTP/1.1\r\nHost: {host}:80\r\n\r\n".encode())
    assert " 200 " in read_head()
key = base64.b64encode(os.urandom(16)).decode()
stream.sendall(
    f"GET {uri} HTTP/1.1\r\nHost: {header}\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n"
    f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n".encode()
)
answer = read_head()
accept = hashlib.sha1((key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()).digest()
if " 101 " not in answer or base64.b64encode(accept).decode() not in answer:
    sys.exit(1)
for text in (b"echo 1", b"echo 2"):
    stream.sendall(frame(text))
    head = stream.recv(2, socket.MSG_WAITALL)
    print(stream.recv(head[1], socket.MSG_WAITALL).decode())
