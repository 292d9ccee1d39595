//! Runs that are inserted or committed at the same moment share statements, and each keeps its own
//! answer.

use codelia_store::{
    Error, EventBody, EventKind, Lease, NewKey, NewRun, OutputChunk, OutputStream, RunAdmission,
    RunCommit, RunState, Scope, SessionRef, Store,
};
use codelia_types::{LeaseEpoch, LeaseToken, Outcome, RunId, RunResult, SessionId};
use futures::{FutureExt, future::join_all, poll};
use sqlx::{AssertSqlSafe, Connection, PgConnection};

use crate::harness::{Fixture, Registered, exited};

const RUNS: usize = 64;
/// What they take at most; alone, each would take one.
const MAX_STATEMENTS: i64 = 24;
/// Each transaction that inserted rows.
const INSERTS: &str = "SELECT count(DISTINCT xmin::text) FROM live_runs";
const COMMITS: &str = "SELECT count(DISTINCT xmin::text) FROM ended_runs";

/// A worker that holds a session, and whose runs have settings that are stored.
async fn leased(fixture: &Fixture) -> (Registered, Lease) {
    let worker = fixture.worker("w").await;
    let lease = fixture.lease(&fixture.session().await, &worker).await.unwrap();
    for _ in 0..2 {
        let run = fixture.insert(lease.session, 0).await;
        fixture.commit(run, &worker, &lease).await.unwrap();
    }
    (worker, lease)
}

/// A run that counts no quotas, so that it may be inserted together with others.
fn new_run(fixture: &Fixture, session: SessionId) -> NewRun<'_> {
    NewRun { check_quotas: false, ..fixture.new_run(session) }
}

/// Inserts runs that are all there at the same moment. The first one is alone.
async fn insert_all(fixture: &Fixture, runs: Vec<NewRun<'_>>) -> Vec<Result<RunAdmission, Error>> {
    join_all(runs.into_iter().map(|run| fixture.store.run_insert(run, fixture.quotas))).await
}

fn recorded(answer: &Result<RunAdmission, Error>) -> Option<RunId> {
    match answer {
        Ok(RunAdmission::Recorded { run, .. }) => Some(run.id),
        _ => None,
    }
}

async fn insert_many(fixture: &Fixture, session: SessionId, count: usize) -> Vec<RunId> {
    let runs = (0..count).map(|_| new_run(fixture, session)).collect();
    insert_all(fixture, runs).await.iter().map(|answer| recorded(answer).unwrap()).collect()
}

/// Locks a row until the connection is closed.
async fn locked(fixture: &Fixture, table: &str, id: impl std::fmt::Display) -> PgConnection {
    let mut blocker = fixture.database.connection().await.unwrap();
    let lock = format!("BEGIN; SELECT FROM {table} WHERE id = '{id}' FOR UPDATE");
    sqlx::raw_sql(AssertSqlSafe(lock)).execute(&mut blocker).await.unwrap();
    blocker
}

#[tokio::test]
async fn concurrent_runs_share_statements() {
    let fixture = Fixture::new().await;
    let (worker, lease) = leased(&fixture).await;
    let ended = fixture.database.number(COMMITS).await.unwrap();
    let runs = insert_many(&fixture, lease.session, RUNS).await;
    assert_eq!(fixture.assigned(&worker).await.len(), RUNS, "each once");
    let inserts = fixture.database.number(INSERTS).await.unwrap();
    assert!(inserts <= MAX_STATEMENTS, "{inserts} statements");

    let tail = |run: &RunId| {
        let data = run.to_string().into_bytes();
        vec![OutputChunk { position: 0, stream: OutputStream::Stdout, offset: 0, data }]
    };
    let commit = |run: &RunId| {
        let result = RunResult {
            output_bytes: 36,
            output_total: Some(36),
            unenforced: vec!["a".into(), "b".into()],
            ..exited(3).result
        };
        RunCommit { tail: tail(run), result, ..exited(3) }
    };
    let commits: Vec<_> = runs.iter().map(|run| (*run, commit(run))).collect();
    let ends = commits.iter().map(|(run, commit)| {
        fixture.store.run_commit(fixture.names(*run, &lease), &lease.token, commit)
    });
    let ends = join_all(ends).await;
    let commits = fixture.database.number(COMMITS).await.unwrap() - ended;
    assert!(commits <= MAX_STATEMENTS, "{commits} statements");
    for (id, end) in runs.iter().zip(ends) {
        let (end, run) = (end.unwrap(), fixture.run(*id).await);
        assert_eq!((run.state, run.outcome()), (RunState::Ended, Some(&Outcome::Exited(3))));
        assert_eq!(run.result().unwrap().unenforced, ["a", "b"]);
        assert_eq!(run.end, Some(end.end));
        let output = fixture.store.output_read(&fixture.tenant, *id, 0, 100).await.unwrap();
        assert_eq!(output, tail(id));
    }
    let usage = "SELECT sum(bytes)::bigint FROM output_changes";
    assert_eq!(fixture.database.number(usage).await.unwrap(), 36 * i64::try_from(RUNS).unwrap());
    let audited = "SELECT count(*) FROM audit WHERE kind = 'RUN_ENDED' AND run_id IN (SELECT id FROM ended_runs)";
    assert_eq!(fixture.database.number(audited).await.unwrap(), i64::try_from(RUNS + 2).unwrap());
    fixture.end().await;
}

#[tokio::test]
async fn refused_runs_do_not_affect_others() {
    let fixture = Fixture::new().await;
    let (worker, lease) = leased(&fixture).await;
    let (ended, quarantined, free) =
        (fixture.session().await, fixture.session().await, fixture.session().await);
    fixture.lease(&ended, &worker).await.unwrap();
    fixture.lease(&quarantined, &worker).await.unwrap();
    fixture.store.session_close(&fixture.tenant, &SessionRef::Id(ended.id)).await.unwrap().unwrap();
    fixture.quarantine(&quarantined).await;
    let key = NewKey {
        tenant: &fixture.tenant,
        display_name: "k",
        secret_hash: [1; 32],
        scopes: &[Scope::Run],
        expires_at: None,
    };
    let key = fixture.store.key_create(key).await.unwrap().unwrap().id;
    let version = fixture.store.key_authenticate(&[1; 32]).await.unwrap().unwrap().version;
    let stale = codelia_store::KeyVersion { key: version.key + 1, ..version };

    let new = |session| new_run(&fixture, session);
    let keyed = |key, hash| NewRun { idempotency: Some((key, hash)), ..new(lease.session) };
    let good = || NewRun { key, key_version: Some(version), ..new(lease.session) };
    let answers = insert_all(
        &fixture,
        vec![
            new(lease.session),
            good(),
            new(ended.id),
            new(quarantined.id),
            new(SessionId::generate()),
            NewRun { tenant: &fixture.other, ..new(lease.session) },
            NewRun { key, key_version: Some(stale), ..new(lease.session) },
            new(free.id),
            keyed("key", b"hash"),
            keyed("key", b"hash"),
            keyed("key", b"other"),
            good(),
        ],
    )
    .await;
    let answers: Vec<_> = answers.into_iter().map(Result::unwrap).collect();
    use RunAdmission as A;
    let states: Vec<_> = answers
        .iter()
        .map(|answer| match answer {
            A::Recorded { run, .. } => Some(run.state),
            _ => None,
        })
        .collect();
    let (running, queued) = (Some(RunState::Running), Some(RunState::Queued));
    assert_eq!(states[..2], [running; 2]);
    assert!(matches!(answers[2], A::SessionEnded), "{:?}", answers[2]);
    assert!(matches!(answers[3], A::SessionQuarantined(_)), "{:?}", answers[3]);
    assert!(matches!((&answers[4], &answers[5]), (A::NoSession, A::NoSession)));
    assert!(matches!(answers[6], A::KeyChanged), "{:?}", answers[6]);
    assert_eq!(states[7..9], [queued, running]);
    assert!(matches!(answers[9], A::Existing(_)), "{:?}", answers[9]);
    assert!(matches!(answers[10], A::KeyReused), "{:?}", answers[10]);
    assert_eq!(states[11], running);
    assert_eq!(fixture.database.number("SELECT count(*) FROM live_runs").await.unwrap(), 5);
    fixture.end().await;
}

#[tokio::test]
async fn rejected_statement_fails_only_its_run() {
    let fixture = Fixture::new().await;
    let (worker, lease) = leased(&fixture).await;
    let mut runs: Vec<_> = (0..10).map(|_| new_run(&fixture, lease.session)).collect();
    // The database allows ten.
    runs[5].retries = 11;
    let answers = insert_all(&fixture, runs).await;
    let failed: Vec<_> = (0..10).filter(|at| recorded(&answers[*at]).is_none()).collect();
    assert_eq!(failed, [5]);
    assert!(matches!(answers[5], Err(Error::Statement(_))));
    assert_eq!(fixture.assigned(&worker).await.len(), 9);
    fixture.end().await;
}

#[tokio::test]
async fn fenced_commits_do_not_affect_others() {
    let fixture = Fixture::new().await;
    let (worker, lease) = leased(&fixture).await;
    let runs = insert_many(&fixture, lease.session, 8).await;
    let repeated = runs[2];
    fixture.commit(repeated, &worker, &lease).await.unwrap();
    let stale = LeaseToken { epoch: LeaseEpoch(lease.token.epoch.0 + 1), ..lease.token.clone() };
    let event =
        EventBody { kind: EventKind::LimitNear, field: None, detail: serde_json::json!({}) };
    let plain = exited(0);
    let with_event = RunCommit { events: vec![event], ..exited(0) };
    let unknown = RunId::generate();
    let commit = async |run, token, commit| {
        fixture.store.run_commit(fixture.names(run, &lease), token, commit).await.map(drop)
    };
    let ends = join_all([
        commit(runs[0], &lease.token, &plain).boxed_local(),
        commit(runs[1], &lease.token, &plain).boxed_local(),
        commit(repeated, &lease.token, &plain).boxed_local(),
        commit(runs[3], &stale, &plain).boxed_local(),
        commit(unknown, &lease.token, &plain).boxed_local(),
        commit(runs[4], &lease.token, &with_event).boxed_local(),
        commit(runs[5], &lease.token, &plain).boxed_local(),
    ])
    .await;
    let fenced: Vec<_> = ends.iter().map(|end| matches!(end, Err(Error::Fenced))).collect();
    assert_eq!(fenced, [false, false, false, true, true, false, false]);
    assert!(ends.iter().zip(fenced).all(|(end, is_fenced)| is_fenced || end.is_ok()), "{ends:?}");
    let left: Vec<_> = fixture.assigned(&worker).await.iter().map(|run| run.id).collect();
    assert_eq!(left, [runs[3], runs[6], runs[7]]);
    fixture.end().await;
}

/// A statement that waits for a lock does not delay the runs of others, whether it came first or
/// not.
#[tokio::test]
async fn locked_rows_delay_only_their_run() {
    let fixture = Fixture::new().await;
    let (worker, lease) = leased(&fixture).await;
    let other = fixture.session().await;
    let other_lease = fixture.lease(&other, &worker).await.unwrap();
    let sessions =
        || [other.id, lease.session, other.id, lease.session].map(|id| new_run(&fixture, id));
    let blocker = locked(&fixture, "sessions", other.id).await;
    let mut inserts = sessions().map(|new| Box::pin(fixture.store.run_insert(new, fixture.quotas)));
    let [first, second, third, fourth] = &mut inserts;
    assert!(poll!(&mut *first).is_pending(), "alone");
    assert!(poll!(&mut *third).is_pending());
    let runs = [second.await, fourth.await].map(|answer| recorded(&answer).unwrap());
    assert!(
        poll!(&mut *first).is_pending() && poll!(&mut *third).is_pending(),
        "the session is locked"
    );
    blocker.close().await.unwrap();
    let waited = [first.await, third.await].map(|answer| recorded(&answer).unwrap());
    drop(inserts);

    let blocker = locked(&fixture, "live_runs", waited[0]).await;
    let plain = exited(0);
    let commit = |run, lease| Box::pin(commit(&fixture, run, lease, &plain));
    let mut first = commit(waited[0], &other_lease);
    assert!(poll!(&mut first).is_pending(), "alone");
    let others = [(waited[1], &other_lease), (runs[0], &lease), (runs[1], &lease)];
    for end in join_all(others.map(|(run, lease)| commit(run, lease))).await {
        end.unwrap();
    }
    assert!(poll!(&mut first).is_pending(), "the run is locked");
    blocker.close().await.unwrap();
    first.await.unwrap();
    fixture.end().await;
}

async fn commit(
    fixture: &Fixture,
    run: RunId,
    lease: &Lease,
    commit: &RunCommit,
) -> Result<(), Error> {
    fixture.store.run_commit(fixture.names(run, lease), &lease.token, commit).await.map(drop)
}

#[tokio::test]
async fn dropped_calls_do_not_affect_others() {
    let fixture = Fixture::new().await;
    let (worker, lease) = leased(&fixture).await;
    let other = fixture.session().await;
    fixture.lease(&other, &worker).await.unwrap();
    let ids: Vec<RunId> = (0..20).map(|_| RunId::generate()).collect();
    let insert = |id: &RunId| {
        // The first one waits for a lock, so that the others cannot be alone.
        let session = if *id == ids[0] { other.id } else { lease.session };
        let new = NewRun { id: *id, ..new_run(&fixture, session) };
        Box::pin(fixture.store.run_insert(new, fixture.quotas))
    };
    let blocker = locked(&fixture, "sessions", other.id).await;
    let mut calls: Vec<_> = ids.iter().map(insert).collect();
    for call in &mut calls {
        assert!(poll!(call).is_pending());
    }
    // The first one is alone and was sent. The others wait.
    let kept = calls.split_off(10);
    drop(calls);
    blocker.close().await.unwrap();
    for (answer, id) in join_all(kept).await.iter().zip(&ids[10..]) {
        assert_eq!(recorded(answer), Some(*id));
    }
    let assigned: Vec<_> = fixture.assigned(&worker).await.iter().map(|run| run.id).collect();
    let count = |range: std::ops::Range<usize>| {
        ids[range].iter().filter(|id| assigned.contains(id)).count()
    };
    assert_eq!((count(1..10), count(10..20)), (0, 10), "those that waited were not inserted");
    assert_eq!(assigned.len(), count(0..20), "none twice");

    // The next call is alone again, and works.
    assert!(recorded(&insert(&RunId::generate()).await).is_some());
    fixture.end().await;
}

#[tokio::test]
async fn several_processes_insert_and_commit_each_run_once() {
    let fixture = Fixture::new().await;
    let (worker, lease) = leased(&fixture).await;
    let other: Store = fixture.database.store().await.unwrap();
    let one = async |store: &Store, at: usize| {
        // Each key is used by two processes at the same time.
        let key = format!("key {}", at / 2);
        let new = NewRun { idempotency: Some((&key, b"hash")), ..new_run(&fixture, lease.session) };
        match store.run_insert(new, fixture.quotas).await.unwrap() {
            RunAdmission::Recorded { run, .. } => {
                let plain = exited(0);
                let names = fixture.names(run.id, &lease);
                store.run_commit(names, &lease.token, &plain).await.unwrap();
                1
            }
            RunAdmission::Existing(_) => 0,
            answer => panic!("{answer:?}"),
        }
    };
    for _ in 0..2 {
        // The other process stores the same settings.
        let answer = other.run_insert(new_run(&fixture, lease.session), fixture.quotas).await;
        fixture.commit(recorded(&answer).unwrap(), &worker, &lease).await.unwrap();
    }
    let stores = [&fixture.store, &other];
    let recorded = join_all((0..4 * RUNS).map(|at| one(stores[at % 2], at))).await;
    assert_eq!(recorded.into_iter().sum::<usize>(), 2 * RUNS);
    assert!(fixture.assigned(&worker).await.is_empty());
    let ended = fixture.database.number("SELECT count(*) FROM ended_runs").await.unwrap();
    assert_eq!(ended, i64::try_from(2 * RUNS + 4).unwrap());
    other.close().await;
    fixture.end().await;
}
