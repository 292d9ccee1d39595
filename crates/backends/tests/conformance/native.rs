//! What only mode `native` has: a process that holds a session's namespaces, and networks that the
//! runs of a session use one after the other.

use std::{
    fs,
    io::{BufRead, BufReader},
    os::unix::process::ExitStatusExt,
    process::{Command, Stdio},
};

use codelia_sys::{Pid, process};
use codelia_types::Outcome;

use crate::{
    cleanup::eventually,
    harness::{Fixture, Kind, Session, is_root},
};

/// Makes the test below hold a sandbox until it is killed.
const HOLD: &str = "CODELIA_TEST_HOLD_NATIVE";

/// Prints the network namespace of the command.
const NETWORK: &str = "readlink /proc/self/ns/net";

/// Lists the living processes of a user with this name. Sessions of this process have the user
/// alone only as root.
fn processes_of(uid: u32, name: &str) -> Vec<Pid> {
    let is_one = |pid: &Pid| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        status.starts_with(&format!("Name:\t{name}\n"))
            && status.contains(&format!("Uid:\t{uid}\t"))
            && !status.contains("State:\tZ")
    };
    let names = fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.file_name());
    let pids = names.filter_map(|name| Pid::from_raw(name.to_str()?.parse().ok()?));
    pids.filter(is_one).collect()
}

fn holders(session: &Session) -> Vec<Pid> {
    processes_of(session.ids.uid, "codelia-session")
}

/// A fixture for cases that find processes by the user of a session.
async fn fixture() -> Option<Fixture> {
    let fixture = Fixture::new(Kind::Native).await?;
    is_root("only root gives each session its own user").then_some(fixture)
}

#[tokio::test]
async fn runs_of_a_session_share_a_zygote() {
    let Some(mut fixture) = fixture().await else { return };
    let (session, other) = (fixture.session(), fixture.session());
    assert_eq!(fixture.sh(&session, "true").await.outcome, Outcome::Exited(0));
    let first = holders(&session);
    assert_eq!(first.len(), 1);
    assert_eq!(fixture.sh(&session, "true").await.outcome, Outcome::Exited(0));
    assert_eq!(holders(&session), first, "the second run uses it");
    assert_eq!(fixture.sh(&other, "true").await.outcome, Outcome::Exited(0));
    assert_ne!(holders(&other), first, "another session does not");
    fixture.limits.tmp_bytes /= 2;
    assert_eq!(fixture.sh(&session, "true").await.outcome, Outcome::Exited(0));
    assert_eq!(holders(&session).len(), 2, "another plan has another one");
    fixture.backend.forget_session(session.id);
    eventually("the zygotes are gone", || holders(&session).is_empty()).await;
    assert_eq!(holders(&other).len(), 1, "the control");
}

#[tokio::test]
async fn sandboxes_die_with_their_zygote() {
    let Some(fixture) = fixture().await else { return };
    let session = fixture.session();
    let mut started = fixture.start(&session, "setsid sleep 1001 & echo ready; sleep 1002").await;
    assert_eq!(started.line(), "ready");
    let sleepers = || processes_of(session.ids.uid, "sleep").len();
    eventually("the control: the processes are seen", || sleepers() == 2).await;
    let prepared = fixture.backend.prepare(&fixture.plan(&session)).await.unwrap();
    for holder in holders(&session) {
        process::kill(holder).unwrap();
    }
    eventually("no process is left", || sleepers() == 0).await;
    assert_eq!(started.running.wait().await.0, Outcome::Signaled(9));
    assert!(started.running.destroy().await.is_clean());
    eventually("the prepared sandbox is reported dead", || !prepared.is_alive()).await;
    assert!(prepared.discard().await.is_clean());
    assert_eq!(
        fixture.sh(&session, "true").await.outcome,
        Outcome::Exited(0),
        "there is another one"
    );
}

#[tokio::test]
async fn empty_network_is_used_again() {
    let Some(fixture) = Fixture::new(Kind::Native).await else { return };
    let (session, other) = (fixture.session(), fixture.session());
    let first = fixture.sh(&session, NETWORK).await.stdout;
    assert_eq!(fixture.sh(&session, NETWORK).await.stdout, first);
    assert_ne!(fixture.sh(&other, NETWORK).await.stdout, first, "never by another session");
    let mut networks = vec![first];
    let mut running = Vec::new();
    for _ in 0..4 {
        let mut started = fixture.start(&session, &format!("{NETWORK}; read end")).await;
        networks.push(format!("{}\n", started.line()));
        running.push(started);
    }
    let concurrent = networks[1..].iter().collect::<std::collections::BTreeSet<_>>();
    assert_eq!(concurrent.len(), 4, "never by two sandboxes at once: {networks:?}");
    for started in running {
        started.finish().await;
    }
}

#[tokio::test]
async fn network_with_a_closing_connection_is_not_used() {
    let Some(fixture) = Fixture::new(Kind::Native).await else { return };
    let session = fixture.session();
    // The side that closes first waits for a minute.
    let connect = r#"perl -MSocket -e 'socket(L,AF_INET,SOCK_STREAM,0); bind(L,pack_sockaddr_in(7300,INADDR_LOOPBACK)) or die;
        listen(L,1); socket(C,AF_INET,SOCK_STREAM,0); connect(C,pack_sockaddr_in(7300,INADDR_LOOPBACK)) or die;
        accept(S,L) or die; close(S); sysread(C,$x,1); close(C)'"#;
    let used = fixture.sh(&session, &format!("{connect} && {NETWORK}")).await.stdout;
    assert!(used.starts_with("net:"), "{used}");
    let again = fixture.sh(&session, &format!("{connect} && {NETWORK}")).await.stdout;
    assert!(again.starts_with("net:"), "the port is free: {again}");
    assert_ne!(again, used);
}

/// Counts attempts of its own run only, although the counters are those of the network.
#[tokio::test]
async fn attempts_of_earlier_runs_do_not_count() {
    let Some(fixture) = Fixture::new(Kind::Native).await else { return };
    let session = fixture.session();
    let attempts = |finished: crate::harness::Finished| {
        finished.usage.network.map_or(0, |network| network.unreachable_attempts)
    };
    let try_it = "perl -MSocket -e 'socket(C,AF_INET,SOCK_STREAM,0); connect(C,pack_sockaddr_in(80,inet_aton(\"192.0.2.1\")))'";
    assert_eq!(attempts(fixture.sh(&session, try_it).await), 1, "the control");
    assert_eq!(attempts(fixture.sh(&session, "true").await), 0);
    assert_eq!(attempts(fixture.sh(&session, try_it).await), 1);
}

/// Not a case of its own: the worker that the next one kills.
#[tokio::test]
async fn hold_a_sandbox() {
    if std::env::var_os(HOLD).is_none() {
        return;
    }
    let Some(fixture) = fixture().await else { return };
    let session = fixture.session();
    let mut started = fixture.start(&session, "setsid sleep 1001 & echo ready; sleep 1002").await;
    assert_eq!(started.line(), "ready");
    println!("\nuser {}", session.ids.uid);
    std::future::pending::<()>().await;
}

#[tokio::test]
async fn killed_worker_leaves_no_zygote_and_no_sandbox() {
    if fixture().await.is_none() {
        return;
    }
    let mut worker = Command::new(std::env::current_exe().unwrap());
    worker
        .args(["--exact", "native::hold_a_sandbox", "--nocapture"])
        .env(HOLD, "1")
        .stdout(Stdio::piped());
    let mut worker = worker.spawn().unwrap();
    let lines = BufReader::new(worker.stdout.take().unwrap()).lines().map_while(Result::ok);
    let user =
        lines.into_iter().find_map(|line| line.strip_prefix("user ")?.parse::<u32>().ok()).unwrap();
    let count =
        || ["codelia-session", "codelia-init", "sleep"].map(|name| processes_of(user, name).len());
    eventually("the control: the processes are seen", || count() == [1, 1, 2]).await;
    worker.kill().unwrap();
    assert_eq!(worker.wait().unwrap().signal(), Some(9));
    eventually("no process is left", || count() == [0, 0, 0]).await;
}
