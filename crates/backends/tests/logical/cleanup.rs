//! A sandbox leaves no control group behind.

use codelia_backends::{Backend, Prepared, Stdio};

use crate::harness::{Fixture, command, eventually, groups_of, has_groups};

#[tokio::test]
async fn unused_prepared_sandbox_leaves_no_cgroup() {
    let fixture = Fixture::new().await;
    if !has_groups(&fixture) {
        return;
    }
    let (discarded, dropped) = (fixture.plan(), fixture.plan());
    let prepared = [
        fixture.backend.prepare(&discarded).await.unwrap(),
        fixture.backend.prepare(&dropped).await.unwrap(),
    ];
    assert!(!groups_of(discarded.sandbox).is_empty(), "the control: a live sandbox has groups");
    let [first, second] = prepared;
    assert!(first.discard().await.is_clean());
    assert!(groups_of(discarded.sandbox).is_empty());
    drop(second);
    eventually("the groups are removed", || groups_of(dropped.sandbox).is_empty()).await;
}

#[tokio::test]
async fn dropped_running_sandbox_leaves_no_cgroup() {
    let fixture = Fixture::new().await;
    if !has_groups(&fixture) {
        return;
    }
    let started = fixture.start(&["sleep", "1000"]).await;
    assert!(!groups_of(started.sandbox).is_empty());
    drop(started.running);
    eventually("the groups are removed", || groups_of(started.sandbox).is_empty()).await;
}

#[test]
fn sandbox_dropped_after_runtime_leaves_no_cgroup() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let fixture = runtime.block_on(Fixture::new());
    if !has_groups(&fixture) {
        return;
    }
    let plan = fixture.plan();
    let prepared = runtime.block_on(fixture.backend.prepare(&plan)).unwrap();
    drop(runtime);
    drop(prepared);
    assert!(groups_of(plan.sandbox).is_empty());
}

#[tokio::test]
async fn refused_launch_leaves_no_cgroup() {
    let fixture = Fixture::new().await;
    let plan = fixture.plan();
    let prepared: Box<dyn Prepared> = fixture.backend.prepare(&plan).await.unwrap();
    let null = || std::fs::File::open("/dev/null").unwrap().into();
    let stdio = Stdio::Files { stdin: null(), stdout: null(), stderr: null() };
    assert!(prepared.launch(&command(&["/no/such/program"]), stdio).await.is_err());
    assert!(groups_of(plan.sandbox).is_empty());
}

#[tokio::test]
async fn concurrent_sandboxes_do_not_interfere() {
    let fixture = std::sync::Arc::new(Fixture::new().await);
    let mut tasks = tokio::task::JoinSet::new();
    for number in 0..40 {
        let fixture = fixture.clone();
        tasks.spawn(async move {
            let text = fixture.run(&["sh", "-c", &format!("echo {number}; cat")]).await.text();
            assert_eq!(text, format!("{number}\n"));
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
}
