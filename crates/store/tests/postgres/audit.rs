//! The audit: nothing happens without its event, and whatever a superuser does to the rows is
//! found.

use codelia_store::{
    AuditFilter, AuditProblem, AuditReport, EventBody, EventKind, EventSubject, RunAdmission,
    SecretKey, Store,
};
use codelia_types::KeyId;
use serde_json::json;

use crate::harness::Fixture;

/// A fixture whose store signs the audit, and another process of the same installation.
async fn signed() -> (Fixture, Store) {
    let mut fixture = Fixture::new().await;
    let key = SecretKey::parse(&SecretKey::generate().unwrap()).unwrap();
    let other = fixture.database.store().await.unwrap().with_audit_key(Some(&key)).unwrap();
    fixture.store = fixture.store.with_audit_key(Some(&key)).unwrap();
    (fixture, other)
}

async fn verify(store: &Store) -> AuditReport {
    store.audit_verify(|_| {}).await.unwrap().unwrap()
}

/// Appends events and covers them by one checkpoint.
async fn append(store: &Store, count: usize) {
    for number in 0..count {
        let body = EventBody {
            kind: EventKind::KeyRevoked,
            field: None,
            detail: json!({ "number": number }),
        };
        let subject = EventSubject { key: Some(KeyId::generate()), ..EventSubject::default() };
        store.audit_insert(&subject, &body).await.unwrap();
    }
    store.audit_checkpoint().await.unwrap();
}

async fn kinds(fixture: &Fixture, filter: &AuditFilter) -> Vec<String> {
    let events = fixture.store.audit_list(Some(&fixture.tenant), filter, 100).await.unwrap();
    events.into_iter().map(|event| event.kind).collect()
}

#[tokio::test]
async fn runs_and_sessions_have_events() {
    let (fixture, other) = signed().await;
    let (worker, session) = (fixture.worker("w").await, fixture.session().await);
    let lease = fixture.lease(&session, &worker).await.unwrap();
    let run = fixture.insert(session.id, 0).await;
    fixture.commit(run, &worker, &lease).await.unwrap();
    let all = AuditFilter::default();
    assert_eq!(kinds(&fixture, &all).await, ["RUN_ENDED", "RUN_ADMITTED", "SESSION_CREATED"]);
    let of_session = AuditFilter { session: Some(session.id), ..AuditFilter::default() };
    assert_eq!(kinds(&fixture, &of_session).await.len(), 3);
    let ended = AuditFilter { kind: Some(EventKind::RunEnded), ..of_session };
    let events = fixture.store.audit_list(Some(&fixture.tenant), &ended, 10).await.unwrap();
    assert_eq!(events[0].subject.run, Some(run));
    assert!(events[0].detail.contains(r#""exit_code":0"#), "{}", events[0].detail);
    let others = fixture.store.audit_list(Some(&fixture.other), &all, 10).await.unwrap();
    assert!(others.is_empty(), "another tenant sees nothing");

    // What is refused has no event of an admission.
    let refused = fixture.insert_try(
        session.id,
        0,
        None,
        codelia_store::Quotas { concurrent_runs: 0, ..fixture.quotas },
    );
    assert!(matches!(refused.await, RunAdmission::OverQuota(_)));
    assert_eq!(kinds(&fixture, &all).await.len(), 3);

    let before = verify(&fixture.store).await;
    assert_eq!((before.events, before.unlisted, before.problem_count), (3, 3, 0), "{before:?}");
    fixture.store.audit_checkpoint().await.unwrap();
    let report = verify(&other).await;
    assert_eq!((report.events, report.unlisted, report.problem_count), (3, 0, 0), "{report:?}");
    other.close().await;
    fixture.end().await;
}

#[tokio::test]
async fn nothing_is_done_that_cannot_be_audited() {
    let (fixture, other) = signed().await;
    let session = fixture.session().await;
    fixture
        .database
        .execute("ALTER TABLE audit ADD CONSTRAINT full_disk CHECK (false) NOT VALID")
        .await
        .unwrap();
    let refused = fixture.store.run_insert(fixture.new_run(session.id), fixture.quotas).await;
    assert!(refused.is_err(), "{refused:?}");
    assert_eq!(fixture.scalar("SELECT count(*) FROM live_runs").await, 0);
    let suspended = fixture.store.tenant_suspend(&fixture.tenant, "test", KeyId::generate()).await;
    assert!(suspended.is_err());
    assert_eq!(
        fixture.scalar("SELECT count(*) FROM tenants WHERE suspended_at IS NOT NULL").await,
        0
    );
    // Control: with the audit, the same calls succeed.
    fixture.database.execute("ALTER TABLE audit DROP CONSTRAINT full_disk").await.unwrap();
    fixture.insert(session.id, 0).await;
    fixture.store.tenant_suspend(&fixture.tenant, "test", KeyId::generate()).await.unwrap();
    other.close().await;
    fixture.end().await;
}

#[tokio::test]
async fn owner_cannot_change_events_by_accident() {
    let (fixture, other) = signed().await;
    append(&fixture.store, 2).await;
    for statement in [
        "UPDATE audit SET detail = '{}'",
        "DELETE FROM audit",
        "TRUNCATE audit",
        "UPDATE audit_checkpoints SET at = now()",
        "DELETE FROM audit_checkpoints",
        "TRUNCATE audit_checkpoints",
    ] {
        let error = fixture.database.execute(statement).await.unwrap_err();
        assert!(format!("{error:#}").contains("never changed"), "{statement}: {error:#}");
    }
    assert_eq!(verify(&other).await.problem_count, 0);
    other.close().await;
    fixture.end().await;
}

/// Tampers as a superuser would, and returns what a verification finds.
async fn tampered(statements: &str) -> AuditReport {
    let (fixture, other) = signed().await;
    for _ in 0..3 {
        append(&fixture.store, 3).await;
        append(&other, 2).await;
    }
    // Sees the last checkpoint of the first.
    append(&other, 1).await;
    let before = verify(&other).await;
    assert_eq!((before.writers, before.checkpoints, before.events), (2, 7, 16), "{before:?}");
    assert_eq!(before.problem_count, 0, "control: {before:?}");
    let statements = format!(
        "SET session_replication_role = replica;
         CREATE TEMP VIEW first AS SELECT writer FROM audit_checkpoints GROUP BY writer ORDER BY count(*) LIMIT 1;
         CREATE TEMP VIEW chosen AS SELECT writer, id FROM audit WHERE writer = (SELECT writer FROM first) ORDER BY id;
         {statements};
         RESET session_replication_role"
    );
    fixture.database.execute(&statements).await.unwrap();
    let report = verify(&other).await;
    other.close().await;
    fixture.end().await;
    report
}

#[tokio::test]
async fn changed_event_is_found() {
    for column in [
        "detail = '{}'",
        "kind = 'RUN_ENDED'",
        "key_id = NULL",
        "tenant_id = 'a'",
        "at = at + interval '1 us'",
    ] {
        let report = tampered(&format!(
            "UPDATE audit SET {column} WHERE id = (SELECT id FROM chosen LIMIT 1)"
        ))
        .await;
        assert!(
            matches!(report.problems[0], AuditProblem::EventChanged { .. }),
            "{column}: {report:?}"
        );
    }
}

#[tokio::test]
async fn removed_event_is_found() {
    let report =
        tampered("DELETE FROM audit WHERE id = (SELECT id FROM chosen OFFSET 4 LIMIT 1)").await;
    assert!(matches!(report.problems[..], [AuditProblem::EventRemoved { .. }]), "{report:?}");
}

#[tokio::test]
async fn reordered_events_are_found() {
    // Two rows change places: each has the other's id.
    let report = tampered(
        "CREATE TEMP TABLE two AS SELECT id, row_number() OVER (ORDER BY id) AS place FROM chosen LIMIT 2;
         CREATE TEMP TABLE moved AS SELECT * FROM audit WHERE id IN (SELECT id FROM two);
         DELETE FROM audit WHERE id IN (SELECT id FROM two);
         UPDATE moved SET id = (SELECT id FROM two WHERE two.id <> moved.id);
         INSERT INTO audit SELECT * FROM moved",
    )
    .await;
    let changed = |problem: &AuditProblem| matches!(problem, AuditProblem::EventChanged { .. });
    assert!(report.problem_count == 2 && report.problems.iter().all(changed), "{report:?}");
    // The list of a checkpoint in another order.
    let report = tampered(
        "UPDATE audit_checkpoints SET entries = ARRAY(SELECT e FROM unnest(entries) WITH ORDINALITY AS u (e, n) ORDER BY n DESC)
         WHERE writer = (SELECT writer FROM first) AND number = 1",
    )
    .await;
    assert!(
        matches!(report.problems[..], [AuditProblem::CheckpointChanged { number: 1, .. }]),
        "{report:?}"
    );
}

#[tokio::test]
async fn truncated_chain_is_found() {
    let of_first = "WHERE writer = (SELECT writer FROM first)";
    // The last checkpoint with its events. The writer wrote nothing after it; another one saw it.
    let cut = format!(
        "CREATE TEMP TABLE cut AS SELECT unnest(entries) AS id FROM audit_checkpoints {of_first} AND number = 3;
         DELETE FROM audit WHERE id IN (SELECT id FROM cut);
         CREATE TEMP TABLE chosen_writer AS SELECT writer FROM first;
         DELETE FROM audit_checkpoints WHERE writer = (SELECT writer FROM chosen_writer) AND number = 3"
    );
    let report = tampered(&cut).await;
    assert!(
        matches!(report.problems[..], [AuditProblem::ChainTruncated { number: 3, .. }]),
        "{report:?}"
    );
    // One in the middle.
    let report = tampered(&cut.replace("number = 3", "number = 2")).await;
    assert!(
        matches!(report.problems[..], [AuditProblem::ChainBroken { number: 3, .. }]),
        "{report:?}"
    );
    // The beginning.
    let report = tampered(&cut.replace("number = 3", "number = 1")).await;
    assert!(
        matches!(report.problems[..], [AuditProblem::ChainBroken { number: 2, .. }]),
        "{report:?}"
    );
}

#[tokio::test]
async fn forged_event_is_found() {
    let columns = "writer, at, kind, key_id, detail";
    let forge = |mac: &str| {
        format!(
            "INSERT INTO audit ({columns}, id, mac)
             SELECT {columns}, run_id_at(now()), {mac} FROM audit WHERE id = (SELECT id FROM chosen LIMIT 1)"
        )
    };
    let report = tampered(&forge("NULL")).await;
    assert!(matches!(report.problems[..], [AuditProblem::EventUnsigned { .. }]), "{report:?}");
    let report = tampered(&forge("mac")).await;
    assert!(matches!(report.problems[..], [AuditProblem::EventChanged { .. }]), "{report:?}");
}

#[tokio::test]
async fn another_key_does_not_verify() {
    let (fixture, other) = signed().await;
    append(&fixture.store, 1).await;
    let key = SecretKey::parse(&SecretKey::generate().unwrap()).unwrap();
    let stranger = other.with_audit_key(Some(&key)).unwrap();
    let report = verify(&stranger).await;
    assert_eq!(report.problem_count, 2, "event and checkpoint: {report:?}");
    let without = stranger.with_audit_key(None).unwrap();
    assert_eq!(without.audit_verify(|_| {}).await.unwrap(), None);
    without.close().await;
    fixture.end().await;
}

#[tokio::test]
async fn audit_stays_verifiable_after_retention() {
    let (fixture, other) = signed().await;
    append(&fixture.store, 3).await;
    append(&other, 2).await;
    // As if that was a week ago. Their signatures are about today, so the old rows are dropped
    // before anything is checked.
    fixture
        .database
        .execute(
            "SET session_replication_role = replica;
             UPDATE audit_checkpoints SET at = at - interval '7 days';
             CREATE TABLE audit_20200101 (LIKE audit INCLUDING CONSTRAINTS);
             ALTER TABLE audit ATTACH PARTITION audit_20200101
                 FOR VALUES FROM (run_id_at('2020-01-01Z')) TO (run_id_at('2020-01-02Z'));
             DELETE FROM audit; RESET session_replication_role",
        )
        .await
        .unwrap();
    let today = time::OffsetDateTime::now_utc().date();
    let week_ago = today - time::Duration::days(6);
    fixture
        .database
        .execute(&format!(
            "CREATE TABLE audit_{0} (LIKE audit INCLUDING CONSTRAINTS);
             ALTER TABLE audit ATTACH PARTITION audit_{0}
                 FOR VALUES FROM (run_id_at('{1}Z')) TO (run_id_at('{1}Z'::timestamptz + interval '1 day'))",
            week_ago.to_string().replace('-', ""),
            week_ago,
        ))
        .await
        .unwrap();
    fixture.store.audit_drop_before(today - time::Duration::days(2)).await.unwrap();
    assert_eq!(fixture.scalar("SELECT count(*) FROM audit_checkpoints").await, 0);
    // The chains go on after what was dropped.
    append(&fixture.store, 1).await;
    append(&other, 1).await;
    let report = verify(&other).await;
    assert_eq!((report.checkpoints, report.problem_count), (2, 0), "{report:?}");
    // Control: without the event that records the removal, the chains begin too late.
    fixture
        .database
        .execute("SET session_replication_role = replica; DELETE FROM audit WHERE kind = 'AUDIT_EXPIRED'")
        .await
        .unwrap();
    let report = verify(&other).await;
    let broken = report
        .problems
        .iter()
        .filter(|problem| matches!(problem, AuditProblem::ChainBroken { .. }))
        .count();
    assert_eq!(broken, 2, "{report:?}");
    other.close().await;
    fixture.end().await;
}
