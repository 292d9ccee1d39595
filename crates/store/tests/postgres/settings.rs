//! Settings that runs have in common are stored once, and kept for as long as a run refers to them.

use codelia_policy::RunSpec;
use codelia_store::{NewRun, Retention, Run, RunAdmission, RunFilter, SessionRef, Store, Upkeep};
use codelia_tests::{eventually, store_values::logical_run};
use codelia_types::{CommandSpec, RunId, SessionId, TenantId};
use sqlx::Connection;

use crate::{
    harness::{Fixture, exited},
    upkeep::rows_read,
};

/// A spec with a command of its own and settings that `pids` makes different.
fn spec(argument: &str, pids: u64) -> RunSpec {
    let mut spec = RunSpec { command: CommandSpec::new(["echo", argument]), ..logical_run() };
    spec.limits.pids = pids;
    spec.policy.process.max_processes = Some(5);
    spec
}

async fn insert(store: &Store, fixture: &Fixture, session: SessionId, spec: &RunSpec) -> Run {
    let new = NewRun { spec, ..fixture.new_run(session) };
    match store.run_insert(new, fixture.quotas).await.unwrap() {
        RunAdmission::Recorded { run, .. } => *run,
        other => panic!("{other:?}"),
    }
}

/// Rows of settings, and runs that refer to one.
async fn stored(fixture: &Fixture) -> (i64, i64) {
    let rows = fixture.scalar("SELECT count(*) FROM run_settings").await;
    let refer = "SELECT (SELECT count(settings_hash) FROM live_runs) + (SELECT count(settings_hash) FROM ended_runs)";
    (rows, fixture.scalar(refer).await)
}

/// Checks that a run and its summary have this spec.
async fn assert_spec(fixture: &Fixture, id: RunId, spec: &RunSpec) {
    assert_eq!(fixture.run(id).await.spec, *spec);
    let listed = fixture.store.run_list(&fixture.tenant, &RunFilter::default(), 99).await.unwrap();
    let summary = &listed.iter().find(|run| run.id == id).unwrap().spec;
    assert_eq!((summary.mode, &summary.limits), (spec.mode, &spec.limits));
    assert!(spec.command.argv[1].starts_with(summary.argv[1].as_str()), "{summary:?}");
    assert_eq!(summary.argv_truncated, summary.argv != spec.command.argv);
    let view = format!("SELECT (spec #>> '{{limits,pids}}')::bigint FROM runs WHERE id = '{id}'");
    assert_eq!(fixture.scalar(&view).await, i64::try_from(spec.limits.pids).unwrap());
}

#[tokio::test]
async fn equal_settings_are_stored_once() {
    let fixture = Fixture::new().await;
    let (session, worker) = (fixture.session().await, fixture.worker("w").await);
    let long = "x".repeat(5000);
    let specs = ["a", "b", &long, "d"].map(|argument| spec(argument, 9));
    let mut runs = Vec::new();
    for spec in &specs {
        runs.push(insert(&fixture.store, &fixture, session.id, spec).await.id);
    }
    assert_eq!(stored(&fixture).await, (1, 3), "the first run has them in its own row");
    let lease = fixture.lease(&session, &worker).await.unwrap();
    for (id, spec) in runs.iter().zip(&specs) {
        assert_spec(&fixture, *id, spec).await;
        let begun = fixture.store.run_begin(*id, &lease.token).await.unwrap().unwrap();
        assert_eq!(begun.spec, *spec);
        assert_spec(&fixture, *id, spec).await;
    }
    for assigned in fixture.assigned(&worker).await {
        let number = runs.iter().position(|id| *id == assigned.id).unwrap();
        assert_eq!(assigned.spec, specs[number]);
    }
    for (id, spec) in runs.iter().zip(&specs) {
        fixture
            .store
            .run_commit(fixture.names(*id, &lease), &lease.token, &exited(0))
            .await
            .unwrap();
        assert_spec(&fixture, *id, spec).await;
    }
    assert_eq!(stored(&fixture).await, (1, 3));
    fixture.end().await;
}

#[tokio::test]
async fn runs_end_with_their_settings() {
    let fixture = Fixture::new().await;
    let (session, worker) = (fixture.session().await, fixture.worker("w").await);
    let spec = spec("a", 9);
    let mut runs = Vec::new();
    for _ in 0..6 {
        runs.push(insert(&fixture.store, &fixture, session.id, &spec).await.id);
    }
    // Each way to end a run without a result: cancel, abandon, queue timeout, lost worker,
    // suspended tenant, close.
    let lease = fixture.lease(&session, &worker).await.unwrap();
    fixture.store.run_cancel(&fixture.tenant, runs[0], &Default::default()).await.unwrap();
    fixture.store.run_begin(runs[1], &lease.token).await.unwrap().unwrap();
    fixture.store.run_abandon(fixture.run_ref(runs[1], session.id), &lease.token).await.unwrap();
    fixture
        .execute(&format!("UPDATE live_runs SET queued_until = now() WHERE id = '{}'", runs[2]))
        .await;
    assert_eq!(fixture.store.run_expire_queued_any_tenant(9).await.unwrap(), 1);
    fixture.store.run_begin(runs[3], &lease.token).await.unwrap().unwrap();
    fixture.expire_worker(&worker).await;
    assert_eq!(fixture.store.lease_sweep_any_tenant(9).await.unwrap().lost, 1);
    fixture.execute("UPDATE tenants SET suspended_at = now(), suspend_reason = 'x'").await;
    fixture.store.tenant_sweep_any_tenant(1).await.unwrap();
    fixture.store.session_close(&fixture.tenant, &SessionRef::Id(session.id)).await.unwrap();
    assert_eq!(fixture.scalar("SELECT count(*) FROM live_runs").await, 0);
    assert_eq!(stored(&fixture).await, (1, 5));
    for id in runs {
        assert_spec(&fixture, id, &spec).await;
    }
    fixture.end().await;
}

#[tokio::test]
async fn settings_used_once_add_no_row() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    for pids in 1..=20 {
        let spec = spec("a", pids);
        let run = insert(&fixture.store, &fixture, session.id, &spec).await;
        assert_spec(&fixture, run.id, &spec).await;
    }
    assert_eq!(stored(&fixture).await, (0, 0));
    fixture.end().await;
}

#[tokio::test]
async fn other_content_under_same_hash_is_not_used() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let spec = spec("a", 9);
    for _ in 0..2 {
        insert(&fixture.store, &fixture, session.id, &spec).await;
    }
    assert_eq!(stored(&fixture).await, (1, 1));
    // What a collision would look like, to a process that has not seen the settings yet.
    fixture
        .execute("UPDATE run_settings SET settings = jsonb_set(settings, '{limits,pids}', '7777')")
        .await;
    let store = fixture.database.store().await.unwrap();
    for _ in 0..3 {
        let run = insert(&store, &fixture, session.id, &spec).await;
        assert_spec(&fixture, run.id, &spec).await;
    }
    assert_eq!(stored(&fixture).await, (1, 1));
    store.close().await;
    fixture.end().await;
}

#[tokio::test]
async fn tenants_with_equal_settings_see_only_their_runs() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let spec = spec("a", 9);
    let mut last = None;
    for _ in 0..2 {
        last = Some(insert(&fixture.store, &fixture, session.id, &spec).await.id);
    }
    let found = async |tenant: &TenantId| {
        fixture.store.run_get(tenant, last.unwrap()).await.unwrap().is_some()
    };
    assert!(found(&fixture.tenant).await);
    assert!(!found(&fixture.other).await);
    fixture.end().await;
}

#[tokio::test]
async fn insert_notices_missing_and_old_settings() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let spec = spec("a", 9);
    let changes = [
        "DELETE FROM run_settings",
        // As after a restored backup: they could be deleted at any moment.
        "UPDATE run_settings SET used_day = used_day - 5",
    ];
    for change in changes {
        for _ in 0..3 {
            insert(&fixture.store, &fixture, session.id, &spec).await;
        }
        let (_, before) = stored(&fixture).await;
        fixture.execute(change).await;
        let key = Some((change, &b"hash"[..]));
        let new = || NewRun { spec: &spec, idempotency: key, ..fixture.new_run(session.id) };
        let admission = fixture.store.run_insert(new(), fixture.quotas).await.unwrap();
        assert!(matches!(admission, RunAdmission::Recorded { .. }), "{admission:?}");
        assert_eq!(stored(&fixture).await.1, before, "the run has them in its own row");
        let again = fixture.store.run_insert(new(), fixture.quotas).await.unwrap();
        assert!(matches!(&again, RunAdmission::Existing(run) if run.spec == spec), "{again:?}");
        // The next run stores them again, for all that refer to them.
        insert(&fixture.store, &fixture, session.id, &spec).await;
        let fresh =
            "SELECT count(*) FROM run_settings WHERE used_day >= (now() AT TIME ZONE 'UTC')::date";
        assert_eq!(fixture.scalar(fresh).await, 1);
        let refer = "SELECT count(*) FROM runs WHERE spec ->> 'mode' IS NULL";
        assert_eq!(fixture.scalar(refer).await, 0, "{change}");
    }
    fixture.end().await;
}

#[tokio::test]
async fn insert_stores_settings_that_are_being_purged() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let spec = spec("a", 9);
    for _ in 0..2 {
        insert(&fixture.store, &fixture, session.id, &spec).await;
    }
    fixture.execute("DELETE FROM live_runs WHERE settings_hash IS NOT NULL").await;
    let store = fixture.database.store().await.unwrap();
    insert(&store, &fixture, session.id, &spec).await;
    let mut purge = fixture.database.connection().await.unwrap();
    sqlx::raw_sql("BEGIN; DELETE FROM run_settings").execute(&mut purge).await.unwrap();
    let (run, ()) = tokio::join!(insert(&store, &fixture, session.id, &spec), async {
        eventually("the insert waits", || async {
            let waiting = "SELECT count(*) FROM pg_stat_activity
                           WHERE datname = current_database() AND wait_event_type = 'Lock'";
            (fixture.database.number(waiting).await.ok()? > 0).then_some(())
        })
        .await;
        sqlx::raw_sql("COMMIT").execute(&mut purge).await.unwrap();
    });
    assert_eq!(stored(&fixture).await, (1, 1));
    assert_spec(&fixture, run.id, &spec).await;
    purge.close().await.unwrap();
    store.close().await;
    fixture.end().await;
}

#[tokio::test]
async fn settings_outlive_runs_that_refer_to_them() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    for pids in [1, 1, 2, 2, 3, 3, 4, 4] {
        insert(&fixture.store, &fixture, session.id, &spec("a", pids)).await;
    }
    let today = "(now() AT TIME ZONE 'UTC')::date";
    fixture.execute(&format!("UPDATE run_settings SET used_day = {today} - 3; DELETE FROM live_runs WHERE settings_hash IS NULL")).await;
    let purge = async || fixture.store.settings_purge_any_tenant(100).await.unwrap();
    // A live run and one without a partition, both from before every partition, a run that is gone,
    // and settings that may be in use.
    fixture
        .execute(&format!(
            "CREATE TEMP TABLE pids AS SELECT hash, settings #>> '{{limits,pids}}' AS pids FROM run_settings;
             UPDATE live_runs r SET id = uuid '00000000-0000-7000-8000-000000000001'
             FROM pids WHERE hash = r.settings_hash AND pids = '1';
             INSERT INTO ended_runs (id, tenant_id, session_id, spec, settings_hash, labels, attempt, created_at, ended_at, result)
             SELECT uuid '00000000-0000-7000-8000-000000000002', tenant_id, session_id, spec, settings_hash, labels, attempt, created_at, now(), '{{\"outcome\": {{\"kind\": \"canceled\"}}}}'
             FROM live_runs JOIN pids ON hash = settings_hash WHERE pids = '2';
             DELETE FROM live_runs r USING pids WHERE hash = r.settings_hash AND pids IN ('2', '3');
             UPDATE run_settings s SET used_day = {today} - 2 FROM pids WHERE pids.hash = s.hash AND pids = '4'"
        ))
        .await;
    assert_eq!(fixture.scalar("SELECT count(*) FROM ended_runs_default").await, 1);
    assert_eq!(purge().await, 1);
    assert_eq!(
        fixture
            .scalar("SELECT count(*) FROM run_settings WHERE settings #>> '{limits,pids}' = '3'")
            .await,
        0
    );
    fixture.execute("DELETE FROM live_runs; DELETE FROM ended_runs_default").await;
    let upkeep = Upkeep::new(fixture.store.clone(), Retention::default()).pass().await.unwrap();
    assert!(upkeep.0.is_owner);
    assert_eq!(stored(&fixture).await, (1, 0), "upkeep deleted the others");
    fixture.end().await;
}

#[tokio::test]
async fn settings_purge_reads_what_it_deletes() {
    let fixture = Fixture::new().await;
    fixture
        .execute(
            "INSERT INTO run_settings SELECT sha256(n::text::bytea), '{}', (now() AT TIME ZONE 'UTC')::date - n % 100
             FROM generate_series(1, 50000) AS n",
        )
        .await;
    let read = rows_read(&fixture, async |store| {
        assert_eq!(store.settings_purge_any_tenant(500).await.unwrap(), 500);
    });
    let read = read.await;
    assert!(read < 5000, "{read} rows");
    fixture.end().await;
}
