"""Tries to reach ADDRESS (IPv4) and ADDRESS6 around the proxy: attack.py ADDRESS ADDRESS6 ABSTRACT LINK.
LINK is the host's device that leads to them.

Prints one line for each way: `way: what happened`. A way that got through prints `way: sent`.
"""

import os
import random
import socket
import struct
import sys

ADDRESS, ADDRESS6, ABSTRACT, LINK = sys.argv[1:5]
QUERY = b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x06secret\x07example\x03org\x00\x00\x01\x00\x01"
IP_TRANSPARENT = 19
LOOSE_SOURCE_ROUTE = 131


def udp(address, port, data=b"data", family=socket.AF_INET, **options):
    with socket.socket(family, socket.SOCK_DGRAM) as it:
        for (level, name), value in options.get("set", {}).items():
            it.setsockopt(level, name, value)
        it.sendto(data, (address, port))


def tcp(address, port, data=b"data", family=socket.AF_INET, **options):
    with socket.socket(family, socket.SOCK_STREAM) as it:
        it.settimeout(3)
        for (level, name), value in options.get("set", {}).items():
            it.setsockopt(level, name, value)
        it.connect((address, port))
        it.sendall(data)


def fast_open():
    with socket.socket() as it:
        it.settimeout(3)
        it.sendto(b"data", socket.MSG_FASTOPEN, (ADDRESS, 80))


def ping(kind):
    with socket.socket(socket.AF_INET, kind, socket.IPPROTO_ICMP) as it:
        it.sendto(b"\x08\x00\xf7\xff\x00\x00\x00\x00", (ADDRESS, 0))


def raw6():
    with socket.socket(socket.AF_INET6, socket.SOCK_RAW, 17) as it:
        it.sendto(struct.pack(">HHHH", 1, 9, 8, 0), (ADDRESS6, 0))


def packet():
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as it:
        found = set(name for _, name in socket.if_nameindex()) - {"lo"}
        # On the host, other tests have devices too, and capture what arrives there.
        it.bind((LINK if LINK in found else sorted(found)[0], 0))
        it.send(b"\xff" * 12 + b"\x08\x00" + b"\x45" + b"\0" * 40)


def abstract():
    with socket.socket(socket.AF_UNIX) as it:
        it.connect("\0" + ABSTRACT)
        it.sendall(b"data")


def other_namespaces():
    """Another process's network namespace, such as the proxy's."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        path = f"/proc/{pid}/ns/net"
        if os.path.exists(path) and os.readlink(path) != os.readlink("/proc/self/ns/net"):
            with open(path) as file:
                os.setns(file.fileno(), 0)
            return udp(ADDRESS, 9)
    raise FileNotFoundError("no other network namespace")


DEVICE = b"eth0\0"
ROUTE = bytes([LOOSE_SOURCE_ROUTE, 7, 4]) + socket.inet_aton(ADDRESS) + b"\0"
WAYS = {
    "udp": lambda: udp(ADDRESS, 9),
    "quic": lambda: udp(ADDRESS, 443, os.urandom(1200)),
    "dns to another server": lambda: udp(ADDRESS, 53, QUERY),
    "dns over tcp to another server": lambda: tcp(ADDRESS, 53, struct.pack(">H", len(QUERY)) + QUERY),
    "dns over tls": lambda: tcp(ADDRESS, 853),
    "tcp to an address": lambda: tcp(ADDRESS, 80),
    "tcp to another port": lambda: tcp(ADDRESS, 9000),
    "icmp": lambda: ping(socket.SOCK_DGRAM),
    "raw icmp": lambda: ping(socket.SOCK_RAW),
    "ipv6 udp": lambda: udp(ADDRESS6, 9, family=socket.AF_INET6),
    "ipv6 tcp": lambda: tcp(ADDRESS6, 80, family=socket.AF_INET6),
    "raw ipv6": raw6,
    "packet socket": packet,
    "tcp to a mapped address": lambda: tcp("::ffff:" + ADDRESS, 80, family=socket.AF_INET6),
    "tcp fast open": fast_open,
    "bound to a device": lambda: udp(ADDRESS, 9, set={(socket.SOL_SOCKET, socket.SO_BINDTODEVICE): DEVICE}),
    "transparent": lambda: udp(ADDRESS, 9, set={(socket.SOL_IP, IP_TRANSPARENT): 1}),
    "source route": lambda: udp(ADDRESS, 9, set={(socket.SOL_IP, socket.IP_OPTIONS): ROUTE}),
    "multicast": lambda: udp("224.0.0.251", 5353),
    "broadcast": lambda: udp("255.255.255.255", 9, set={(socket.SOL_SOCKET, socket.SO_BROADCAST): 1}),
    "abstract socket of the host": abstract,
    "another network namespace": other_namespaces,
}

for way, attempt in WAYS.items():
    try:
        attempt()
        print(f"{way}: sent", flush=True)
    except OSError as error:
        print(f"{way}: {error.strerror or error}", flush=True)
    except (AttributeError, IndexError) as error:
        print(f"{way}: {error}", flush=True)
