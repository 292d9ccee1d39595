"""A relay for connections from a network namespace: relay.py NAMESPACE ADDRESS|redirect SERVER. Prints a line
when it is ready. Its listeners are made inside the namespace and handed out, as Codelia does."""

import fcntl
import os
import socket
import struct
import subprocess
import sys
import threading

NAMESPACE, WAY, SERVER = sys.argv[1:4]
PORTS = [9000, 9001]
REDIRECT_PORT = 7000
SO_ORIGINAL_DST = 80
SIZE = 256 << 10


def listen(control):
    """Runs inside."""
    wanted = [("0.0.0.0", REDIRECT_PORT)] if WAY == "redirect" else [(WAY, port) for port in PORTS]
    made = [socket.create_server(address, backlog=128) for address in wanted]
    socket.send_fds(control, [b"x"], [it.fileno() for it in made])


def listeners():
    ours, theirs = socket.socketpair()
    command = ["ip", "netns", "exec", NAMESPACE, sys.executable, *sys.argv, str(theirs.fileno())]
    subprocess.run(command, pass_fds=[theirs.fileno()], check=True)
    return [socket.socket(fileno=fd) for fd in socket.recv_fds(ours, 1, len(PORTS))[1]]


def destination(client):
    if WAY != "redirect":
        return SERVER, client.getsockname()[1]
    port, address = struct.unpack("!2xH4s8x", client.getsockopt(socket.SOL_IP, SO_ORIGINAL_DST, 16))
    return socket.inet_ntoa(address), port


def copy(source, sink):
    out, into = os.pipe()
    fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, SIZE)
    try:
        while count := os.splice(source.fileno(), into, SIZE):
            while count:
                count -= os.splice(out, sink.fileno(), count)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        pass
    finally:
        os.close(out)
        os.close(into)


def serve(client):
    with client, socket.create_connection(destination(client)) as server:
        for it in (client, server):
            it.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = threading.Thread(target=copy, args=(server, client))
        back.start()
        copy(client, server)
        back.join()


def accept(listener):
    while True:
        threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()


def main():
    threads = [threading.Thread(target=accept, args=(it,)) for it in listeners()]
    for thread in threads:
        thread.start()
    print("ready", flush=True)


if len(sys.argv) == 5:
    listen(socket.socket(fileno=int(sys.argv[4])))
else:
    main()
