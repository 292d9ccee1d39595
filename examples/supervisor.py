#!/usr/bin/env python3
"""Decides about requests of a supervisor socket.

    codelia supervisor --socket /tmp/supervisor.sock &
    python3 examples/supervisor.py /tmp/supervisor.sock --approve network_proxy

Approves requests whose `op` is listed, or asks on a terminal, and denies all others. The protocol is a
Unix socket with one JSON object for each line: events from the supervisor, commands to it. Prints each
event. Needs nothing but Python.
"""

import argparse
import json
import socket
import sys


def ask(request):
    """Asks the person at the terminal; returns a command."""
    print(f"{request['op']} {request['path']} ({request['exe']} in {request['cwd']}, pid {request['pid']})")
    answer = input("[a]pprove, approve [p]ersistently, anything else denies: ").strip()
    if answer in ("a", "p"):
        return approve(request, answer == "p")
    return {"type": "cmd.deny", "id": request["id"]}


def approve(request, persist):
    return {"type": "cmd.approve", "id": request["id"], "scope": "file", "persist": persist}


def decide(request, arguments):
    if request["op"] in arguments.approve:
        return approve(request, arguments.persist or arguments.save is not None)
    if sys.stdin.isatty():
        return ask(request)
    return {"type": "cmd.deny", "id": request["id"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("socket", help="path of the supervisor's socket")
    parser.add_argument("--approve", action="append", default=[], metavar="OP", help="approve this operation")
    parser.add_argument("--persist", action="store_true", help="approve persistently")
    parser.add_argument("--save", choices=["user", "project", "org"], help="approve persistently, for this scope")
    parser.add_argument("--count", type=int, default=0, help="exit after this many decisions; 0 for never")
    arguments = parser.parse_args()

    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(arguments.socket)
    lines = connection.makefile("rw", encoding="utf-8", newline="\n")
    if arguments.save:
        lines.write(json.dumps({"type": "cmd.policy.save", "scope": arguments.save}) + "\n")
        lines.flush()
    decided = 0
    for line in lines:
        event = json.loads(line)
        print(json.dumps(event), flush=True)
        if event["type"] == "event.fs_request":
            lines.write(json.dumps(decide(event, arguments)) + "\n")
            lines.flush()
        elif event["type"] == "event.audit":
            decided += 1
            if decided == arguments.count:
                return


if __name__ == "__main__":
    main()
