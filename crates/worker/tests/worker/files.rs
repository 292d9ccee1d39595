//! File calls need the lease when they start and before their result becomes visible.

use std::time::Duration;

use codelia_proto::{
    HeldSession,
    internal::v1::CloseSessionRequest,
    v1::{self, write_file_request::Kind},
};
use codelia_tests::{eventually, within};
use codelia_types::{LeaseEpoch, Reason, SessionId};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use tonic_types::StatusExt;

use crate::fixture::{Fixture, Settings};

fn held(fixture: &Fixture, session: SessionId, epoch: i64) -> HeldSession {
    HeldSession { session, tenant: fixture.tenant.clone(), epoch: LeaseEpoch(epoch) }
}

fn reason(status: &Status) -> Reason {
    Reason::parse(&status.get_details_error_info().unwrap().reason)
}

async fn stat(fixture: &Fixture, session: SessionId, epoch: i64) -> Result<(), Reason> {
    let request = held(fixture, session, epoch).request(v1::StatFileRequest::default());
    fixture.files.clone().stat_file(request).await.map(drop).map_err(|status| reason(&status))
}

#[tokio::test]
async fn file_call_under_wrong_lease_is_refused() {
    let fixture = Fixture::new(Settings::default()).await;
    let session = fixture.held_session().await;
    assert_eq!(stat(&fixture, session, 1).await, Ok(()));
    for epoch in [0, 2, -1] {
        assert_eq!(stat(&fixture, session, epoch).await, Err(Reason::Unavailable), "epoch {epoch}");
    }
    assert_eq!(stat(&fixture, SessionId::generate(), 1).await, Err(Reason::Unavailable));
    let read = held(&fixture, session, 2).request(v1::ReadFileRequest::default());
    let refused = fixture.files.clone().read_file(read).await.err().unwrap();
    assert_eq!(reason(&refused), Reason::Unavailable);
    let without_lease = fixture.files.clone().stat_file(v1::StatFileRequest::default()).await;
    assert_eq!(reason(&without_lease.err().unwrap()), Reason::Unavailable);
    fixture.end().await;
}

#[tokio::test]
async fn upload_to_released_session_does_not_appear() {
    let fixture = Fixture::new(Settings::default()).await;
    let session = fixture.held_session().await;
    let (pieces, messages) = mpsc::channel(4);
    let send = |kind| pieces.try_send(v1::WriteFileRequest { kind: Some(kind) }).unwrap();
    let open = v1::WriteFileOpen { path: "file".into(), ..Default::default() };
    send(Kind::Open(open));
    send(Kind::Data("text".into()));
    let mut files = fixture.files.clone();
    let request = held(&fixture, session, 1).request(ReceiverStream::new(messages));
    let call = codelia_telemetry::task::background("write", async move {
        files.write_file(request).await.map(drop)
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
    assert_eq!(reason(&refused), Reason::Unavailable);
    assert!(!fixture.directory(session).join("file").exists());
    fixture.end().await;
}

#[tokio::test]
async fn file_call_stops_at_its_deadline() {
    for (file_call_timeout, expected) in
        [(Duration::from_secs(60), Ok(())), (Duration::from_nanos(1), Err(Reason::FileCallTimeout))]
    {
        let fixture = Fixture::new(Settings { file_call_timeout, ..Settings::default() }).await;
        let session = fixture.held_session().await;
        let directory = fixture.directory(session);
        std::fs::create_dir(directory.join("tree")).unwrap();
        std::fs::write(directory.join("tree/file"), "text").unwrap();
        let held = held(&fixture, session, 1);
        let mut files = fixture.files.clone();
        let done = |called: Result<(), Status>| called.map_err(|status| reason(&status));
        let list =
            v1::ListFilesRequest { path: "tree".into(), page_size: 10, ..Default::default() };
        assert_eq!(done(files.list_files(held.request(list)).await.map(drop)), expected);
        let edit = v1::EditFileRequest {
            path: "tree/file".into(),
            old_text: "e".into(),
            ..Default::default()
        };
        assert_eq!(done(files.edit_file(held.request(edit)).await.map(drop)), expected);
        let copy = v1::CopyFileRequest {
            source_path: "tree/file".into(),
            destination_path: "copy".into(),
            ..Default::default()
        };
        assert_eq!(done(files.copy_file(held.request(copy)).await.map(drop)), expected);
        let make =
            v1::MakeDirectoryRequest { path: "a/b".into(), parents: true, ..Default::default() };
        assert_eq!(done(files.make_directory(held.request(make)).await.map(drop)), expected);
        // A tree is gone for its session at once. What the call does not remove is left to upkeep.
        let remove =
            v1::RemoveFileRequest { path: "tree".into(), recursive: true, ..Default::default() };
        assert_eq!(done(files.remove_file(held.request(remove)).await.map(drop)), Ok(()));
        assert!(!directory.join("tree").exists());
        let trash = directory.ancestors().nth(3).unwrap().join("trash");
        assert_eq!(std::fs::read_dir(trash).unwrap().count(), usize::from(expected.is_err()));
        fixture.end().await;
    }
}

#[tokio::test]
async fn list_continues_after_its_page() {
    let fixture = Fixture::new(Settings::default()).await;
    let session = fixture.held_session().await;
    let held = held(&fixture, session, 1);
    for name in ["a", "b", "c"] {
        std::fs::write(fixture.directory(session).join(name), "").unwrap();
    }
    let mut request = v1::ListFilesRequest { page_size: 2, depth: 1, ..Default::default() };
    let mut pages = Vec::new();
    loop {
        let response = fixture.files.clone().list_files(held.request(request.clone())).await;
        let v1::ListFilesResponse { files, next_page_token } = response.unwrap().into_inner();
        pages.push(files.into_iter().map(|file| file.path).collect::<Vec<_>>());
        if next_page_token.is_empty() {
            break;
        }
        request.page_token = next_page_token;
    }
    assert_eq!(pages, [vec!["a", "b"], vec!["c"]]);
    request.page_token = "x".to_owned();
    let refused = fixture.files.clone().list_files(held.request(request)).await.err().unwrap();
    assert_eq!(reason(&refused), Reason::InvalidField);
    fixture.end().await;
}
