//! Runs: executed once, streamed, committed.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use codelia_proto::{
    internal::v1::{
        CancelRunRequest, PushResult, attach_run_request::Kind as Input, attach_run_response::Kind as Answer,
    },
    v1::{CloseStdin, Detach, OutputStream, run_event::Kind as Event},
};
use codelia_store::RunState;
use codelia_tests::eventually;
use codelia_types::Outcome;

use crate::world::{Shape, World, shell};

const SIGUSR1: i32 = 10;

#[tokio::test]
async fn output_and_outcome_are_committed_with_streams_apart() {
    let world = World::new(Shape::default()).await;
    let session = world.held_session().await;
    let run = world.start(session, &shell("echo out; echo err >&2; pwd > here; exit 7")).await;
    let row = world.ended(run).await;
    assert_eq!(row.outcome, Some(Outcome::Exited(7)));
    assert_eq!((row.output_bytes, row.output_truncated), (8, false));
    assert_eq!(row.worker.as_ref(), Some(&world.worker));
    assert!(row.started_at.is_some() && row.receipt.is_some());
    let mut output = world.output(run).await;
    output.sort_unstable();
    let mut expected = b"out\nerr\n".to_vec();
    expected.sort_unstable();
    assert_eq!(output, expected);
    let here = std::fs::read_to_string(world.directory(session).join("here")).unwrap();
    assert_eq!(here.trim_end(), row.sandbox_root.unwrap());
    world.end().await;
}

#[tokio::test]
async fn input_reaches_the_command_and_the_watcher_sees_the_answer() {
    let world = World::new(Shape::default()).await;
    let session = world.held_session().await;
    let mut spec = shell("cat");
    spec.command.stdin = true;
    let run = world.start(session, &spec).await;
    let mut caller = world.attach(run, false).await;
    assert!(matches!(caller.event().await, Some(Event::Assigned(_))));
    assert!(matches!(caller.event().await, Some(Event::Started(_))));
    caller.send(Input::Stdin(b"hello".to_vec())).await;
    caller.until("hello").await;
    caller.send(Input::CloseStdin(CloseStdin {})).await;
    assert!(matches!(caller.next().await, Some(Answer::Committed(_))));
    assert!(caller.next().await.is_none());
    assert_eq!(world.row(run).await.outcome, Some(Outcome::Exited(0)));
    world.end().await;
}

/// Seconds since the epoch.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64()
}

#[tokio::test]
async fn output_and_outcome_are_given_out_on_the_grid_of_the_policy() {
    const GRID: f64 = 4.0;
    let world = World::new(Shape::default()).await;
    let session = world.held_session().await;
    let mut spec = shell("echo early; touch done");
    spec.policy.resources.release_interval_ms = Some(4000);
    // Between two times there must be room to look.
    tokio::time::sleep(Duration::from_secs_f64(GRID - now() % GRID)).await;
    let next = (now() / GRID).ceil() * GRID;
    let run = world.start(session, &spec).await;
    let done = world.directory(session).join("done");
    eventually("the command did its work", || async { done.exists().then_some(()) }).await;
    let (row, output) = (world.row(run).await, world.output(run).await);
    if now() < next {
        assert!(row.outcome.is_none() && output.is_empty(), "{row:?} {output:?}");
    }
    let row = world.ended(run).await;
    assert_eq!((row.outcome, world.output(run).await), (Some(Outcome::Exited(0)), b"early\n".to_vec()));
    let ended = row.ended_at.unwrap().unix_timestamp_nanos() as f64 / 1e9;
    assert!(ended >= next, "{ended} {next}");
    let usage = row.usage.unwrap();
    assert_eq!(
        [usage.wall_time, usage.cpu_time].map(|time| time.as_nanos() % 4_000_000_000),
        [0, 0],
        "{usage:?}"
    );
    world.end().await;
}

#[tokio::test]
async fn an_attach_that_brings_its_run_starts_it_and_ends_with_what_was_stored() {
    let world = World::new(Shape::default()).await;
    let session = world.held_session().await;
    let (run, incarnation) = world.record(session, &shell("read line; echo $line")).await;
    let mut caller = world.push_and_attach(&run, incarnation).await;
    let ended = loop {
        if let Some(Answer::Committed(committed)) = caller.next().await {
            break serde_json::from_str(&committed.ended_json).unwrap();
        }
    };
    let (told, stored) = (run.ended(ended).unwrap(), world.row(run.id).await);
    assert_eq!(told.outcome, Some(Outcome::Exited(0)));
    assert_eq!(format!("{told:?}"), format!("{stored:?}"));
    world.end().await;
}

#[tokio::test]
async fn a_run_whose_push_was_lost_is_found() {
    let world = World::new(Shape::default()).await;
    let session = world.held_session().await;
    let (run, _) = world.record(session, &shell("true")).await;
    assert_eq!(run.state, RunState::Running);
    assert_eq!(world.ended(run.id).await.outcome, Some(Outcome::Exited(0)));
    world.end().await;
}

#[tokio::test]
async fn a_run_of_a_session_that_nobody_holds_is_found() {
    let world = World::new(Shape::default()).await;
    let session = world.session(Duration::from_secs(600)).await;
    let (run, _) = world.record(session, &shell("true")).await;
    assert_eq!(run.state, RunState::Queued);
    assert_eq!(world.ended(run.id).await.outcome, Some(Outcome::Exited(0)));
    assert_eq!(world.holder(session).await.as_ref(), Some(&world.worker));
    world.end().await;
}

#[tokio::test]
async fn a_run_that_is_pushed_again_and_again_is_executed_once() {
    let world = World::new(Shape::default()).await;
    let session = world.held_session().await;
    let (run, life) = world.record(session, &shell("echo once >> times")).await;
    assert_eq!(world.push(&run, life).await, PushResult::Started);
    for _ in 0..20 {
        let again = world.push(&run, life).await;
        assert!(matches!(again, PushResult::Started | PushResult::Rejected), "{again:?}");
    }
    world.ended(run.id).await;
    assert_eq!(world.push(&run, life).await, PushResult::Rejected);
    // Another run of the session passes through the same path after it.
    let last = world.start(session, &shell("true")).await;
    world.ended(last).await;
    assert_eq!(std::fs::read_to_string(world.directory(session).join("times")).unwrap(), "once\n");
    world.end().await;
}

#[tokio::test]
async fn a_run_without_a_slot_waits_in_the_store_and_then_runs() {
    let world = World::new(Shape { slots: 1, ..Shape::default() }).await;
    let session = world.held_session().await;
    let mut holds = shell("cat");
    holds.command.stdin = true;
    let first = world.start(session, &holds).await;
    let (second, life) = world.record(session, &shell("true")).await;
    assert_eq!(world.push(&second, life).await, PushResult::Queued);
    let state =
        || async { Some(world.row(second.id).await.state).filter(|state| *state == RunState::Queued) };
    eventually("the run is queued", state).await;
    let caller = world.attach(first, false).await;
    caller.send(Input::CloseStdin(CloseStdin {})).await;
    assert_eq!(world.ended(second.id).await.outcome, Some(Outcome::Exited(0)));
    assert_eq!(world.ended(first).await.outcome, Some(Outcome::Exited(0)));
    world.end().await;
}

#[tokio::test]
async fn much_output_is_stored_byte_for_byte() {
    let world = World::new(Shape::default()).await;
    let session = world.held_session().await;
    let run = world.start(session, &shell("seq 1 500000")).await;
    let row = world.ended(run).await;
    let expected: String = (1..=500_000).map(|n| format!("{n}\n")).collect();
    assert_eq!(row.output_bytes, i64::try_from(expected.len()).unwrap());
    assert!(world.output(run).await == expected.into_bytes(), "the bytes differ");
    world.end().await;
}

#[tokio::test]
async fn output_over_the_limit_is_cut_and_the_command_goes_on() {
    let world = World::new(Shape::default()).await;
    let session = world.held_session().await;
    let mut spec = shell("head -c 5000000 /dev/zero; exit 3");
    spec.limits.output_bytes = 1_000_000;
    let run = world.start(session, &spec).await;
    let row = world.ended(run).await;
    assert_eq!(row.outcome, Some(Outcome::Exited(3)));
    assert_eq!((row.output_bytes, row.output_truncated), (1_000_000, true));
    assert_eq!(world.output(run).await.len(), 1_000_000);
    world.end().await;
}

#[tokio::test]
async fn a_run_is_ended_at_its_timeout_even_if_it_ignores_being_asked() {
    let world = World::new(Shape::default()).await;
    let session = world.held_session().await;
    let mut spec = shell("trap '' TERM; echo trapped; while :; do sleep 1; done");
    spec.limits.timeout = Duration::from_millis(300);
    let run = world.start(session, &spec).await;
    assert_eq!(world.ended(run).await.outcome, Some(Outcome::TimedOut));
    world.end().await;
}

#[tokio::test]
async fn a_canceled_run_ends_as_canceled() {
    let world = World::new(Shape::default()).await;
    let session = world.held_session().await;
    let run = world.start(session, &shell("sleep 1000")).await;
    let request = CancelRunRequest { run_id: run.to_string() };
    assert!(world.caller.clone().cancel_run(request).await.unwrap().into_inner().known);
    assert_eq!(world.ended(run).await.outcome, Some(Outcome::Canceled));
    world.end().await;
}

#[tokio::test]
async fn a_cancel_that_only_the_store_knows_of_is_found() {
    let world = World::new(Shape::default()).await;
    let session = world.held_session().await;
    let run = world.start(session, &shell("sleep 1000")).await;
    world.store.run_cancel(&world.tenant, run).await.unwrap();
    assert_eq!(world.ended(run).await.outcome, Some(Outcome::Canceled));
    world.end().await;
}

#[tokio::test]
async fn a_run_ends_with_its_owner_unless_it_was_detached() {
    let world = World::new(Shape::default()).await;
    let session = world.held_session().await;
    let mut spec = shell("echo up; sleep 1000");
    spec.ends_with_caller = true;
    let owned = world.start(session, &spec).await;
    let mut owner = world.attach(owned, true).await;
    owner.until("up").await;
    drop(owner);
    assert_eq!(world.ended(owned).await.outcome, Some(Outcome::Canceled));

    spec.command.argv[2] = "trap 'echo heard' USR1; echo up; until [ -e go ]; do sleep 0.05; done".into();
    let detached = world.start(session, &spec).await;
    let mut owner = world.attach(detached, true).await;
    owner.until("up").await;
    owner.send(Input::Detach(Detach {})).await;
    owner.send(Input::Signal(SIGUSR1)).await;
    // The signal came after the detach.
    owner.until("heard").await;
    drop(owner);
    std::fs::write(world.directory(session).join("go"), "").unwrap();
    assert_eq!(world.ended(detached).await.outcome, Some(Outcome::Exited(0)));
    world.end().await;
}

#[tokio::test]
async fn a_command_that_cannot_be_executed_is_refused() {
    let world = World::new(Shape::default()).await;
    let session = world.held_session().await;
    let mut spec = shell("");
    spec.command.argv = vec!["/no/such/program".into()];
    let run = world.start(session, &spec).await;
    let row = world.ended(run).await;
    assert!(
        matches!(row.outcome, Some(Outcome::Refused(refusal)) if refusal.reason == "EXECUTABLE_NOT_FOUND")
    );
    assert_eq!(row.started_at, None);
    world.end().await;
}

#[tokio::test]
async fn a_limit_that_was_asked_for_and_cannot_be_enforced_is_refused_by_name() {
    let world = World::new(Shape::default()).await;
    let session = world.held_session().await;
    let mut spec = shell("true");
    spec.asked.memory_bytes = Some(1 << 20);
    let run = world.start(session, &spec).await;
    let Some(Outcome::Refused(refusal)) = world.ended(run).await.outcome else { panic!("not refused") };
    assert_eq!(refusal.reason, "UNENFORCEABLE");
    assert!(refusal.message.contains("limits.memory_bytes"), "{}", refusal.message);
    world.end().await;
}

#[tokio::test]
async fn a_terminal_is_one_stream() {
    let world = World::new(Shape::default()).await;
    let session = world.held_session().await;
    let mut spec = shell("echo out; echo err >&2; stty size");
    spec.command.terminal = Some(codelia_types::TerminalSize { columns: 99, rows: 33 });
    let run = world.start(session, &spec).await;
    world.ended(run).await;
    let chunks = world.store.output_read(&world.tenant, run, 0, 1 << 20).await.unwrap();
    assert!(chunks.iter().all(|chunk| chunk.stream as i32 == OutputStream::Stdout as i32));
    assert_eq!(world.output(run).await, b"out\r\nerr\r\n33 99\r\n");
    world.end().await;
}
