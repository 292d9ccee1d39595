//! Classes of statements have separate connections and timeouts.

use std::{num::NonZeroU32, time::Duration};

use codelia_policy::{IsolationLevel, PolicyScope};
use codelia_store::{
    AuditFilter, Error, EventBody, EventKind, EventSubject, Options, Retention, ScopeRef, Store,
};
use codelia_tests::{Database, eventually};
use futures::{
    future::{Either, join_all, select},
    pin_mut,
};
use sqlx::{Connection, PgConnection};

use crate::harness::{Fixture, LONG, exited};

const WAITING: &str = "SELECT count(*) FROM pg_stat_activity
                       WHERE wait_event_type = 'Lock' AND datname = current_database()";

async fn lock(database: &Database, table: &str) -> PgConnection {
    let mut blocker = database.connection().await.unwrap();
    let lock = sqlx::AssertSqlSafe(format!("BEGIN; LOCK TABLE {table}"));
    sqlx::raw_sql(lock).execute(&mut blocker).await.unwrap();
    blocker
}

async fn store_with(database: &Database, change: impl FnOnce(&mut Options)) -> Store {
    let mut options = Options::from_url(&database.url()).unwrap();
    change(&mut options);
    Store::connect(options).await.unwrap()
}

/// Waits until statements wait for a lock.
async fn blocked(database: &Database, statements: i64) {
    eventually("statements wait for the lock", || async {
        (database.number(WAITING).await.ok()? >= statements).then_some(())
    })
    .await;
}

async fn ends_before(fast: impl Future, slow: impl Future) -> bool {
    pin_mut!(fast, slow);
    matches!(select(fast, slow).await, Either::Left(_))
}

async fn record(store: &Store) -> Result<(), Error> {
    let body =
        EventBody { kind: EventKind::RunRefused, field: None, detail: serde_json::json!({}) };
    store.audit_insert(&EventSubject::default(), &body).await
}

#[tokio::test]
async fn slow_lists_delay_neither_runs_nor_lease() {
    let mut fixture = Fixture::new().await;
    let patient = |options: &mut Options| {
        (options.lock_timeout, options.read_timeout) = (LONG, LONG);
        options.acquire_timeout = Duration::from_secs(1);
    };
    fixture.store = store_with(&fixture.database, patient).await;
    let worker = fixture.worker("w").await;
    let keeper = fixture.store.lease_connection(LONG);
    // No statement on the path of a run reads this table.
    let mut blocker = lock(&fixture.database, "scope_policies").await;
    let project = ScopeRef {
        tenant: fixture.other.clone(),
        scope: PolicyScope::Project,
        name: "p".to_owned(),
    };
    let lists = join_all((0..20).map(|_| fixture.store.scope_policy_history(&project, None, 10)));
    let run = async {
        blocked(&fixture.database, 4).await;
        let session = fixture.session().await;
        let lease = fixture.lease(&session, &worker).await.unwrap();
        let run = fixture.insert(session.id, 0).await;
        fixture
            .store
            .run_commit(fixture.names(run, &lease), &lease.token, &exited(0))
            .await
            .unwrap();
        keeper.renew(&worker.id, worker.incarnation, LONG, 0).await.unwrap();
    };
    assert!(ends_before(run, lists).await, "the lists still wait");

    // The control: as many slow statements of the same class leave no connection.
    let calls = join_all((0..20).map(|_| fixture.store.scope_policies(&fixture.other, None, None)));
    let ping = async {
        blocked(&fixture.database, 14).await;
        assert!(matches!(fixture.store.ping().await, Err(Error::PoolExhausted)));
        keeper.renew(&worker.id, worker.incarnation, LONG, 0).await.unwrap();
    };
    assert!(ends_before(ping, calls).await);
    sqlx::raw_sql("ROLLBACK").execute(&mut blocker).await.unwrap();
    blocker.close().await.unwrap();
    fixture.end().await;
}

#[tokio::test]
async fn slow_statements_end_with_typed_errors() {
    let fixture = Fixture::new().await;
    let mut blocker = lock(&fixture.database, "audit, approvals").await;
    let short = Duration::from_millis(100);
    let slow = store_with(&fixture.database, |options| options.read_timeout = short).await;
    let error = slow.audit_list(None, &AuditFilter::default(), 10).await.unwrap_err();
    assert!(matches!(error, Error::StatementTimeout(_)) && error.is_transient(), "{error:?}");
    let locked = store_with(&fixture.database, |options| options.lock_timeout = short).await;
    for result in [
        locked.audit_list(None, &AuditFilter::default(), 10).await.map(drop),
        record(&locked).await,
        fixture.store.approval_purge_any_tenant(&Retention::default(), 10).await.map(drop),
    ] {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::LockTimeout(_)) && error.is_transient(), "{error:?}");
    }
    sqlx::raw_sql("ROLLBACK").execute(&mut blocker).await.unwrap();
    record(&locked).await.unwrap();
    blocker.close().await.unwrap();
    slow.close().await;
    locked.close().await;
    fixture.end().await;
}

#[tokio::test]
async fn idle_connections_are_closed() {
    let fixture = Fixture::new().await;
    fixture.store.close().await;
    let short = Duration::from_secs(1);
    let store = store_with(&fixture.database, |options| options.idle_timeout = short).await;
    let connections = "SELECT count(*) FROM pg_stat_activity
                       WHERE application_name = 'codelia' AND datname = current_database()";
    assert_eq!(
        fixture.database.number(connections).await.unwrap(),
        1,
        "only what is needed is open"
    );
    eventually("idle connections are closed", || async {
        (fixture.database.number(connections).await.ok()? == 0).then_some(())
    })
    .await;
    store.ping().await.unwrap();
    assert_eq!(fixture.database.number(connections).await.unwrap(), 1, "it is kept for a moment");
    eventually("a connection that was kept is closed", || async {
        (fixture.database.number(connections).await.ok()? == 0).then_some(())
    })
    .await;
    store.close().await;
    fixture.end().await;
}

#[tokio::test]
async fn kept_connections_serve_transactions() {
    let fixture = Fixture::new().await;
    let one = |options: &mut Options| {
        options.max_connections = NonZeroU32::new(3);
        options.acquire_timeout = Duration::from_secs(2);
    };
    let store = store_with(&fixture.database, one).await;
    // Both need the only connection of their class; setting a floor needs a transaction.
    let floor =
        || store.tenant_set_floor(&fixture.tenant, IsolationLevel::None, None, "test", None);
    store.ping().await.unwrap();
    floor().await.unwrap();
    let (pings, floors) =
        tokio::join!(join_all((0..20).map(|_| store.ping())), join_all((0..20).map(|_| floor())));
    pings.into_iter().for_each(|ping| ping.unwrap());
    floors.into_iter().for_each(|floor| assert!(floor.unwrap().is_some()));
    store.close().await;
    fixture.end().await;
}

#[tokio::test]
async fn only_one_statement_meets_connections_that_the_server_ended() {
    let fixture = Fixture::new().await;
    join_all((0..5).map(|_| fixture.store.ping())).await.into_iter().for_each(|ping| ping.unwrap());
    let end = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
               WHERE application_name = 'codelia' AND datname = current_database()";
    assert!(fixture.database.number(end).await.unwrap() > 1);
    assert!(matches!(fixture.store.ping().await, Err(error) if error.is_transient()));
    fixture.store.ping().await.unwrap();
    fixture.end().await;
}

#[tokio::test]
async fn unreachable_server_is_not_an_exhausted_pool() {
    let mut options = Options::from_url("postgres://u@127.0.0.1:1/d").unwrap();
    options.acquire_timeout = Duration::from_millis(200);
    assert!(matches!(Store::connect(options).await, Err(Error::Unavailable(_))));
}
