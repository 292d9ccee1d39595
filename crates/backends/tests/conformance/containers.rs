//! Cases for mode `container` only: engine, images, labels, and the sweep after killed workers.

use std::process::{Command, Stdio};

use codelia_backends::{Backend as _, ContainerOptions, Error, container};
use codelia_policy::{Mount, Plan};

use crate::harness::{Fixture, Kind, container_options, engine_socket, in_mode};

/// Runs a `docker` command against a test engine.
fn docker(kind: Kind, arguments: &[&str]) -> String {
    let host = format!("unix://{}", engine_socket(kind).display());
    let done = Command::new("docker").args(["--host", &host]).args(arguments).output().unwrap();
    assert!(done.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap().trim().to_owned()
}

/// Creates a container with the labels that a worker sets.
fn create_container(kind: Kind, owner: &str, namespace: &str) -> String {
    let labels = [format!("codelia.owner={owner}"), format!("codelia.pid-namespace={namespace}")];
    docker(kind, &["create", "--label", &labels[0], "--label", &labels[1], "codelia-base", "true"])
}

fn exists(kind: Kind, id: &str) -> bool {
    !docker(kind, &["ps", "--all", "--quiet", "--filter", &format!("id={id}")]).is_empty()
}

/// Returns the owner label of a process that has ended.
fn dead_owner() -> String {
    let mut child = Command::new("true").stdin(Stdio::null()).spawn().unwrap();
    child.wait().unwrap();
    format!("{}-0", child.id())
}

async fn sweep_removes_only_containers_of_dead_workers(fixture: Fixture) {
    let own = codelia_sys::process_id::ProcessId::current().unwrap().to_string();
    let namespace = codelia_sys::proc_self::namespace_id("pid").unwrap().to_string();
    let left = create_container(fixture.kind, &dead_owner(), &namespace);
    let others = [
        create_container(fixture.kind, &own, &namespace),
        // Another PID namespace: whether the owner lives cannot be known here.
        create_container(fixture.kind, &dead_owner(), "1"),
        create_container(fixture.kind, "not-an-owner", &namespace),
        docker(fixture.kind, &["create", "codelia-base", "true"]),
    ];
    let directory = fixture.control_directory();
    let dead = directory.join(format!("{}-x", dead_owner()));
    std::fs::create_dir_all(directory.join("left")).unwrap();
    std::os::unix::fs::symlink("left", &dead).unwrap();
    let prepared = fixture.backend.prepare(&fixture.plan(&fixture.session())).await.unwrap();

    assert!(fixture.backend.upkeep().await.unwrap() >= 2);
    assert!(!exists(fixture.kind, &left));
    assert!(others.iter().all(|id| exists(fixture.kind, id)));
    assert_eq!(
        std::fs::read_dir(&directory).unwrap().count(),
        2,
        "only the live owner's, with its link"
    );
    assert!(prepared.discard().await.is_clean());
    docker(
        fixture.kind,
        &[&["rm", "--force"], others.each_ref().map(String::as_str).as_slice()].concat(),
    );
}

#[tokio::test]
async fn container_is_locked_down() {
    let Some(fixture) = Fixture::new(Kind::Runc).await else { return };
    let session = fixture.session();
    let plan = fixture.plan(&session);
    let prepared = fixture.backend.prepare(&plan).await.unwrap();
    let id = docker(
        Kind::Runc,
        &["ps", "--quiet", "--filter", &format!("label=codelia.sandbox={}", plan.sandbox)],
    );
    let is = |field: &str, value: &str| {
        assert_eq!(
            docker(Kind::Runc, &["inspect", "--format", &format!("{{{{json {field}}}}}"), &id]),
            value,
            "{field}"
        );
    };
    is(".HostConfig.CapDrop", r#"["ALL"]"#);
    is(".HostConfig.CapAdd", "null");
    is(".HostConfig.Privileged", "false");
    is(".HostConfig.ReadonlyRootfs", "true");
    is(".HostConfig.NetworkMode", r#""none""#);
    is(".HostConfig.Memory", &plan.limits.memory_bytes.to_string());
    is(".HostConfig.MemorySwap", &plan.limits.memory_bytes.to_string());
    is(".HostConfig.PidsLimit", &(plan.limits.pids + 1).to_string());
    is(".HostConfig.RestartPolicy.Name", r#""no""#);
    is(".HostConfig.LogConfig.Type", r#""none""#);
    is(".Config.User", &format!("\"{}:{}\"", session.ids.uid, session.ids.gid));
    let options =
        docker(Kind::Runc, &["inspect", "--format", "{{json .HostConfig.SecurityOpt}}", &id]);
    assert!(options.contains("no-new-privileges") && options.contains("seccomp={"), "{options}");
    assert!(!options.contains("unconfined"), "{options}");
    assert!(prepared.discard().await.is_clean());
    assert!(!exists(Kind::Runc, &id));
}

async fn engine_socket_is_never_mounted(mut fixture: Fixture) {
    let socket = engine_socket(fixture.kind);
    for path in [socket.clone(), socket.parent().unwrap().to_owned()] {
        fixture.policy.filesystem.read_only_paths = Some(vec![path]);
        let refused = fixture.backend.prepare(&fixture.plan(&fixture.session())).await;
        assert!(
            matches!(refused, Err(Error::Unenforceable { field: "policy.filesystem" })),
            "{refused:?}"
        );
    }
    fixture.policy.filesystem.read_only_paths = None;
    let stdout = fixture
        .stdout_of("ls /var/run/docker.sock /run/docker.sock 2>&1 | grep -c 'No such file'")
        .await;
    assert_eq!(stdout, "2\n");
}

async fn missing_image_is_refused_by_name(fixture: Fixture) {
    let options = container_options(fixture.kind, &fixture.control_directory());
    let other = container(ContainerOptions { image: "no-such-image".into(), ..options }).unwrap();
    let refused = other.prepare(&fixture.plan(&fixture.session())).await.unwrap_err().to_string();
    assert!(refused.contains("IMAGE_MISSING") && refused.contains("no-such-image"), "{refused}");
    let found = other.probe().await;
    assert!(
        !found.usable && found.gaps.iter().any(|gap| gap.remedy.contains("no-such-image")),
        "{found:?}"
    );
}

async fn profile_selects_image_and_unknown_profile_is_refused(mut fixture: Fixture) {
    for profile in ["base", "again"] {
        fixture.policy.container.profile = Some(profile.to_owned());
        assert_eq!(fixture.stdout_of("echo fine").await, "fine\n");
    }
    fixture.policy.container.profile = Some("gone".to_owned());
    let refused =
        fixture.backend.prepare(&fixture.plan(&fixture.session())).await.unwrap_err().to_string();
    assert!(refused.contains("IMAGE_MISSING") && refused.contains("codelia-gone"), "{refused}");
    fixture.policy.container.profile = Some("unknown".to_owned());
    let refused = fixture.backend.prepare(&fixture.plan(&fixture.session())).await;
    assert!(
        matches!(&refused, Err(Error::Unenforceable { field: "policy.container.profile" })),
        "{refused:?}"
    );
}

#[tokio::test]
async fn mode_without_images_refuses_profile() {
    let Some(mut fixture) = Fixture::new(Kind::Bwrap).await else { return };
    fixture.policy.container.profile = Some("base".to_owned());
    assert_eq!(fixture.try_plan(&fixture.session()).unwrap_err().field, "policy.container.profile");
}

#[tokio::test]
async fn container_mode_is_unusable_without_engine() {
    let options = container_options(Kind::Runc, std::path::Path::new("/nonexistent"));
    let found = container(ContainerOptions { socket: "/no/engine".into(), ..options })
        .unwrap()
        .probe()
        .await;
    assert!(!found.usable && found.gaps[0].missing.contains("/no/engine"), "{found:?}");
}

/// Makes a policy that gVisor cannot enforce.
type Change = fn(&mut Fixture);

#[tokio::test]
async fn gvisor_refuses_unenforceable_fields() {
    let Some(fixture) = Fixture::new(Kind::Runsc).await else { return };
    assert!(
        !fixture.host.enforceable.violations && !fixture.host.enforceable.executables,
        "gVisor gained a feature: update this test"
    );
    let changes: [(&str, Change); 3] = [
        ("policy.process.allow_exec", |fixture| fixture.policy.process.allow_exec = Some(false)),
        ("policy.process.allowed_executables", |fixture| {
            fixture.policy.process.allowed_executables = Some(vec!["/usr/bin/sh".into()]);
        }),
        ("policy.syscalls.violation_limit", |fixture| {
            fixture.policy.syscalls.violation_limit = Some(3)
        }),
    ];
    for (field, change) in changes {
        let mut fixture = Fixture::new(Kind::Runsc).await.unwrap();
        change(&mut fixture);
        let session = fixture.session();
        assert_eq!(fixture.try_plan(&session).unwrap_err().field, field);
    }
    let denied = |plan: &mut Plan| {
        plan.mounts.push(Mount::Hidden { target: "/usr/bin/nice".into(), even_if_absent: true })
    };
    let mut plan = fixture.plan(&fixture.session());
    denied(&mut plan);
    let refused = fixture.backend.prepare(&plan).await;
    let field = "policy.filesystem.denied_paths";
    assert!(
        matches!(&refused, Err(Error::Unenforceable { field: named }) if *named == field),
        "{refused:?}"
    );
}

#[tokio::test]
async fn gvisor_refuses_blocked_calls() {
    let Some(fixture) = Fixture::new(Kind::Runsc).await else { return };
    // unshare(CLONE_NEWUSER), which gVisor allows without our filter.
    let script = r#"perl -e 'syscall(272, 0x10000000) == 0 and print "reached"; print 0+$!'"#;
    assert_eq!(fixture.stdout_of(script).await, "1");
}

/// Only gVisor may run without a violation limit.
async fn shared_kernel_needs_violation_limit(fixture: Fixture) {
    let mut plan = fixture.plan(&fixture.session());
    plan.security.as_mut().unwrap().violation_limit = None;
    let refused = fixture.backend.prepare(&plan).await;
    assert!(matches!(refused, Err(Error::SharedKernel)), "{refused:?}");
}

async fn probe_reports_missing_cgroup_namespace(fixture: Fixture) {
    let own = std::fs::read_link("/proc/self/ns/cgroup").unwrap();
    let inside = fixture.stdout_of("readlink /proc/self/ns/cgroup").await;
    let found = fixture.backend.probe().await;
    let is_reported = found.gaps.iter().any(|gap| gap.missing.contains("cgroup namespaces"));
    assert_eq!(is_reported, own.to_string_lossy() == inside.trim(), "{inside}: {found:?}");
}

macro_rules! with_every_engine {
    ($($name:ident),+ $(,)?) => {
        in_mode!(runc = Runc: $($name),+);
        in_mode!(podman = Podman: $($name),+);
    };
}

with_every_engine!(
    sweep_removes_only_containers_of_dead_workers,
    engine_socket_is_never_mounted,
    missing_image_is_refused_by_name,
    profile_selects_image_and_unknown_profile_is_refused,
    shared_kernel_needs_violation_limit,
    probe_reports_missing_cgroup_namespace,
);
