//! Output: in order, from any position, and never from a stale holder.

use codelia_store::{Error, OutputChunk, OutputStream};

use crate::harness::{World, exited};

fn chunk(position: i64, stream: OutputStream, offset: i64, data: &[u8]) -> OutputChunk {
    OutputChunk { position, stream, offset, data: data.to_vec() }
}

#[tokio::test]
async fn output_is_read_from_any_position_in_order() {
    let world = World::new().await;
    let session = world.session().await;
    let worker = world.worker("w").await;
    let lease = world.lease(&session, &worker).await.unwrap();
    let run = world.insert(session.id, 0).await;
    let flushed =
        [chunk(0, OutputStream::Stdout, 0, b"hello "), chunk(6, OutputStream::Stderr, 0, b"oops\0")];
    world.store.output_append(run, &lease.token, &flushed).await.unwrap();
    let tail = vec![chunk(11, OutputStream::Stdout, 6, b"world")];
    let mut committed = codelia_store::RunCommit { tail, ..exited(0) };
    committed.result.output_bytes = 16;
    world.store.run_commit(run, &lease.token, &committed).await.unwrap();

    let read =
        async |position, most| world.store.output_read(&world.tenant, run, position, most).await.unwrap();
    assert_eq!(read(0, 1 << 20).await.iter().map(|c| c.position).collect::<Vec<_>>(), [0, 6, 11]);
    assert_eq!(read(8, 1 << 20).await[0], chunk(8, OutputStream::Stderr, 2, b"ps\0"));
    assert_eq!(read(0, 1).await.len(), 1, "at least one chunk");
    assert!(read(16, 1 << 20).await.is_empty());
    assert_eq!(world.store.tenant_usage(&world.tenant).await.unwrap().output_bytes, 16);
    world.end().await;
}

#[tokio::test]
async fn a_stale_holder_stores_no_output() {
    let world = World::new().await;
    let session = world.session().await;
    let worker = world.worker("w").await;
    let lease = world.lease(&session, &worker).await.unwrap();
    let run = world.insert(session.id, 1).await;
    let append = |position| {
        let chunks = [chunk(position, OutputStream::Stdout, position, b"x")];
        let (world, token) = (&world, &lease.token);
        async move { world.store.output_append(run, token, &chunks).await }
    };
    append(0).await.unwrap();
    append(0).await.unwrap();
    world.worker_dies(&worker).await;
    assert!(matches!(append(1).await, Err(Error::Fenced)));
    world.store.lease_sweep_any_tenant(9).await.unwrap();
    assert!(
        world.store.output_read(&world.tenant, run, 0, 9).await.unwrap().is_empty(),
        "the next attempt starts anew"
    );
    world.end().await;
}
