"""Measures the way to a server: client.py ADDRESS [PROXY_HOST:PORT]. Prints `throughput connect exchange`:
MB/s of one connection, and the medians of connecting and of one byte there and back, in microseconds."""

import socket
import statistics
import sys
import time

BYTES = 512 << 20
CONNECTIONS = 100
EXCHANGES = 500
HOST = sys.argv[1]
PROXY = sys.argv[2].rsplit(":", 1) if len(sys.argv) > 2 else None


def connect(port):
    if PROXY is None:
        return socket.create_connection((HOST, port), 30)
    it = socket.create_connection((PROXY[0], int(PROXY[1])), 30)
    it.sendall(f"CONNECT {HOST}:{port} HTTP/1.1\r\nHost: {HOST}:{port}\r\n\r\n".encode())
    head = b""
    while b"\r\n\r\n" not in head:
        part = it.recv(4096)
        assert part, head
        head += part
    assert b" 200 " in head.split(b"\r\n", 1)[0], head
    return it


def throughput():
    it = connect(9001)
    it.sendall(BYTES.to_bytes(8, "big"))
    buffer = bytearray(1 << 20)
    left, begun = BYTES, time.perf_counter()
    while left:
        count = it.recv_into(buffer)
        assert count, "cut off"
        left -= count
    return BYTES / 1e6 / (time.perf_counter() - begun)


def exchange(it):
    begun = time.perf_counter()
    it.sendall(b"x\n")
    got = b""
    while len(got) < 7:  # "echo:x" and a line feed
        got += it.recv(64)
    return time.perf_counter() - begun


def connecting():
    begun = time.perf_counter()
    it = connect(9000)
    exchange(it)
    took = time.perf_counter() - begun
    it.close()
    return took


def paced(work, count):
    """Below the rate of new connections that a sandbox may make."""
    for _ in range(count):
        yield work()
        time.sleep(0.02)


rate = statistics.median(throughput() for _ in range(3))
opened = statistics.median(paced(connecting, CONNECTIONS)) * 1e6
it = connect(9000)
print(f"{rate:.0f} {opened:.0f} {statistics.median(exchange(it) for _ in range(EXCHANGES)) * 1e6:.0f}")
