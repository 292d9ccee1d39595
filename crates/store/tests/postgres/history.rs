//! Runs before and after their end: partitions, lists, and sessions that end meanwhile.

use codelia_store::{RunFilter, RunState, SessionRef};
use codelia_tests::{Database, eventually};
use codelia_types::Outcome;
use sqlx::{AssertSqlSafe, Connection as _, PgConnection};
use uuid::Uuid;

use crate::harness::Fixture;

async fn count(database: &Database, from: &str) -> i64 {
    let mut connection = database.connection().await.unwrap();
    let query = AssertSqlSafe(format!("SELECT count(*) FROM {from}"));
    let count = sqlx::query_scalar(query).fetch_one(&mut connection).await.unwrap();
    connection.close().await.unwrap();
    count
}

#[tokio::test]
async fn missing_partition_is_made_with_its_rows() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let day = fixture
        .database
        .number("SELECT to_char(now() AT TIME ZONE 'UTC', 'YYYYMMDD')::bigint")
        .await
        .unwrap();
    for parent in ["ended_runs", "run_output", "run_labels"] {
        fixture.database.execute(&format!("DROP TABLE {parent}_{day}")).await.unwrap();
    }
    let run = fixture.insert(session.id, 0).await;
    fixture.store.session_close(&fixture.tenant, &SessionRef::Id(session.id)).await.unwrap();
    let count = async |table: &str| count(&fixture.database, table).await;
    assert_eq!(count("ended_runs_default").await, 1);
    let create = "SELECT create_run_partitions((now() AT TIME ZONE 'UTC')::date)";
    for _ in 0..2 {
        fixture.database.execute(create).await.unwrap();
        assert_eq!(
            (count("ended_runs_default").await, count(&format!("ended_runs_{day}")).await),
            (0, 1)
        );
    }
    assert_eq!(fixture.run(run).await.outcome(), Some(&Outcome::Canceled));
    fixture.end().await;
}

/// A read of output locks tables in another order than the upkeep does.
#[tokio::test]
async fn new_partitions_give_way_to_readers() {
    let fixture = Fixture::new().await;
    let mut reader = fixture.database.connection().await.unwrap();
    sqlx::raw_sql("BEGIN; SELECT count(*) FROM run_output_default")
        .execute(&mut reader)
        .await
        .unwrap();
    let statement = "SELECT create_run_partitions((now() AT TIME ZONE 'UTC')::date + 30)";
    let has_ended = std::cell::Cell::new(false);
    let create = async {
        let created = fixture.database.execute(statement).await;
        has_ended.set(true);
        created
    };
    let read = async {
        let blocked = "SELECT count(*) FROM pg_stat_activity
                       WHERE datname = current_database() AND wait_event_type = 'Lock'";
        eventually("the upkeep waits", async || {
            let waits = fixture.database.number(blocked).await.unwrap() > 0;
            (waits || has_ended.get()).then_some(())
        })
        .await;
        sqlx::raw_sql("SELECT count(*) FROM ended_runs_default; COMMIT").execute(&mut reader).await
    };
    let (created, read) = tokio::join!(create, read);
    read.unwrap();
    assert!(created.unwrap_err().to_string().contains("lock timeout"));
    fixture.database.execute(statement).await.unwrap();
    fixture.end().await;
}

/// Starts a transaction that has inserted a queued run as [`codelia_store::Store::run_insert`]
/// does, but is not committed.
async fn insert_in_flight(fixture: &Fixture, session: Uuid) -> PgConnection {
    let mut connection = fixture.database.connection().await.unwrap();
    let insert = format!(
        "BEGIN; SELECT id FROM sessions WHERE id = '{session}' FOR SHARE;
         INSERT INTO live_runs (id, tenant_id, session_id, spec, labels, retries, state)
         SELECT gen_random_uuid(), tenant_id, id, '{{}}', '{{}}', 0, 'queued' FROM sessions WHERE id = '{session}'"
    );
    sqlx::raw_sql(AssertSqlSafe(insert)).execute(&mut connection).await.unwrap();
    connection
}

#[tokio::test]
async fn close_ends_run_that_is_being_inserted() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let mut insert = insert_in_flight(&fixture, session.id.0).await;
    let by_id = SessionRef::Id(session.id);
    let close = fixture.store.session_close(&fixture.tenant, &by_id);
    let (closed, ()) = tokio::join!(close, async {
        eventually("the close waits", || async {
            let waiting = "SELECT count(*) FROM pg_stat_activity
                           WHERE datname = current_database() AND wait_event_type = 'Lock'";
            (fixture.database.number(waiting).await.ok()? > 0).then_some(())
        })
        .await;
        sqlx::raw_sql("COMMIT").execute(&mut insert).await.unwrap();
    });
    closed.unwrap().unwrap();
    assert_eq!(
        fixture.database.number("SELECT count(*) FROM live_runs").await.unwrap(),
        0,
        "none is left behind"
    );
    assert_eq!(fixture.database.number("SELECT count(*) FROM ended_runs").await.unwrap(), 1);
    fixture.end().await;
}

#[tokio::test]
async fn expiry_spares_session_while_run_is_inserted() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let overdue = "UPDATE sessions SET expires_at = now() - interval '1 hour', check_at = now()";
    fixture.database.execute(overdue).await.unwrap();
    let mut insert = insert_in_flight(&fixture, session.id.0).await;
    let expire = async || fixture.store.session_expire_any_tenant(9).await.unwrap();
    assert_eq!(expire().await, 0, "the insert holds the session");
    sqlx::raw_sql("COMMIT").execute(&mut insert).await.unwrap();
    assert_eq!(expire().await, 1);
    assert_eq!(
        fixture.store.run_end_queues_any_tenant(9).await.unwrap(),
        1,
        "its run ends with it"
    );
    fixture.end().await;
}

#[tokio::test]
async fn list_joins_live_and_ended_runs() {
    let fixture = Fixture::new().await;
    let (session, worker) = (fixture.session().await, fixture.worker("w").await);
    let lease = fixture.lease(&session, &worker).await.unwrap();
    let mut ids = Vec::new();
    for number in 0..4 {
        ids.push(fixture.insert(session.id, 0).await);
        if number % 2 == 0 {
            fixture.commit(ids[number], &worker, &lease).await.unwrap();
        }
    }
    let list = async |filter: RunFilter| {
        let runs = fixture.store.run_list(&fixture.tenant, &filter, 9).await.unwrap();
        runs.into_iter().map(|run| run.id).collect::<Vec<_>>()
    };
    let all = [ids[3], ids[2], ids[1], ids[0]];
    let in_session = RunFilter { session: Some(session.id), ..RunFilter::default() };
    assert_eq!(list(RunFilter::default()).await, all);
    assert_eq!(list(in_session.clone()).await, all);
    assert_eq!(
        list(RunFilter { before: Some(ids[2]), ..in_session.clone() }).await,
        [ids[1], ids[0]]
    );
    assert_eq!(
        list(RunFilter { state: Some(RunState::Running), ..in_session }).await,
        [ids[3], ids[1]]
    );
    fixture.end().await;
}
