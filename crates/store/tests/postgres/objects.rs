//! Output in objects: the same bytes as in rows, the same guard, and nothing left behind.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use codelia_store::{
    Error, Lease, NewRun, ObjectProblem, OutputChunk, OutputLocation, OutputOptions, OutputStream,
    Retention, RunAdmission, RunCommit, Store, TenantRetention, Upkeep,
};
use codelia_tests::{Process, Scratch, available};
use codelia_types::{ByteSize, Incarnation, KeyId, RunId, SessionId};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::{
    harness::{Fixture, Registered, exited},
    retention::partitions_of_past_days,
};

const HOUR: Duration = Duration::from_secs(3600);
/// More output than this goes to an object.
const INLINE: u64 = 10;

pub(crate) fn options(location: OutputLocation) -> OutputOptions {
    OutputOptions {
        store: Some(location),
        inline: ByteSize::new(INLINE),
        ..OutputOptions::default()
    }
}

fn in_directory(path: &Path) -> OutputOptions {
    options(OutputLocation::Directory(path.to_owned()))
}

/// Standard output, then standard error: more than [`INLINE`] together.
pub(crate) fn large(position: i64) -> Vec<OutputChunk> {
    let chunk = |position, stream, data: &[u8]| OutputChunk {
        position,
        stream,
        offset: position,
        data: data.to_vec(),
    };
    vec![
        chunk(position, OutputStream::Stdout, b"0123456789"),
        chunk(position + 10, OutputStream::Stderr, b"abcde"),
    ]
}

fn with_tail(tail: Vec<OutputChunk>, bytes: i64) -> RunCommit {
    let mut commit = RunCommit { tail, ..exited(0) };
    commit.result.output_bytes = bytes;
    commit.result.output_total = Some(bytes);
    commit
}

/// A store with objects in a directory, and a worker that holds a session.
struct Setup {
    fixture: Fixture,
    scratch: Scratch,
    store: Store,
    session: SessionId,
    worker: Registered,
    lease: Lease,
}

impl Setup {
    async fn new() -> Self {
        let fixture = Fixture::new().await;
        let scratch = Scratch::new().unwrap();
        let store = fixture
            .store
            .clone()
            .with_output(&in_directory(&scratch.join("output")))
            .await
            .unwrap();
        let session = fixture.session().await;
        let worker = fixture.worker("w").await;
        let lease = fixture.lease(&session, &worker).await.unwrap();
        Self { fixture, scratch, store, session: session.id, worker, lease }
    }

    /// Inserts a run that was made `ago`.
    async fn insert(&self, ago: Duration, retries: i32) -> RunId {
        let millis = (OffsetDateTime::now_utc() - ago).unix_timestamp() * 1000;
        let random = *Uuid::new_v4().as_bytes().first_chunk().unwrap();
        let id =
            uuid::Builder::from_unix_timestamp_millis(millis.unsigned_abs(), &random).into_uuid();
        let new = NewRun { id: RunId(id), retries, ..self.fixture.new_run(self.session) };
        match self.store.run_insert(new, self.fixture.quotas).await.unwrap() {
            RunAdmission::Recorded { run, .. } => run.id,
            other => panic!("{other:?}"),
        }
    }

    async fn append(&self, run: RunId) {
        self.store.output_append(run, &self.lease.token, &large(0)).await.unwrap();
    }

    async fn commit(&self, run: RunId, commit: &RunCommit) {
        self.store
            .run_commit(self.fixture.names(run, &self.lease), &self.lease.token, commit)
            .await
            .unwrap();
    }

    async fn read(&self, run: RunId, position: i64) -> Result<Vec<OutputChunk>, Error> {
        self.store.output_read(&self.fixture.tenant, run, position, 1 << 20).await
    }

    /// The directories of days.
    fn days(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.scratch.join("output")).unwrap();
        let days = entries.map(|entry| entry.unwrap().path());
        days.filter(|path| !path.ends_with("codelia-store-id")).collect()
    }

    fn objects(&self) -> Vec<PathBuf> {
        let files = |day| fs::read_dir(day).unwrap().map(|entry| entry.unwrap().path());
        self.days().into_iter().flat_map(files).collect()
    }

    /// Removes objects until nothing is left to do.
    async fn remove_objects(&self, keep: &Retention) {
        while self.store.output_objects_purge_any_tenant(keep).await.unwrap() {}
    }

    async fn end(self) {
        self.fixture.end().await;
    }
}

#[tokio::test]
async fn output_in_objects_reads_the_same() {
    let setup = Setup::new().await;
    let run = setup.insert(Duration::ZERO, 0).await;
    for _ in 0..2 {
        setup.append(run).await;
    }
    let tail = vec![OutputChunk {
        position: 15,
        stream: OutputStream::Stdout,
        offset: 10,
        data: b"small".into(),
    }];
    setup.commit(run, &with_tail(tail, 20)).await;
    let fixture = &setup.fixture;
    assert_eq!(fixture.scalar("SELECT count(*) FROM run_output WHERE data IS NULL").await, 2);
    assert_eq!(
        fixture.scalar("SELECT count(*) FROM run_output WHERE data IS NOT NULL").await,
        1,
        "a small tail"
    );
    let [object] = &setup.objects()[..] else { panic!("{:?}", setup.objects()) };
    assert_eq!(fs::read(object).unwrap(), b"0123456789abcde");
    let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(object), mode(object.parent().unwrap())), (0o600, 0o700));

    let all = b"0123456789abcdesmall";
    for position in 0..=all.len() {
        let chunks = setup.read(run, i64::try_from(position).unwrap()).await.unwrap();
        let first =
            chunks.first().map_or(position, |chunk| usize::try_from(chunk.position).unwrap());
        assert_eq!(first, position);
        assert_eq!(
            chunks.into_iter().flat_map(|chunk| chunk.data).collect::<Vec<_>>(),
            all[position..]
        );
    }
    let second = setup.read(run, 12).await.unwrap().remove(0);
    assert_eq!((second.stream, second.offset), (OutputStream::Stderr, 12));
    let one = setup.store.output_read(&fixture.tenant, run, 0, 1).await.unwrap();
    assert_eq!(one.len(), 1, "at least one chunk");
    assert!(
        setup.store.output_read(&fixture.other, run, 0, 99).await.unwrap().is_empty(),
        "of another tenant"
    );
    fixture.store.output_fold_any_tenant(10).await.unwrap();
    assert_eq!(fixture.store.tenant_usage(&fixture.tenant).await.unwrap().output_bytes, 20);
    setup.end().await;
}

#[tokio::test]
async fn objects_of_past_days_are_removed() {
    let setup = Setup::new().await;
    partitions_of_past_days(&setup.fixture).await;
    let keep = Retention { output: HOUR, ..Retention::default() };
    let (stored, fenced) = (setup.insert(120 * HOUR, 0).await, setup.insert(120 * HOUR, 0).await);
    setup.append(stored).await;
    // As that of a worker that is killed before its row.
    let mut stolen = setup.lease.token.clone();
    stolen.incarnation = Incarnation::generate();
    let refused = setup.store.output_append(fenced, &stolen, &large(0)).await;
    assert!(matches!(refused, Err(Error::Fenced)), "{refused:?}");
    assert_eq!(setup.objects().len(), 2, "the object of the fenced worker is there");
    assert!(setup.read(fenced, 0).await.unwrap().is_empty(), "and nobody can read it");

    setup.remove_objects(&keep).await;
    assert_eq!(setup.objects().len(), 2, "a live run may be about to insert the row");
    setup.commit(stored, &with_tail(Vec::new(), 15)).await;
    setup.commit(fenced, &exited(0)).await;
    setup.remove_objects(&keep).await;
    assert_eq!(setup.objects().len(), 1, "nobody will insert the row");
    assert_eq!(setup.read(stored, 0).await.unwrap(), large(0));

    Upkeep::new(setup.store.clone(), keep).pass().await.unwrap();
    assert_eq!(
        setup.fixture.scalar("SELECT count(*) FROM run_output").await,
        0,
        "the day is dropped"
    );
    assert_eq!(setup.objects().len(), 1, "as after a crash");
    setup.remove_objects(&keep).await;
    assert!(setup.days().is_empty(), "{:?}", setup.days());
    setup.end().await;
}

#[tokio::test]
async fn deleted_rows_take_their_objects_along() {
    let setup = Setup::new().await;
    let fixture = &setup.fixture;
    let keep = Retention::default();
    let removals = "SELECT count(*) FROM output_removals";
    let runs = [setup.insert(2 * HOUR, 0).await, setup.insert(2 * HOUR, 0).await];
    for run in runs {
        setup.append(run).await;
        setup.commit(run, &with_tail(large(15), 30)).await;
    }
    let lost = setup.insert(2 * HOUR, 0).await;
    setup.append(lost).await;
    fixture.execute("UPDATE ended_runs SET ended_at = now() - interval '90 minutes'").await;
    assert_eq!(setup.objects().len(), 5);

    // Output before the record.
    let output = TenantRetention { output: Some(HOUR), ..TenantRetention::default() };
    setup.store.tenant_set_retention(&fixture.tenant, &output, KeyId::generate()).await.unwrap();
    while setup.store.output_purge_any_tenant(&keep, 1, Instant::now() + HOUR).await.unwrap() {}
    assert_eq!((fixture.scalar(removals).await, setup.objects().len()), (4, 5), "as after a crash");
    setup.remove_objects(&keep).await;
    assert_eq!((fixture.scalar(removals).await, setup.objects().len()), (0, 1));

    // A run whose worker is lost keeps its output, or begins again without it.
    let retried = setup.insert(2 * HOUR, 1).await;
    setup.append(retried).await;
    fixture.expire_worker(&setup.worker).await;
    setup.store.lease_sweep_any_tenant(9).await.unwrap();
    setup.remove_objects(&keep).await;
    assert!(setup.read(retried, 0).await.unwrap().is_empty());
    assert_eq!(setup.objects().len(), 1);
    assert_eq!(setup.read(lost, 0).await.unwrap(), large(0));
    assert_eq!(fixture.run(lost).await.output_bytes(), 15);

    // The whole run.
    fixture.execute("UPDATE ended_runs SET ended_at = now() - interval '90 minutes'").await;
    fixture.execute("UPDATE sessions SET checked_at = now()").await;
    let keep = Retention { runs: HOUR, output: HOUR, ..keep };
    while setup.store.run_purge_any_tenant(&keep, 9).await.unwrap() {}
    assert_eq!((fixture.scalar(removals).await, setup.objects().len()), (1, 1));
    setup.remove_objects(&keep).await;
    assert_eq!((fixture.scalar(removals).await, setup.objects().len()), (0, 0));
    setup.end().await;
}

#[tokio::test]
async fn damaged_object_is_an_error_that_names_it() {
    let setup = Setup::new().await;
    let run = setup.insert(Duration::ZERO, 0).await;
    setup.append(run).await;
    let object = setup.objects().remove(0);
    let problem = async || match setup.read(run, 0).await {
        Err(Error::Object { name, problem }) => {
            assert!(object.ends_with(&name), "{name}");
            problem
        }
        other => panic!("{other:?}"),
    };
    fs::write(&object, b"0123456789abcd").unwrap();
    assert_eq!(problem().await, ObjectProblem::Shortened { expected: 15 });
    fs::remove_file(&object).unwrap();
    assert_eq!(problem().await, ObjectProblem::Missing);
    let without = setup.fixture.store.output_read(&setup.fixture.tenant, run, 0, 9).await;
    assert!(
        matches!(without, Err(Error::Object { problem: ObjectProblem::NotConfigured, .. })),
        "{without:?}"
    );

    // A row may name only objects of its own run, and no other files.
    let mut connection = setup.fixture.database.connection().await.unwrap();
    let other =
        "UPDATE run_output SET object = replace(object, run_id::text, gen_random_uuid()::text)";
    assert!(sqlx::query(other).execute(&mut connection).await.is_err());
    setup.fixture.execute("UPDATE run_output SET object = '../' || run_id || '_x'").await;
    let outside = setup.read(run, 0).await;
    assert!(
        matches!(outside, Err(Error::UnknownValue { column: "run_output.object", .. })),
        "{outside:?}"
    );
    // Removed with its rows: expired, not lost.
    setup.fixture.execute("DELETE FROM run_output").await;
    assert!(setup.read(run, 0).await.unwrap().is_empty());
    setup.end().await;
}

#[tokio::test]
async fn failed_write_stores_no_row_and_is_repeated() {
    let setup = Setup::new().await;
    let run = setup.insert(Duration::ZERO, 0).await;
    let today = OffsetDateTime::now_utc().date();
    let day = format!("{}{:02}{:02}", today.year(), u8::from(today.month()), today.day());
    let day = setup.scratch.join("output").join(day);
    fs::write(&day, b"in the way").unwrap();
    let commit = with_tail(large(0), 15);
    let failed = setup
        .store
        .run_commit(setup.fixture.names(run, &setup.lease), &setup.lease.token, &commit)
        .await
        .unwrap_err();
    assert!(failed.is_transient(), "{failed:?}");
    assert_eq!(
        setup.fixture.scalar("SELECT count(*) FROM live_runs").await,
        1,
        "the run has not ended"
    );
    fs::remove_file(&day).unwrap();
    setup.commit(run, &commit).await;
    assert_eq!(setup.read(run, 0).await.unwrap(), large(0));
    setup.end().await;
}

#[tokio::test]
async fn only_the_store_of_this_database_is_used() {
    let setup = Setup::new().await;
    let refused = async |store: &Store, options: OutputOptions| {
        let error = store.clone().with_output(&options).await.unwrap_err();
        assert!(matches!(error, Error::OutputStore { .. }), "{error:?}");
        error.to_string()
    };
    let (store, scratch) = (&setup.fixture.store, &setup.scratch);
    store.clone().with_output(&in_directory(&scratch.join("output"))).await.unwrap();
    let another = refused(store, in_directory(&scratch.join("another"))).await;
    assert!(another.contains("api and workers need the same one"), "{another}");
    let none = refused(store, options(OutputLocation::Postgres)).await;
    assert!(
        none.contains(&format!("output in file://{}", scratch.join("output").display())),
        "{none}"
    );

    let other = Fixture::new().await;
    // Tests copy one database.
    other.execute("UPDATE output_store SET id = gen_random_uuid()").await;
    other.store.clone().with_output(&options(OutputLocation::Postgres)).await.unwrap();
    let foreign = refused(&other.store, in_directory(&scratch.join("output"))).await;
    assert!(foreign.contains("belongs to another database"), "{foreign}");
    fs::set_permissions(scratch.join("another"), fs::Permissions::from_mode(0o750)).unwrap();
    let open = refused(&other.store, in_directory(&scratch.join("another"))).await;
    assert!(open.contains("chmod 700"), "{open}");
    let missing = refused(&other.store, in_directory(Path::new("/proc/none/output"))).await;
    assert!(missing.starts_with("output.store file:///proc/none/output: "), "{missing}");
    other.end().await;
    setup.end().await;
}

/// Starts an S3 server, and returns how to reach its bucket.
async fn s3_server(python: &Path, scratch: &Scratch) -> (Process, OutputOptions) {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/clients/python/s3_server.py");
    let mut command = std::process::Command::new(python);
    command.arg(script);
    let mut server = Process::start("s3", command, scratch.path()).unwrap();
    let ready = server.line_starting("ready ").await.unwrap();
    let [_, endpoint, bucket, id, secret] = ready.split(' ').collect::<Vec<_>>()[..] else {
        panic!("{ready}")
    };
    let location =
        OutputLocation::S3 { bucket: bucket.to_owned(), prefix: "some/prefix".to_owned() };
    let options = OutputOptions {
        s3_endpoint: Some(endpoint.to_owned()),
        s3_access_key_id: Some(id.to_owned()),
        s3_secret_access_key: Some(secret.into()),
        ..options(location)
    };
    (server, options)
}

#[tokio::test]
async fn bucket_stores_reads_and_removes_output() {
    let python = std::env::var_os("CODELIA_TEST_PYTHON").map(PathBuf::from);
    let missing = python.is_none().then_some("CODELIA_TEST_PYTHON is not set: run `make test`");
    available("python", missing);
    let Some(python) = python else { return };
    let (scratch, fixture) = (Scratch::new().unwrap(), Fixture::new().await);
    let (_server, s3) = s3_server(&python, &scratch).await;
    let with = async |s3: OutputOptions| fixture.store.clone().with_output(&s3).await;
    let other_secret = OutputOptions { s3_secret_access_key: Some("wrong".into()), ..s3.clone() };
    let wrong = with(other_secret).await.unwrap_err().to_string();
    assert!(wrong.starts_with("output.store s3://output/some/prefix: cannot be used"), "{wrong}");
    let store = with(s3.clone()).await.unwrap();
    let place = OutputLocation::S3 { bucket: "output".to_owned(), prefix: "other".to_owned() };
    let elsewhere = with(OutputOptions { store: Some(place), ..s3 }).await.unwrap_err().to_string();
    assert!(elsewhere.contains("need the same one"), "{elsewhere}");

    partitions_of_past_days(&fixture).await;
    let session = fixture.session().await;
    let worker = fixture.worker("w").await;
    let lease = fixture.lease(&session, &worker).await.unwrap();
    let setup = Setup { fixture, scratch, store, session: session.id, worker, lease };
    let run = setup.insert(120 * HOUR, 0).await;
    setup.append(run).await;
    let tail = large(15);
    setup.commit(run, &with_tail(tail.clone(), 30)).await;
    let read: Vec<_> = large(0).into_iter().chain(tail).collect();
    assert_eq!(setup.read(run, 0).await.unwrap(), read);
    assert_eq!(setup.read(run, 12).await.unwrap()[0].data, b"cde", "a range");
    setup
        .fixture
        .execute(
            "UPDATE run_output SET object_offset = object_offset + 5 WHERE position IN (15, 25)",
        )
        .await;
    let short = setup.read(run, 15).await;
    assert!(
        matches!(
            short,
            Err(Error::Object { problem: ObjectProblem::Shortened { expected: 20 }, .. })
        ),
        "{short:?}"
    );
    setup
        .fixture
        .execute(
            "UPDATE run_output SET object_offset = object_offset + 50 WHERE position IN (15, 25)",
        )
        .await;
    let short = setup.read(run, 15).await;
    assert!(
        matches!(short, Err(Error::Object { problem: ObjectProblem::Shortened { .. }, .. })),
        "{short:?}"
    );

    // A purge removes what rows name, the sweep the rest of the day.
    let keep = Retention { output: HOUR, ..Retention::default() };
    setup
        .fixture
        .execute("INSERT INTO output_removals SELECT object FROM run_output WHERE position = 0")
        .await;
    setup.fixture.execute("DELETE FROM run_output WHERE position < 15").await;
    setup.remove_objects(&keep).await;
    setup.fixture.execute("DELETE FROM run_output").await;
    setup.remove_objects(&keep).await;
    assert_eq!(setup.store.output_days().await.unwrap(), Vec::<String>::new());
    setup.end().await;
}
