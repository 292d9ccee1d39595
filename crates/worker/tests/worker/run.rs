//! Runs are executed once, streamed and committed.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use codelia_proto::{
    internal::v1::{
        CancelRunRequest, PushResult, attach_run_request::Kind as Input,
        attach_run_response::Kind as Answer,
    },
    v1::{CloseStdin, Detach, OutputStream, run_event::Kind as Event},
};
use codelia_store::{Cancellation, RunState};
use codelia_tests::eventually;
use codelia_types::{EndedRun, Outcome, Reason};

use crate::fixture::{Fixture, Settings, shell};

const SIGUSR1: i32 = 10;

#[tokio::test]
async fn output_and_outcome_are_committed() {
    let fixture = Fixture::new(Settings::default()).await;
    let session = fixture.held_session().await;
    let run = fixture.start(session, &shell("echo out; echo err >&2; pwd > root; exit 7")).await;
    let row = fixture.ended(run).await;
    assert_eq!(row.outcome(), Some(&Outcome::Exited(7)));
    let EndedRun { started_at, result, .. } = row.end.as_ref().unwrap();
    assert_eq!((result.output_bytes, result.output_truncated), (8, false));
    assert_eq!(row.worker.as_ref(), Some(&fixture.worker));
    assert!(started_at.is_some() && result.receipt.is_some());
    let mut output = fixture.output(run).await;
    output.sort_unstable();
    let mut expected = b"out\nerr\n".to_vec();
    expected.sort_unstable();
    assert_eq!(output, expected);
    let root = std::fs::read_to_string(fixture.directory(session).join("root")).unwrap();
    assert_eq!(Some(root.trim_end()), result.sandbox_root.as_deref());
    fixture.end().await;
}

#[tokio::test]
async fn stdin_reaches_command_and_output_is_streamed() {
    let fixture = Fixture::new(Settings::default()).await;
    let session = fixture.held_session().await;
    let mut spec = shell("cat");
    spec.command.stdin = true;
    let run = fixture.start(session, &spec).await;
    let mut caller = fixture.attach(run, false).await;
    assert!(matches!(caller.event().await, Some(Event::Assigned(_))));
    assert!(matches!(caller.event().await, Some(Event::Started(_))));
    caller.send(Input::Stdin(b"hello".to_vec())).await;
    caller.until("hello").await;
    caller.send(Input::CloseStdin(CloseStdin {})).await;
    assert!(matches!(caller.next().await, Some(Answer::Committed(_))));
    assert!(caller.next().await.is_none());
    assert_eq!(fixture.row(run).await.outcome(), Some(&Outcome::Exited(0)));
    fixture.end().await;
}

/// Seconds since the epoch.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64()
}

#[tokio::test]
async fn release_interval_delays_output_and_outcome() {
    const INTERVAL: f64 = 4.0;
    let fixture = Fixture::new(Settings::default()).await;
    let session = fixture.held_session().await;
    let mut spec = shell("echo early; touch done");
    spec.policy.resources.release_interval = Some(Duration::from_secs(4));
    // Start at the beginning of an interval, so that there is time to look.
    tokio::time::sleep(Duration::from_secs_f64(INTERVAL - now() % INTERVAL)).await;
    let next = (now() / INTERVAL).ceil() * INTERVAL;
    let run = fixture.start(session, &spec).await;
    let done = fixture.directory(session).join("done");
    eventually("the command has ended", || async { done.exists().then_some(()) }).await;
    let (row, output) = (fixture.row(run).await, fixture.output(run).await);
    if now() < next {
        assert!(row.outcome().is_none() && output.is_empty(), "{row:?} {output:?}");
    }
    let row = fixture.ended(run).await;
    assert_eq!(
        (row.outcome(), fixture.output(run).await),
        (Some(&Outcome::Exited(0)), b"early\n".to_vec())
    );
    let EndedRun { ended_at, result, .. } = row.end.unwrap();
    let ended = ended_at.unix_timestamp_nanos() as f64 / 1e9;
    assert!(ended >= next, "{ended} {next}");
    let usage = result.usage.unwrap();
    assert_eq!(
        [usage.wall_time, usage.cpu_time].map(|time| time.as_nanos() % 4_000_000_000),
        [0, 0],
        "{usage:?}"
    );
    fixture.end().await;
}

#[tokio::test]
async fn attach_with_push_returns_committed_result() {
    let fixture = Fixture::new(Settings::default()).await;
    let session = fixture.held_session().await;
    let (run, incarnation) = fixture.record(session, &shell("read line; echo $line")).await;
    let mut caller = fixture.push_and_attach(&run, incarnation).await;
    let committed = loop {
        if let Some(Answer::Committed(committed)) = caller.next().await {
            break serde_json::from_slice(&committed.ended).unwrap();
        }
    };
    let (reported, stored) = (run.ended(committed).unwrap(), fixture.row(run.id).await);
    assert_eq!(reported.outcome(), Some(&Outcome::Exited(0)));
    assert_eq!(format!("{reported:?}"), format!("{stored:?}"));
    fixture.end().await;
}

#[tokio::test]
async fn poll_finds_run_with_lost_push() {
    let fixture = Fixture::new(Settings::default()).await;
    let session = fixture.held_session().await;
    let (run, _) = fixture.record(session, &shell("true")).await;
    assert_eq!(run.state, RunState::Running);
    assert_eq!(fixture.ended(run.id).await.outcome(), Some(&Outcome::Exited(0)));
    fixture.end().await;
}

#[tokio::test]
async fn poll_finds_run_of_unleased_session() {
    let fixture = Fixture::new(Settings::default()).await;
    let session = fixture.session(Duration::from_secs(600)).await;
    let (run, _) = fixture.record(session, &shell("true")).await;
    assert_eq!(run.state, RunState::Queued);
    assert_eq!(fixture.ended(run.id).await.outcome(), Some(&Outcome::Exited(0)));
    assert_eq!(fixture.holder(session).await.as_ref(), Some(&fixture.worker));
    fixture.end().await;
}

#[tokio::test]
async fn repeated_push_executes_once() {
    let fixture = Fixture::new(Settings::default()).await;
    let session = fixture.held_session().await;
    let (run, incarnation) = fixture.record(session, &shell("echo once >> times")).await;
    assert_eq!(fixture.push(&run, incarnation).await, PushResult::Started);
    for _ in 0..20 {
        let again = fixture.push(&run, incarnation).await;
        assert!(matches!(again, PushResult::Started | PushResult::Rejected), "{again:?}");
    }
    fixture.ended(run.id).await;
    assert_eq!(fixture.push(&run, incarnation).await, PushResult::Rejected);
    // A later run of the session takes the same path.
    let last = fixture.start(session, &shell("true")).await;
    fixture.ended(last).await;
    assert_eq!(
        std::fs::read_to_string(fixture.directory(session).join("times")).unwrap(),
        "once\n"
    );
    fixture.end().await;
}

#[tokio::test]
async fn run_without_slot_waits_in_store() {
    let fixture = Fixture::new(Settings { slots: 1, ..Settings::default() }).await;
    let session = fixture.held_session().await;
    let mut blocking = shell("cat");
    blocking.command.stdin = true;
    let first = fixture.start(session, &blocking).await;
    let (second, incarnation) = fixture.record(session, &shell("true")).await;
    assert_eq!(fixture.push(&second, incarnation).await, PushResult::Queued);
    let state = || async {
        Some(fixture.row(second.id).await.state).filter(|state| *state == RunState::Queued)
    };
    eventually("the run is queued", state).await;
    let caller = fixture.attach(first, false).await;
    caller.send(Input::CloseStdin(CloseStdin {})).await;
    assert_eq!(fixture.ended(second.id).await.outcome(), Some(&Outcome::Exited(0)));
    assert_eq!(fixture.ended(first).await.outcome(), Some(&Outcome::Exited(0)));
    fixture.end().await;
}

#[tokio::test]
async fn large_output_is_stored_byte_for_byte() {
    let fixture = Fixture::new(Settings::default()).await;
    let session = fixture.held_session().await;
    let run = fixture.start(session, &shell("seq 1 500000")).await;
    let row = fixture.ended(run).await;
    let expected: String = (1..=500_000).map(|n| format!("{n}\n")).collect();
    assert_eq!(row.output_bytes(), i64::try_from(expected.len()).unwrap());
    assert!(fixture.output(run).await == expected.into_bytes(), "the bytes differ");
    fixture.end().await;
}

#[tokio::test]
async fn output_over_limit_is_truncated() {
    let fixture = Fixture::new(Settings::default()).await;
    let session = fixture.held_session().await;
    let mut spec = shell("head -c 5000000 /dev/zero; exit 3");
    spec.limits.output_bytes = 1_000_000;
    let run = fixture.start(session, &spec).await;
    let row = fixture.ended(run).await;
    assert_eq!(row.outcome(), Some(&Outcome::Exited(3)));
    let result = row.result().unwrap();
    assert_eq!((result.output_bytes, result.output_truncated), (1_000_000, true));
    assert_eq!(fixture.output(run).await.len(), 1_000_000);
    fixture.end().await;
}

#[tokio::test]
async fn timeout_kills_run_that_ignores_sigterm() {
    let fixture = Fixture::new(Settings::default()).await;
    let session = fixture.held_session().await;
    let mut spec = shell("trap '' TERM; echo trapped; while :; do sleep 1; done");
    spec.limits.timeout = Duration::from_millis(300);
    let run = fixture.start(session, &spec).await;
    assert_eq!(fixture.ended(run).await.outcome(), Some(&Outcome::TimedOut));
    fixture.end().await;
}

#[tokio::test]
async fn canceled_run_ends_as_canceled() {
    let fixture = Fixture::new(Settings::default()).await;
    let session = fixture.held_session().await;
    let run = fixture.start(session, &shell("sleep 1000")).await;
    let request = CancelRunRequest { run_id: run.to_string(), grace: None };
    assert!(fixture.caller.clone().cancel_run(request).await.unwrap().into_inner().known);
    assert_eq!(fixture.ended(run).await.outcome(), Some(&Outcome::Canceled));
    fixture.end().await;
}

#[tokio::test]
async fn poll_finds_cancel_in_store() {
    let fixture = Fixture::new(Settings::default()).await;
    let session = fixture.held_session().await;
    let run = fixture.start(session, &shell("sleep 1000")).await;
    fixture.store.run_cancel(&fixture.tenant, run, &Cancellation::default()).await.unwrap();
    assert_eq!(fixture.ended(run).await.outcome(), Some(&Outcome::Canceled));
    fixture.end().await;
}

#[tokio::test]
async fn run_ends_with_owner_unless_detached() {
    let fixture = Fixture::new(Settings::default()).await;
    let session = fixture.held_session().await;
    let mut spec = shell("echo up; sleep 1000");
    spec.ends_with_caller = true;
    let owned = fixture.start(session, &spec).await;
    let mut owner = fixture.attach(owned, true).await;
    owner.until("up").await;
    drop(owner);
    assert_eq!(fixture.ended(owned).await.outcome(), Some(&Outcome::Canceled));

    spec.command.argv[2] =
        "trap 'echo heard' USR1; echo up; until [ -e go ]; do sleep 0.05; done".into();
    let detached = fixture.start(session, &spec).await;
    let mut owner = fixture.attach(detached, true).await;
    owner.until("up").await;
    owner.send(Input::Detach(Detach {})).await;
    owner.send(Input::Signal(SIGUSR1)).await;
    // The signal was sent after the detach.
    owner.until("heard").await;
    drop(owner);
    std::fs::write(fixture.directory(session).join("go"), "").unwrap();
    assert_eq!(fixture.ended(detached).await.outcome(), Some(&Outcome::Exited(0)));
    fixture.end().await;
}

#[tokio::test]
async fn missing_program_refuses_the_run() {
    let fixture = Fixture::new(Settings::default()).await;
    let session = fixture.held_session().await;
    let mut spec = shell("");
    spec.command.argv = vec!["/no/such/program".into()];
    let run = fixture.start(session, &spec).await;
    let row = fixture.ended(run).await;
    assert!(
        matches!(row.outcome(), Some(Outcome::Refused(refusal)) if refusal.reason == Reason::ExecutableNotFound)
    );
    assert_eq!(row.end.unwrap().started_at, None);
    fixture.end().await;
}

#[tokio::test]
async fn unenforceable_requested_limit_is_refused_by_name() {
    let fixture = Fixture::new(Settings::default()).await;
    let session = fixture.held_session().await;
    let mut spec = shell("true");
    spec.requested_limits.memory_bytes = Some(1 << 20);
    let run = fixture.start(session, &spec).await;
    let row = fixture.ended(run).await;
    let Some(Outcome::Refused(refusal)) = row.outcome() else { panic!("not refused") };
    assert_eq!(refusal.reason, Reason::Unenforceable);
    assert!(refusal.message.contains("limits.memory_bytes"), "{}", refusal.message);
    fixture.end().await;
}

#[tokio::test]
async fn terminal_output_is_one_stream() {
    let fixture = Fixture::new(Settings::default()).await;
    let session = fixture.held_session().await;
    let mut spec = shell("echo out; echo err >&2; stty size");
    spec.command.terminal = Some(codelia_types::TerminalSize { columns: 99, rows: 33 });
    let run = fixture.start(session, &spec).await;
    fixture.ended(run).await;
    let chunks = fixture.store.output_read(&fixture.tenant, run, 0, 1 << 20).await.unwrap();
    assert!(chunks.iter().all(|chunk| chunk.stream as i32 == OutputStream::Stdout as i32));
    assert_eq!(fixture.output(run).await, b"out\r\nerr\r\n33 99\r\n");
    fixture.end().await;
}
