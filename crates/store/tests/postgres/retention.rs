//! Old rows are deleted, and only those, in bounded transactions.

use std::time::{Duration, Instant};

use codelia_store::{EventKind, Retention, SessionRef, TenantRetention, Upkeep};
use codelia_tests::recorded_events;
use codelia_types::{KeyId, TenantId};
use sqlx::Connection;

use crate::harness::Fixture;

const HOUR: Duration = Duration::from_secs(3600);

/// A statement that inserts a run with output, a label and an idempotency key.
fn ended_run(tenant: &str, began: &str, ended: &str) -> String {
    format!(
        "WITH run AS (
             INSERT INTO ended_runs (id, tenant_id, session_id, spec, labels, attempt, created_at, ended_at, result, output_bytes)
             SELECT (left(run_id_at(now() - interval '{began}')::text, 14) || right(gen_random_uuid()::text, 22))::uuid,
                    '{tenant}', gen_random_uuid(), '{{}}', '{{\"l\": \"x\"}}', 1, now() - interval '{began}',
                    now() - interval '{ended}', '{{\"outcome\": {{\"kind\": \"canceled\"}}}}', 100
             RETURNING id, tenant_id, session_id
         ),
         output AS (INSERT INTO run_output SELECT id, 0, 1, 0, repeat('x', 100)::bytea FROM run),
         label AS (INSERT INTO run_labels SELECT unnest(label_tokens(tenant_id, '{{\"l\": \"x\"}}')), id FROM run),
         count AS (INSERT INTO output_changes (tenant_id, day, bytes) SELECT tenant_id, run_day(id), 100 FROM run)
         INSERT INTO run_keys SELECT session_id, 'key', id, '\\x00' FROM run"
    )
}

impl Fixture {
    /// Rows of runs, output, labels and keys.
    async fn kept(&self) -> [i64; 4] {
        let mut counts = [0; 4];
        for (count, table) in
            counts.iter_mut().zip(["ended_runs", "run_output", "run_labels", "run_keys"])
        {
            *count = self.scalar(&format!("SELECT count(*) FROM {table}")).await;
        }
        counts
    }

    async fn keep(&self, tenant: &TenantId, retention: TenantRetention) {
        self.store
            .tenant_set_retention(tenant, &retention, KeyId::generate())
            .await
            .unwrap()
            .unwrap();
    }
}

#[tokio::test]
async fn runs_are_deleted_after_retention_of_tenant() {
    let fixture = Fixture::new().await;
    fixture
        .keep(
            &fixture.tenant,
            TenantRetention { runs: Some(HOUR), output: Some(HOUR), ..Default::default() },
        )
        .await;
    for (tenant, began, ended) in [
        ("a", "2 hours", "90 minutes"),
        ("a", "2 hours", "10 minutes"),
        ("a", "10 minutes", "5 minutes"),
        ("b", "2 hours", "90 minutes"),
    ] {
        fixture.execute(&ended_run(tenant, began, ended)).await;
    }
    let keep = Retention::default();
    while fixture.store.run_purge_any_tenant(&keep, 10).await.unwrap() {}
    assert_eq!(fixture.kept().await, [3; 4]);
    assert_eq!(
        fixture
            .scalar("SELECT count(*) FROM ended_runs WHERE ended_at < now() - interval '1 hour'")
            .await,
        1
    );
    fixture.store.output_fold_any_tenant(100).await.unwrap();
    let stored = async |tenant| fixture.store.tenant_usage(tenant).await.unwrap().output_bytes;
    assert_eq!((stored(&fixture.tenant).await, stored(&fixture.other).await), (200, 100));
    // An installation that keeps runs for less than a day deletes those of all tenants.
    let keep = Retention { runs: HOUR, output: HOUR, ..keep };
    while fixture.store.run_purge_any_tenant(&keep, 10).await.unwrap() {}
    assert_eq!(fixture.kept().await, [2; 4]);
    fixture.end().await;
}

#[tokio::test]
async fn purge_transactions_are_bounded() {
    let fixture = Fixture::new().await;
    for _ in 0..5 {
        fixture.execute(&ended_run("a", "2 hours", "90 minutes")).await;
    }
    let keep = Retention { runs: HOUR, output: HOUR, ..Retention::default() };
    assert!(fixture.store.run_purge_any_tenant(&keep, 3).await.unwrap());
    assert_eq!(fixture.kept().await, [2; 4], "at most three runs");
    fixture.execute("UPDATE ended_runs SET output_bytes = 70 * 1024 * 1024").await;
    assert!(fixture.store.run_purge_any_tenant(&keep, 3).await.unwrap());
    assert_eq!(fixture.kept().await, [1; 4], "at most 64 MiB, or one run");
    fixture.end().await;
}

#[tokio::test]
async fn run_of_open_session_waits_for_its_check() {
    let fixture = Fixture::new().await;
    let session = fixture.session_with(24 * HOUR, Some(2 * HOUR)).await.id;
    fixture.execute(&ended_run("a", "90 minutes", "80 minutes")).await;
    fixture
        .execute(&format!(
            "UPDATE ended_runs SET session_id = '{session}';
             UPDATE sessions SET check_at = now(), checked_at = now() - interval '2 hours', created_at = now() - interval '1 day'"
        ))
        .await;
    let keep = Retention { runs: HOUR, output: HOUR, ..Retention::default() };
    assert!(!fixture.store.run_purge_any_tenant(&keep, 3).await.unwrap());
    assert_eq!(fixture.store.session_expire_any_tenant(10).await.unwrap(), 0);
    assert!(fixture.store.run_purge_any_tenant(&keep, 3).await.unwrap());
    // The session remembers the use, although the run is gone.
    fixture.execute("UPDATE sessions SET check_at = now()").await;
    assert_eq!(fixture.store.session_expire_any_tenant(10).await.unwrap(), 0);
    fixture.end().await;
}

#[tokio::test]
async fn output_is_deleted_before_the_record() {
    let fixture = Fixture::new().await;
    fixture
        .keep(&fixture.tenant, TenantRetention { output: Some(HOUR), ..Default::default() })
        .await;
    for (tenant, began, ended) in [
        ("a", "2 hours", "90 minutes"),
        ("a", "2 hours", "50 minutes"),
        ("b", "2 hours", "90 minutes"),
    ] {
        fixture.execute(&ended_run(tenant, began, ended)).await;
    }
    let purge = async || {
        let soon = Instant::now() + HOUR;
        while fixture.store.output_purge_any_tenant(&Retention::default(), 1, soon).await.unwrap() {
        }
    };
    purge().await;
    assert_eq!(fixture.kept().await, [3, 2, 3, 3]);
    // A run that ended after its turn is not forgotten.
    fixture
        .execute(
            "UPDATE ended_runs SET ended_at = now() - interval '61 minutes' WHERE tenant_id = 'a'",
        )
        .await;
    purge().await;
    assert_eq!(fixture.kept().await, [3, 1, 3, 3]);
    fixture.store.output_fold_any_tenant(100).await.unwrap();
    assert_eq!(fixture.store.tenant_usage(&fixture.tenant).await.unwrap().output_bytes, 0);
    fixture.end().await;
}

#[tokio::test]
async fn sessions_and_their_keys_are_deleted() {
    let fixture = Fixture::new().await;
    let (old, open) = (fixture.session().await, fixture.session().await);
    fixture
        .execute(&format!(
            "INSERT INTO run_keys VALUES ('{}', 'k', gen_random_uuid(), '\\x00')",
            old.id
        ))
        .await;
    fixture.store.session_close(&fixture.tenant, &SessionRef::Id(old.id)).await.unwrap();
    assert_eq!(fixture.store.session_purge_any_tenant(HOUR, 10).await.unwrap(), 0);
    assert_eq!(fixture.store.session_purge_any_tenant(Duration::ZERO, 10).await.unwrap(), 1);
    assert_eq!(fixture.scalar("SELECT count(*) FROM run_keys").await, 0);
    assert!(
        fixture
            .store
            .session_get(&fixture.tenant, &SessionRef::Id(open.id))
            .await
            .unwrap()
            .is_some()
    );
    fixture.end().await;
}

/// Makes partitions for the last ten days and the next week, as if the installation had existed for
/// as long.
pub(crate) async fn partitions_of_past_days(fixture: &Fixture) {
    fixture
        .execute(
            "SELECT create_run_partitions((now() AT TIME ZONE 'UTC')::date + n) FROM generate_series(-10, 7) AS n",
        )
        .await;
}

async fn partitions(fixture: &Fixture) -> i64 {
    fixture.scalar("SELECT count(*) FROM pg_class WHERE relname ~ '^(ended_runs|run_output|run_labels)_[0-9]{8}$' AND relkind = 'r'").await
}

#[tokio::test]
async fn days_that_nobody_keeps_are_dropped() {
    let fixture = Fixture::new().await;
    partitions_of_past_days(&fixture).await;
    for days in [1, 5, 9] {
        fixture.execute(&ended_run("a", &format!("{days} days"), &format!("{days} days"))).await;
    }
    fixture.store.output_fold_any_tenant(100).await.unwrap();
    fixture
        .keep(&fixture.other, TenantRetention { runs: Some(5 * 24 * HOUR), ..Default::default() })
        .await;
    let all = partitions(&fixture).await;
    let mut upkeep =
        Upkeep::new(fixture.store.clone(), Retention { output: HOUR, ..Retention::default() });
    let (pass, _) = upkeep.pass().await.unwrap();
    assert_eq!(pass.misplaced, Some(0));
    // Output of days before yesterday, and runs of days longer ago than the longest retention.
    let dropped = all - partitions(&fixture).await;
    // In the first hour of a day, an hour ago was yesterday.
    let days_back = fixture
        .scalar("SELECT ((now() AT TIME ZONE 'UTC')::date - ((now() - interval '1 hour') AT TIME ZONE 'UTC')::date)::bigint")
        .await;
    assert_eq!(
        dropped,
        9 - days_back + 2 * 4,
        "days -10 to -2 of output, -10 to -7 of runs and labels"
    );
    // Tenant a keeps its runs for a day only, so those that were not dropped are deleted.
    assert_eq!(fixture.kept().await, [0, 0, 0, 0]);
    assert_eq!(
        fixture.store.tenant_usage(&fixture.tenant).await.unwrap().output_bytes,
        100,
        "of yesterday, until the next fold"
    );
    fixture.end().await;
}

#[tokio::test]
async fn drop_does_not_wait_for_readers() {
    let fixture = Fixture::new().await;
    partitions_of_past_days(&fixture).await;
    let all = partitions(&fixture).await;
    let mut reader = fixture.database.connection().await.unwrap();
    let mut reading = reader.begin().await.unwrap();
    sqlx::query("SELECT count(*) FROM ended_runs").execute(&mut *reading).await.unwrap();
    let mut upkeep = Upkeep::new(fixture.store.clone(), Retention::default());
    let (pass, _) = upkeep.pass().await.unwrap();
    assert!(pass.is_owner && pass.misplaced.is_none(), "{pass:?}");
    reading.rollback().await.unwrap();
    upkeep.pass().await.unwrap();
    assert!(partitions(&fixture).await < all);
    fixture.end().await;
}

#[tokio::test]
async fn rows_without_partition_are_reported_and_purged() {
    let fixture = Fixture::new().await;
    fixture.execute(&ended_run("a", "-90 days", "50 hours")).await;
    let mut upkeep = Upkeep::new(fixture.store.clone(), Retention::default());
    let (pass, _) = upkeep.pass().await.unwrap();
    assert_eq!(pass.misplaced, Some(2), "a run and its output");
    assert_eq!(fixture.kept().await, [0; 4]);
    fixture.end().await;
}

#[tokio::test]
async fn changed_retention_is_recorded() {
    let fixture = Fixture::new().await;
    let retention = TenantRetention { runs: Some(48 * HOUR), ..Default::default() };
    fixture.keep(&fixture.tenant, retention).await;
    let tenant = fixture.store.tenant_get(&fixture.tenant).await.unwrap().unwrap();
    assert_eq!(tenant.retention, retention);
    let events = recorded_events(&fixture.store, &fixture.tenant, Some(EventKind::RetentionSet))
        .await
        .unwrap();
    assert_eq!(events[0].body.detail["runs_seconds"], 172_800);
    fixture.end().await;
}
