//! File calls need the lease when they start and before their result becomes visible.

use std::time::Duration;

use codelia_proto::{
    internal::v1::{
        CallFileRequest, CloseSessionRequest, FileRefusal, FileRefusalReason as Reason, HeldSession,
        ListedDirectory, OpenedFile, ReadFileRequest, WriteFileRequest, call_file_request::Call,
        write_file_request::Kind,
    },
    v1,
};
use codelia_tests::{eventually, within};
use codelia_types::SessionId;
use prost::Message;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use crate::fixture::{Fixture, Settings};

fn held(fixture: &Fixture, session: SessionId, lease_epoch: i64) -> Option<HeldSession> {
    let (session_id, tenant_id) = (session.to_string(), fixture.tenant.to_string());
    Some(HeldSession { session_id, tenant_id, lease_epoch })
}

fn reason(status: &Status) -> Reason {
    FileRefusal::decode(status.details()).unwrap().reason()
}

async fn stat(fixture: &Fixture, session: SessionId, epoch: i64) -> Result<(), Reason> {
    let root = v1::StatFileRequest { path: String::new(), ..Default::default() };
    let request =
        CallFileRequest { session: held(fixture, session, epoch), call: Some(Call::StatFile(root)) };
    fixture.files.clone().call_file(request).await.map(drop).map_err(|status| reason(&status))
}

#[tokio::test]
async fn file_call_under_wrong_lease_is_refused() {
    let fixture = Fixture::new(Settings::default()).await;
    let session = fixture.held_session().await;
    assert_eq!(stat(&fixture, session, 1).await, Ok(()));
    for epoch in [0, 2, -1] {
        assert_eq!(stat(&fixture, session, epoch).await, Err(Reason::NotHeld), "epoch {epoch}");
    }
    assert_eq!(stat(&fixture, SessionId::generate(), 1).await, Err(Reason::NotHeld));
    let read = ReadFileRequest { session: held(&fixture, session, 2), request: Some(Default::default()) };
    let refused = fixture.files.clone().read_file(read).await.err().unwrap();
    assert_eq!(reason(&refused), Reason::NotHeld);
    fixture.end().await;
}

#[tokio::test]
async fn upload_to_released_session_does_not_appear() {
    let fixture = Fixture::new(Settings::default()).await;
    let session = fixture.held_session().await;
    let (pieces, messages) = mpsc::channel(4);
    let send = |kind| pieces.try_send(WriteFileRequest { kind: Some(kind) }).unwrap();
    let open = v1::WriteFileOpen { path: "file".into(), ..Default::default() };
    send(Kind::Open(OpenedFile { session: held(&fixture, session, 1), open: Some(open) }));
    send(Kind::Data("text".into()));
    let mut files = fixture.files.clone();
    let call = codelia_telemetry::task::background("write", async move {
        files.write_file(ReceiverStream::new(messages)).await.map(drop)
    });
    // The upload has begun when the worker has an unnamed file open.
    let begun = || async {
        let mut open = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        let directory = fixture.directory(session).display().to_string();
        let is_unnamed = |target: std::path::PathBuf| {
            let target = target.display().to_string();
            target.starts_with(&directory) && target.ends_with("(deleted)")
        };
        open.any(|fd| std::fs::read_link(fd.path()).is_ok_and(is_unnamed)).then_some(())
    };
    eventually("the upload has begun", begun).await;
    let close = CloseSessionRequest { session_id: session.to_string() };
    fixture.caller.clone().close_session(close).await.unwrap();
    send(Kind::Finish(v1::WriteFileFinish {}));
    let refused = within("an answer", call).await.unwrap().unwrap_err();
    assert_eq!(reason(&refused), Reason::NotHeld);
    assert!(!fixture.directory(session).join("file").exists());
    fixture.end().await;
}

#[tokio::test]
async fn file_call_stops_at_its_deadline() {
    for (file_call_timeout, expected) in
        [(Duration::from_secs(60), Ok(())), (Duration::from_nanos(1), Err(Reason::TimedOut))]
    {
        let fixture = Fixture::new(Settings { file_call_timeout, ..Settings::default() }).await;
        let session = fixture.held_session().await;
        let directory = fixture.directory(session);
        std::fs::create_dir(directory.join("tree")).unwrap();
        std::fs::write(directory.join("tree/file"), "text").unwrap();
        let call = async |call| {
            let request = CallFileRequest { session: held(&fixture, session, 1), call: Some(call) };
            fixture.files.clone().call_file(request).await.map(drop).map_err(|status| reason(&status))
        };
        let edit =
            v1::EditFileRequest { path: "tree/file".into(), old_text: "e".into(), ..Default::default() };
        let copy = v1::CopyFileRequest {
            source_path: "tree/file".into(),
            destination_path: "copy".into(),
            ..Default::default()
        };
        let make = v1::MakeDirectoryRequest { path: "a/b".into(), parents: true, ..Default::default() };
        let list = ListedDirectory { path: "tree".into(), limit: 10, ..Default::default() };
        for loops in
            [Call::ListFiles(list), Call::EditFile(edit), Call::CopyFile(copy), Call::MakeDirectory(make)]
        {
            assert_eq!(call(loops.clone()).await, expected, "{loops:?}");
        }
        // A tree is gone for its session at once. What the call does not remove is left to the janitor.
        let remove = v1::RemoveFileRequest { path: "tree".into(), recursive: true, ..Default::default() };
        assert_eq!(call(Call::RemoveFile(remove)).await, Ok(()));
        assert!(!directory.join("tree").exists());
        let trash = directory.ancestors().nth(3).unwrap().join("trash");
        assert_eq!(std::fs::read_dir(trash).unwrap().count(), usize::from(expected.is_err()));
        fixture.end().await;
    }
}
