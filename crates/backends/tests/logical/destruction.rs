//! What a sandbox leaves behind: nothing.

use codelia_backends::{Backend, Prepared, Stdio};

use crate::harness::{Place, command, eventually, groups_of, has_groups};

#[tokio::test]
async fn a_prepared_sandbox_that_is_discarded_or_dropped_leaves_no_group() {
    let place = Place::new().await;
    if !has_groups(&place) {
        return;
    }
    let (discarded, dropped) = (place.plan(), place.plan());
    let prepared =
        [place.backend.prepare(&discarded).await.unwrap(), place.backend.prepare(&dropped).await.unwrap()];
    assert!(!groups_of(discarded.sandbox).is_empty(), "the control: it has groups while it lives");
    let [first, second] = prepared;
    assert!(first.discard().await.is_clean());
    assert!(groups_of(discarded.sandbox).is_empty());
    drop(second);
    eventually("the groups are removed", || groups_of(dropped.sandbox).is_empty()).await;
}

#[tokio::test]
async fn a_running_sandbox_that_is_dropped_leaves_no_group() {
    let place = Place::new().await;
    if !has_groups(&place) {
        return;
    }
    let started = place.start(&["sleep", "1000"]).await;
    assert!(!groups_of(started.sandbox).is_empty());
    drop(started.running);
    eventually("the groups are removed", || groups_of(started.sandbox).is_empty()).await;
}

#[test]
fn a_sandbox_that_outlives_its_runtime_leaves_no_group() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let place = runtime.block_on(Place::new());
    if !has_groups(&place) {
        return;
    }
    let plan = place.plan();
    let prepared = runtime.block_on(place.backend.prepare(&plan)).unwrap();
    drop(runtime);
    drop(prepared);
    assert!(groups_of(plan.sandbox).is_empty());
}

#[tokio::test]
async fn a_refused_launch_leaves_no_group() {
    let place = Place::new().await;
    let plan = place.plan();
    let prepared: Box<dyn Prepared> = place.backend.prepare(&plan).await.unwrap();
    let null = || std::fs::File::open("/dev/null").unwrap().into();
    let stdio = Stdio { stdin: null(), stdout: null(), stderr: null() };
    assert!(prepared.launch(&command(&["/no/such/program"]), stdio).await.is_err());
    assert!(groups_of(plan.sandbox).is_empty());
}

#[tokio::test]
async fn many_sandboxes_at_once_do_not_disturb_each_other() {
    let place = std::sync::Arc::new(Place::new().await);
    let mut tasks = tokio::task::JoinSet::new();
    for number in 0..40 {
        let place = place.clone();
        tasks.spawn(async move {
            let text = place.run(&["sh", "-c", &format!("echo {number}; cat")]).await.text();
            assert_eq!(text, format!("{number}\n"));
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
}
