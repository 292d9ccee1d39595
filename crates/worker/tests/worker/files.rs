//! File calls need the lease: before they begin, and before anything appears.

use codelia_proto::{
    internal::v1::{
        CallFileRequest, CloseSessionRequest, FileRefusal, FileRefusalReason as Reason, HeldSession,
        OpenedFile, ReadFileRequest, WriteFileRequest, call_file_request::Call, write_file_request::Kind,
    },
    v1,
};
use codelia_tests::{eventually, within};
use codelia_types::SessionId;
use prost::Message;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use crate::world::{Shape, World};

fn held(world: &World, session: SessionId, lease_epoch: i64) -> Option<HeldSession> {
    let (session_id, tenant_id) = (session.to_string(), world.tenant.to_string());
    Some(HeldSession { session_id, tenant_id, lease_epoch })
}

fn reason(status: &Status) -> Reason {
    FileRefusal::decode(status.details()).unwrap().reason()
}

async fn stat(world: &World, session: SessionId, epoch: i64) -> Result<(), Reason> {
    let root = v1::StatFileRequest { path: String::new(), ..Default::default() };
    let request = CallFileRequest { session: held(world, session, epoch), call: Some(Call::StatFile(root)) };
    world.files.clone().call_file(request).await.map(drop).map_err(|status| reason(&status))
}

#[tokio::test]
async fn a_call_under_another_lease_is_refused() {
    let world = World::new(Shape::default()).await;
    let session = world.held_session().await;
    assert_eq!(stat(&world, session, 1).await, Ok(()));
    for epoch in [0, 2, -1] {
        assert_eq!(stat(&world, session, epoch).await, Err(Reason::NotHeld), "epoch {epoch}");
    }
    assert_eq!(stat(&world, SessionId::generate(), 1).await, Err(Reason::NotHeld));
    let read = ReadFileRequest { session: held(&world, session, 2), request: Some(Default::default()) };
    let refused = world.files.clone().read_file(read).await.err().unwrap();
    assert_eq!(reason(&refused), Reason::NotHeld);
    world.end().await;
}

#[tokio::test]
async fn a_file_whose_session_is_given_up_meanwhile_does_not_appear() {
    let world = World::new(Shape::default()).await;
    let session = world.held_session().await;
    let (pieces, messages) = mpsc::channel(4);
    let send = |kind| pieces.try_send(WriteFileRequest { kind: Some(kind) }).unwrap();
    let open = v1::WriteFileOpen { path: "file".into(), ..Default::default() };
    send(Kind::Open(OpenedFile { session: held(&world, session, 1), open: Some(open) }));
    send(Kind::Data("text".into()));
    let mut files = world.files.clone();
    let call = codelia_telemetry::task::background("write", async move {
        files.write_file(ReceiverStream::new(messages)).await.map(drop)
    });
    // It is begun: the worker writes a file that has no name.
    let begun = || async {
        let mut open = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        let directory = world.directory(session).display().to_string();
        let is_unnamed = |target: std::path::PathBuf| {
            let target = target.display().to_string();
            target.starts_with(&directory) && target.ends_with("(deleted)")
        };
        open.any(|fd| std::fs::read_link(fd.path()).is_ok_and(is_unnamed)).then_some(())
    };
    eventually("the file is begun", begun).await;
    let close = CloseSessionRequest { session_id: session.to_string() };
    world.caller.clone().close_session(close).await.unwrap();
    send(Kind::Finish(v1::WriteFileFinish {}));
    let refused = within("an answer", call).await.unwrap().unwrap_err();
    assert_eq!(reason(&refused), Reason::NotHeld);
    assert!(!world.directory(session).join("file").exists());
    world.end().await;
}
