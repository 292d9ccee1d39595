//! What the files of sessions use: reports add up, are fenced, and go with the sessions.

use codelia_policy::DiskLimits;
use codelia_store::{
    DiskReport, DiskReported, DiskSpace, EventKind, Lease, QuotasChange, Session, SessionRef,
    TenantDisk,
};
use codelia_tests::recorded_events;
use codelia_types::{DiskMechanism, DiskUsage};
use futures::future::join_all;
use uuid::Uuid;

use crate::harness::{Fixture, LONG, ROOT, Registered};

const MIB: u64 = 1024 * 1024;
const LIMITS: DiskLimits = DiskLimits { bytes: 100 * MIB, inodes: 1000 };

fn report(lease: &Lease, bytes: u64, inodes: u64) -> DiskReport {
    DiskReport {
        session: lease.session,
        epoch: lease.token.epoch,
        mechanism: DiskMechanism::Scan,
        usage: DiskUsage { bytes, inodes },
        limits: LIMITS,
    }
}

async fn send(fixture: &Fixture, worker: &Registered, reports: &[DiskReport]) -> DiskReported {
    fixture.store.session_disk_report(&worker.id, worker.incarnation, reports, &[]).await.unwrap()
}

async fn used(fixture: &Fixture) -> i64 {
    fixture.store.tenant_usage(&fixture.tenant).await.unwrap().disk_bytes
}

async fn leased(fixture: &Fixture, worker: &Registered) -> (Session, Lease) {
    let session = fixture.session().await;
    let lease = fixture.lease(&session, worker).await.unwrap();
    (session, lease)
}

async fn remove(fixture: &Fixture, session: &Session) {
    let named = SessionRef::Id(session.id);
    fixture.store.session_close(&fixture.tenant, &named).await.unwrap();
    fixture.store.session_mark_removed(&[session.id], ROOT).await.unwrap();
}

/// Kind, field and percent of the events about limits, oldest first.
async fn crossings(fixture: &Fixture) -> Vec<(EventKind, String, i64)> {
    let events = recorded_events(&fixture.store, &fixture.tenant, None).await.unwrap();
    let limits = events.into_iter().rev().filter_map(|event| {
        let percent = event.body.detail["percent"].as_i64()?;
        Some((event.body.kind, event.body.field.unwrap(), percent))
    });
    limits.collect()
}

#[tokio::test]
async fn reports_add_up_and_return_to_zero() {
    let fixture = Fixture::new().await;
    let worker = fixture.worker("w").await;
    let (first, lease) = leased(&fixture, &worker).await;
    let (second, other) = leased(&fixture, &worker).await;
    assert!(
        fixture
            .store
            .session_get(&fixture.tenant, &SessionRef::Id(first.id))
            .await
            .unwrap()
            .unwrap()
            .disk
            .is_none()
    );

    let stored =
        send(&fixture, &worker, &[report(&lease, 3 * MIB, 7), report(&other, MIB, 1)]).await;
    assert_eq!(stored.sessions.len(), 2);
    let quota = u64::try_from(fixture.quotas.disk_bytes).unwrap();
    assert_eq!(
        stored.tenants,
        [TenantDisk { tenant: fixture.tenant.clone(), used: 4 * MIB, quota }]
    );
    send(&fixture, &worker, &[report(&lease, 2 * MIB, 7)]).await;
    assert_eq!(used(&fixture).await, 3 * 1024 * 1024);
    assert_eq!(fixture.store.tenant_usage(&fixture.other).await.unwrap().disk_bytes, 0);
    assert_eq!(
        fixture.store.tenant_stored_bytes(&fixture.tenant).await.unwrap().disk,
        3 * 1024 * 1024
    );

    let shown = fixture
        .store
        .session_get(&fixture.tenant, &SessionRef::Id(first.id))
        .await
        .unwrap()
        .unwrap();
    let disk = shown.disk.unwrap();
    assert_eq!(
        (disk.usage, disk.mechanism),
        (DiskUsage { bytes: 2 * MIB, inodes: 7 }, DiskMechanism::Scan)
    );
    let listed = fixture.store.session_list(&fixture.tenant, &Default::default(), 9).await.unwrap();
    assert!(listed.iter().all(|session| session.disk.is_some()));

    fixture.store.session_close(&fixture.tenant, &SessionRef::Id(second.id)).await.unwrap();
    assert_eq!(
        used(&fixture).await,
        3 * 1024 * 1024,
        "the files of an ended session are there until removed"
    );
    remove(&fixture, &second).await;
    assert_eq!(used(&fixture).await, 2 * 1024 * 1024);
    remove(&fixture, &first).await;
    assert_eq!(used(&fixture).await, 0);
    // A late report of a removed session.
    assert!(send(&fixture, &worker, &[report(&lease, MIB, 1)]).await.sessions.is_empty());
    assert_eq!(used(&fixture).await, 0);
    fixture.end().await;
}

#[tokio::test]
async fn removal_during_a_report_leaves_nothing() {
    let fixture = Fixture::new().await;
    let worker = fixture.worker("w").await;
    let mut held = Vec::new();
    for _ in 0..40 {
        held.push(leased(&fixture, &worker).await);
    }
    join_all(held.iter().map(|(session, lease)| async {
        let report = [report(lease, MIB, 1)];
        tokio::join!(send(&fixture, &worker, &report), remove(&fixture, session))
    }))
    .await;
    assert_eq!(used(&fixture).await, 0);
    fixture.end().await;
}

#[tokio::test]
async fn fenced_worker_cannot_report() {
    let fixture = Fixture::new().await;
    let (first, second) = (fixture.worker("first").await, fixture.worker("second").await);
    let (session, old) = leased(&fixture, &first).await;
    fixture.expire_worker(&first).await;
    let new = fixture.lease(&session, &second).await.unwrap();
    assert!(send(&fixture, &first, &[report(&old, MIB, 1)]).await.sessions.is_empty());
    // The right worker, under an epoch that is over.
    assert!(send(&fixture, &second, &[report(&old, MIB, 1)]).await.sessions.is_empty());
    assert_eq!(used(&fixture).await, 0);
    assert_eq!(send(&fixture, &second, &[report(&new, MIB, 1)]).await.sessions, [session.id]);
    assert_eq!(used(&fixture).await, 1024 * 1024);
    fixture.end().await;
}

#[tokio::test]
async fn orphaned_rows_are_forgotten() {
    let fixture = Fixture::new().await;
    let worker = fixture.worker("w").await;
    let (session, lease) = leased(&fixture, &worker).await;
    send(&fixture, &worker, &[report(&lease, MIB, 1)]).await;
    fixture.store.session_disk_forget(Uuid::from_u128(9), &[session.id]).await.unwrap();
    assert_eq!(used(&fixture).await, 1024 * 1024, "its files are on another root");
    fixture.store.session_disk_forget(ROOT, &[session.id]).await.unwrap();
    assert_eq!(used(&fixture).await, 0);
    fixture.end().await;
}

#[tokio::test]
async fn events_are_recorded_once_for_each_crossing() {
    let fixture = Fixture::new().await;
    let worker = fixture.worker("w").await;
    let (_session, lease) = leased(&fixture, &worker).await;
    for (bytes, crossed) in
        [(79, 0), (80, 1), (81, 0), (78, 0), (85, 0), (100, 1), (99, 0), (120, 0)]
    {
        let stored = send(&fixture, &worker, &[report(&lease, bytes * MIB, 1)]).await;
        assert_eq!(stored.crossings, crossed, "{bytes}");
    }
    // Far below, and from there to the limit in one step.
    send(&fixture, &worker, &[report(&lease, MIB, 1)]).await;
    assert_eq!(send(&fixture, &worker, &[report(&lease, 100 * MIB, 850)]).await.crossings, 3);
    let (near, reached) = (EventKind::LimitNear, EventKind::LimitReached);
    let bytes = || "limits.disk_bytes".to_owned();
    let mut found = crossings(&fixture).await;
    assert_eq!(
        found.drain(..2).collect::<Vec<_>>(),
        [(near, bytes(), 80), (reached, bytes(), 100)]
    );
    found.sort_by_key(|(_, field, percent)| (field.clone(), *percent));
    assert_eq!(
        found,
        [(near, bytes(), 80), (reached, bytes(), 100), (near, "limits.inodes".to_owned(), 80)]
    );
    fixture.end().await;
}

#[tokio::test]
async fn tenant_crosses_its_quota_once() {
    let fixture = Fixture::new().await;
    let quota = QuotasChange { disk_bytes: Some(200 * 1024 * 1024), ..QuotasChange::default() };
    fixture.store.tenant_set_quotas(&fixture.tenant, quota).await.unwrap();
    let (first, second) = (fixture.worker("first").await, fixture.worker("second").await);
    let mut held = Vec::new();
    for number in 0..20 {
        let worker = if number % 2 == 0 { &first } else { &second };
        held.push((leased(&fixture, worker).await, worker));
    }
    // 20 sessions at once, each with a twentieth of the quota and a bit more, from two workers.
    let all: Vec<_> =
        held.iter().map(|((_, lease), worker)| (report(lease, 11 * MIB, 1), *worker)).collect();
    join_all(
        all.iter().map(|(report, worker)| send(&fixture, worker, std::slice::from_ref(report))),
    )
    .await;
    let last = send(&fixture, &first, &[report(&held[0].0.1, 12 * MIB, 1)]).await;
    assert!(last.tenants[0].is_full(), "{last:?}");
    let quota = || "quotas.disk_bytes".to_owned();
    let expected = [(EventKind::LimitNear, quota(), 80), (EventKind::LimitReached, quota(), 100)];
    assert_eq!(crossings(&fixture).await, expected);
    for ((session, _), _) in &held {
        remove(&fixture, session).await;
    }
    assert_eq!(used(&fixture).await, 0);
    fixture.end().await;
}

#[tokio::test]
async fn worker_without_space_gets_no_new_sessions() {
    let fixture = Fixture::new().await;
    let worker = fixture.worker("w").await;
    let (held, _) = leased(&fixture, &worker).await;
    let space = |is_short| DiskSpace { free: 1, reserve: 2, is_short };
    fixture.store.worker_report_disk(&worker.id, worker.incarnation, space(true)).await.unwrap();
    let new = fixture.session().await;
    assert!(fixture.lease(&new, &worker).await.is_none());
    let first =
        fixture.store.lease_acquire_first(new.id, &worker.id, worker.incarnation).await.unwrap();
    assert!(first.is_none());
    let mode = new.spec.mode;
    assert!(fixture.store.worker_candidates(new.id, mode).await.unwrap().is_empty());
    assert_eq!(
        fixture.store.worker_candidates(held.id, mode).await.unwrap().len(),
        1,
        "its files are here"
    );
    let other = fixture.worker_on("other", Uuid::from_u128(2), LONG).await;
    let candidates = fixture.store.worker_candidates(new.id, mode).await.unwrap();
    assert!(candidates.iter().map(|found| &found.id).eq([&other.id]));
    let shown = fixture.store.worker_list(None, 9).await.unwrap();
    assert_eq!(shown.iter().find(|found| found.id == worker.id).unwrap().disk, Some(space(true)));
    fixture.store.worker_report_disk(&worker.id, worker.incarnation, space(false)).await.unwrap();
    assert!(fixture.lease(&new, &worker).await.is_some());
    fixture.end().await;
}
