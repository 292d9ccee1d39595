//! Output: in order, from any position, never from a stale holder.

use codelia_store::{Error, OutputChunk, OutputStream};

use crate::harness::{Fixture, exited};

fn chunk(position: i64, stream: OutputStream, offset: i64, data: &[u8]) -> OutputChunk {
    OutputChunk { position, stream, offset, data: data.to_vec() }
}

#[tokio::test]
async fn output_reads_from_any_position() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let worker = fixture.worker("w").await;
    let lease = fixture.lease(&session, &worker).await.unwrap();
    let run = fixture.insert(session.id, 0).await;
    let flushed = [
        chunk(0, OutputStream::Stdout, 0, b"hello "),
        chunk(6, OutputStream::Stderr, 0, b"oops\0"),
    ];
    fixture.store.output_append(run, &lease.token, &flushed).await.unwrap();
    let tail = vec![chunk(11, OutputStream::Stdout, 6, b"world")];
    let mut commit = codelia_store::RunCommit { tail, ..exited(0) };
    commit.result.output_bytes = 16;
    commit.result.output_total = Some(16);
    fixture.store.run_commit(fixture.names(run, &lease), &lease.token, &commit).await.unwrap();

    let read = async |position, max| {
        fixture.store.output_read(&fixture.tenant, run, position, max).await.unwrap()
    };
    assert_eq!(read(0, 1 << 20).await.iter().map(|c| c.position).collect::<Vec<_>>(), [0, 6, 11]);
    assert_eq!(read(8, 1 << 20).await[0], chunk(8, OutputStream::Stderr, 2, b"ps\0"));
    assert_eq!(read(0, 1).await.len(), 1, "at least one chunk");
    assert!(read(16, 1 << 20).await.is_empty());
    fixture.store.output_fold_any_tenant(10).await.unwrap();
    assert_eq!(fixture.store.tenant_usage(&fixture.tenant).await.unwrap().output_bytes, 16);
    fixture.end().await;
}

#[tokio::test]
async fn stale_holder_cannot_append_output() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let worker = fixture.worker("w").await;
    let lease = fixture.lease(&session, &worker).await.unwrap();
    let run = fixture.insert(session.id, 1).await;
    let append = |position| {
        let chunks = [chunk(position, OutputStream::Stdout, position, b"x")];
        let (fixture, token) = (&fixture, &lease.token);
        async move { fixture.store.output_append(run, token, &chunks).await }
    };
    append(0).await.unwrap();
    append(0).await.unwrap();
    fixture.expire_worker(&worker).await;
    assert!(matches!(append(1).await, Err(Error::Fenced)));
    fixture.store.lease_sweep_any_tenant(9).await.unwrap();
    assert!(
        fixture.store.output_read(&fixture.tenant, run, 0, 9).await.unwrap().is_empty(),
        "a retried run has no old output"
    );
    fixture.end().await;
}
