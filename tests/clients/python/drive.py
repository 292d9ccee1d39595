"""Use Codelia from Python: create a session, exec with stdin, watch, write and read a file, close.

Does so twice: with the client that grpcio-tools generated from proto/, and with server reflection
only. Usage: `drive.py CODELIA DATA_DIR`. Starts its own `codelia up` on the data directory and stops
it at the end.
"""

import os
import signal
import subprocess
import sys
import tomllib
from contextlib import contextmanager
from pathlib import Path

import grpc
from google.protobuf import descriptor_pool, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from codelia.v1 import file_pb2, file_pb2_grpc, run_pb2, run_pb2_grpc, session_pb2, session_pb2_grpc

TIMEOUT = 30
INPUT = bytes(range(256)) * 100


@contextmanager
def codelia_up(program: str, data: Path):
    """Start `codelia up`, wait until it is ready, yield its endpoint and key."""
    command = [program, "up", "--data-dir", str(data), "--listen", "127.0.0.1:0", "--metrics-listen", ""]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CODELIA_")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        if not any(line.startswith("ready") for line in process.stdout):
            raise RuntimeError(f"codelia up exited with {process.wait()} before it was ready")
        client = tomllib.loads((data / "client.toml").read_text())
        yield client["endpoint"], client["api_key"]
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, f"codelia up exited with {process.returncode}"


def check_events(events, expected: bytes) -> None:
    """Check the order of events, the bytes of both streams, and the outcome."""
    kinds = [event.WhichOneof("kind") for event in events]
    assert kinds[0] == "queued" and kinds[-1] == "finished" and "started" in kinds, kinds
    streams = {1: b"", 2: b""}
    for event in events:
        if event.WhichOneof("kind") == "output":
            assert event.output.offset == len(streams[event.output.stream])
            streams[event.output.stream] += event.output.data
    assert streams[1] == expected, f"{len(streams[1])} bytes returned"
    assert streams[2] == b"err\n", streams[2]
    run = events[-1].finished.run
    assert run.outcome.WhichOneof("kind") == "exited" and run.outcome.exited == 7, run.outcome


def exec_requests(make, session: str):
    """Yield the messages of one Exec call: start a command, write to stdin, close it."""
    command = {"argv": ["sh", "-c", "cat; echo err >&2; exit 7"], "stdin": True}
    yield make(start={"parent": session, "command": command})
    for begin in range(0, len(INPUT), 10_000):
        yield make(stdin=INPUT[begin : begin + 10_000])
    yield make(close_stdin={})


def write_requests(session: str):
    """Yield the messages of one upload: path, bytes, finish."""
    yield file_pb2.WriteFileRequest(open={"parent": session, "path": "input"})
    for begin in range(0, len(INPUT), 10_000):
        yield file_pb2.WriteFileRequest(data=INPUT[begin : begin + 10_000])
    yield file_pb2.WriteFileRequest(finish={})


def check_files(files, session: str, call) -> None:
    """Write a file and read it back."""
    written = files.WriteFile(write_requests(session), **call).file
    assert written.size_bytes == len(INPUT), written
    answers = list(files.ReadFile(file_pb2.ReadFileRequest(parent=session, path="input"), **call))
    assert answers[0].file == written, answers[0]
    assert b"".join(answer.data for answer in answers[1:]) == INPUT


def drive_generated(channel, auth) -> None:
    """Use the generated client."""
    sessions = session_pb2_grpc.SessionServiceStub(channel)
    runs = run_pb2_grpc.RunServiceStub(channel)
    call = {"metadata": auth, "timeout": TIMEOUT}

    session = sessions.CreateSession(session_pb2.CreateSessionRequest(labels={"from": "python"}), **call).session
    requests = exec_requests(run_pb2.ExecRequest, session.name)
    events = [response.event for response in runs.Exec(requests, **call)]
    check_events(events, INPUT)

    watch = run_pb2.WatchRunRequest(name=events[-1].finished.run.name)
    check_events([response.event for response in runs.WatchRun(watch, **call)], INPUT)

    check_files(file_pb2_grpc.FileServiceStub(channel), session.name, call)

    closed = sessions.CloseSession(session_pb2.CloseSessionRequest(name=session.name), **call).session
    assert closed.state == session_pb2.SESSION_STATE_ENDED, closed
    try:
        runs.GetRun(run_pb2.GetRunRequest(name="nonsense"), **call)
        raise AssertionError("a malformed name was accepted")
    except grpc.RpcError as error:
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, error


def drive_reflected(channel, auth) -> None:
    """Use server reflection only."""
    database = ProtoReflectionDescriptorDatabase(channel)
    pool = descriptor_pool.DescriptorPool(database)
    names = set(database.get_services())
    assert {"codelia.v1.SessionService", "codelia.v1.RunService", "codelia.v1.AdminService"} <= names, names

    def method(service: str, name: str):
        found = pool.FindServiceByName(f"codelia.v1.{service}").FindMethodByName(name)
        request = message_factory.GetMessageClass(found.input_type)
        response = message_factory.GetMessageClass(found.output_type)
        kinds = {
            (False, False): channel.unary_unary,
            (False, True): channel.unary_stream,
            (True, True): channel.stream_stream,
        }
        make_call = kinds[(found.client_streaming, found.server_streaming)]
        path = f"/codelia.v1.{service}/{name}"
        stub = make_call(path, request_serializer=request.SerializeToString, response_deserializer=response.FromString)
        return request, lambda message: stub(message, metadata=auth, timeout=TIMEOUT)

    create_request, create = method("SessionService", "CreateSession")
    session = create(create_request()).session
    exec_request, execute = method("RunService", "Exec")
    events = [response.event for response in execute(exec_requests(exec_request, session.name))]
    check_events(events, INPUT)
    watch_request, watch = method("RunService", "WatchRun")
    name = events[-1].finished.run.name
    check_events([response.event for response in watch(watch_request(name=name))], INPUT)
    close_request, close = method("SessionService", "CloseSession")
    assert close(close_request(name=session.name)).session.session_id == session.session_id


def main() -> None:
    """Start Codelia, use both clients, stop."""
    program, data = sys.argv[1], Path(sys.argv[2])
    with codelia_up(program, data) as (endpoint, key):
        with grpc.insecure_channel(endpoint.removeprefix("http://")) as channel:
            auth = [("authorization", f"Bearer {key}")]
            drive_generated(channel, auth)
            drive_reflected(channel, auth)
    print("ok")


if __name__ == "__main__":
    main()
