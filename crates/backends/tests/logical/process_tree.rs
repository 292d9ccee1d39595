//! Processes that try to outlive their command.

use std::{io::Write, process::Stdio};

use codelia_sys::{Pid, process};
use codelia_types::Outcome;

use crate::harness::{Fixture, Started, has_groups, pid, wait_for_end};

/// Starts a daemon in its own session that ignores signals, a stopped process and a child, then
/// prints `ready`.
const HOSTILE: &str = r#"
setsid --fork sh -c 'trap "" TERM HUP INT; echo $$ >> pids; exec sleep 1000' </dev/null >/dev/null 2>&1
sh -c 'echo $$ >> pids; kill -STOP $$' &
sh -c 'trap "" TERM; echo $$ >> pids; sleep 1000 & wait' &
while [ "$(wc -l < pids 2>/dev/null || echo 0)" -lt 3 ]; do :; done
echo ready
"#;

async fn start_hostile(fixture: &Fixture, then: &str) -> (Started, Vec<Pid>) {
    let mut started = fixture.start(&["sh", "-c", &format!("{HOSTILE}\n{then}")]).await;
    assert_eq!(started.line(), "ready");
    let text = std::fs::read_to_string(fixture.root.path().join("pids")).unwrap();
    let pids: Vec<Pid> = text.lines().map(pid).collect();
    assert_eq!(pids.len(), 3);
    (started, pids)
}

#[tokio::test]
async fn processes_die_with_the_command() {
    for fixture in [Fixture::new().await, Fixture::without_groups().await] {
        let (started, pids) = start_hostile(&fixture, "read line; exit 3").await;
        assert!(pids.iter().all(|&pid| process::is_alive(pid)), "the control: the processes run");
        assert_eq!(started.finish(b"go\n".to_vec()).await.outcome, Outcome::Exited(3));
        assert!(!pids.iter().any(|&pid| process::is_alive(pid)));
    }
}

#[tokio::test]
async fn processes_die_with_kill_tree() {
    for fixture in [Fixture::new().await, Fixture::without_groups().await] {
        let (mut started, pids) = start_hostile(&fixture, "trap '' TERM; read line").await;
        started.running.kill_tree().await;
        assert_eq!(started.running.wait().await.0, Outcome::Signaled(9));
        assert!(!pids.iter().any(|&pid| process::is_alive(pid)));
        assert!(started.running.destroy().await.is_clean());
    }
}

#[tokio::test]
async fn processes_die_with_dropped_sandbox() {
    for fixture in [Fixture::new().await, Fixture::without_groups().await] {
        let (started, pids) = start_hostile(&fixture, "read line").await;
        drop(started.running);
        pids.into_iter().for_each(wait_for_end);
    }
}

/// Set for the copy of this test that holds a sandbox and is killed.
const HOLDER: &str = "CODELIA_TEST_HOLDER";

#[tokio::test]
async fn processes_die_with_killed_worker() {
    if std::env::var_os(HOLDER).is_some() {
        hold_a_sandbox().await;
    }
    let mut holder = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "process_tree::processes_die_with_killed_worker", "--nocapture"])
        .env(HOLDER, "1")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let stdout = std::io::BufReader::new(holder.stdout.take().unwrap());
    let held = std::io::BufRead::lines(stdout).map(Result::unwrap).find_map(|line| {
        line.split_once("held: ").map(|(_, pids)| pids.split(' ').map(pid).collect::<Vec<_>>())
    });
    let pids = held.unwrap();
    assert!(pids.iter().all(|&pid| process::is_alive(pid)), "the control: the processes run");
    holder.kill().unwrap();
    holder.wait().unwrap();
    pids.into_iter().for_each(wait_for_end);
}

/// Without groups: only the next worker process removes those of a killed one.
async fn hold_a_sandbox() {
    let fixture = Fixture::without_groups().await;
    let (_started, pids) = start_hostile(&fixture, "read line").await;
    println!("held: {}", pids.iter().map(ToString::to_string).collect::<Vec<_>>().join(" "));
    std::future::pending::<()>().await;
}

#[tokio::test]
async fn command_that_kills_init_dies() {
    for fixture in [Fixture::new().await, Fixture::without_groups().await] {
        let mut started =
            fixture.start(&["sh", "-c", "echo $$; read line; kill -9 $PPID; read line"]).await;
        let command = pid(&started.line());
        started.stdin.write_all(b"go\n").unwrap();
        assert_eq!(started.running.wait().await.0, Outcome::Signaled(9));
        wait_for_end(command);
        let receipt = started.running.destroy().await;
        let counted = fixture.host.enforceable.pids;
        assert_eq!(
            receipt.is_clean(),
            counted,
            "without a group an empty sandbox cannot be proved"
        );
    }
}

#[tokio::test]
async fn command_that_stops_init_can_be_killed() {
    let fixture = Fixture::new().await;
    if !has_groups(&fixture) {
        return;
    }
    let (mut started, pids) =
        start_hostile(&fixture, "kill -STOP $PPID; echo stopped; read line").await;
    assert_eq!(started.line(), "stopped");
    started.running.kill_tree().await;
    assert_eq!(started.running.wait().await.0, Outcome::Signaled(9));
    assert!(!pids.iter().any(|&pid| process::is_alive(pid)));
    assert!(started.running.destroy().await.is_clean());
}

#[tokio::test]
async fn fork_bomb_is_killed() {
    let fixture = Fixture::new().await;
    if !has_groups(&fixture) {
        return;
    }
    let bomb = "bomb() { bomb 2>/dev/null | bomb 2>/dev/null & }; echo ready; bomb; read line";
    let mut started = fixture.start(&["sh", "-c", bomb]).await;
    assert_eq!(started.line(), "ready");
    started.running.kill_tree().await;
    started.running.wait().await;
    assert!(started.running.destroy().await.is_clean());
}
