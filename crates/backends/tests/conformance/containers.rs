//! What only mode `container` has: an engine, an image, labels, and what workers that were killed left.

use std::process::{Command, Stdio};

use codelia_backends::{Backend as _, ContainerOptions, Error, container};
use codelia_policy::{Mount, Plan};

use crate::harness::{Kind, Place, container_options, engine_socket, in_mode};

/// Asks an engine of the tests.
fn docker(kind: Kind, arguments: &[&str]) -> String {
    let host = format!("unix://{}", engine_socket(kind).display());
    let done = Command::new("docker").args(["--host", &host]).args(arguments).output().unwrap();
    assert!(done.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap().trim().to_owned()
}

/// A container as a worker would have made it that was this process.
fn leave_container(kind: Kind, owner: &str, namespace: &str) -> String {
    let labels = [format!("codelia.owner={owner}"), format!("codelia.pid-namespace={namespace}")];
    docker(kind, &["create", "--label", &labels[0], "--label", &labels[1], "codelia-base", "true"])
}

fn exists(kind: Kind, id: &str) -> bool {
    !docker(kind, &["ps", "--all", "--quiet", "--filter", &format!("id={id}")]).is_empty()
}

/// A process that has ended, as a label tells it.
fn gone() -> String {
    let mut child = Command::new("true").stdin(Stdio::null()).spawn().unwrap();
    child.wait().unwrap();
    format!("{}-0", child.id())
}

async fn what_a_killed_worker_left_is_removed_and_nothing_else(place: Place) {
    let own = codelia_sys::process_id::Owner::this_process().unwrap().to_string();
    let namespace = codelia_sys::proc_self::namespace("pid").unwrap().to_string();
    let left = leave_container(place.kind, &gone(), &namespace);
    let others = [
        leave_container(place.kind, &own, &namespace),
        // Its process ids are not ours: nobody here can tell whether the owner lives.
        leave_container(place.kind, &gone(), "1"),
        leave_container(place.kind, "not-an-owner", &namespace),
        docker(place.kind, &["create", "codelia-base", "true"]),
    ];
    let directory = place.control_directory();
    let dead = directory.join(format!("{}-x", gone()));
    std::fs::create_dir_all(&dead).unwrap();
    let prepared = place.backend.prepare(&place.plan(&place.session())).await.unwrap();

    assert!(place.backend.sweep().await.unwrap() >= 2);
    assert!(!exists(place.kind, &left) && !dead.exists());
    assert!(others.iter().all(|id| exists(place.kind, id)));
    assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 1, "the living one's");
    assert!(prepared.discard().await.is_clean());
    docker(place.kind, &[&["rm", "--force"], others.each_ref().map(String::as_str).as_slice()].concat());
}

#[tokio::test]
async fn a_container_is_as_closed_as_it_can_be() {
    let Some(place) = Place::of(Kind::Runc).await else { return };
    let session = place.session();
    let plan = place.plan(&session);
    let prepared = place.backend.prepare(&plan).await.unwrap();
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
    let options = docker(Kind::Runc, &["inspect", "--format", "{{json .HostConfig.SecurityOpt}}", &id]);
    assert!(options.contains("no-new-privileges") && options.contains("seccomp={"), "{options}");
    assert!(!options.contains("unconfined"), "{options}");
    assert!(prepared.discard().await.is_clean());
    assert!(!exists(Kind::Runc, &id));
}

async fn the_engines_socket_is_never_opened_to_a_command(mut place: Place) {
    let socket = engine_socket(place.kind);
    for path in [socket.clone(), socket.parent().unwrap().to_owned()] {
        place.policy.filesystem.read_only_paths = Some(vec![path]);
        let refused = place.backend.prepare(&place.plan(&place.session())).await;
        assert!(matches!(refused, Err(Error::Unenforceable { field: "policy.filesystem" })), "{refused:?}");
    }
    place.policy.filesystem.read_only_paths = None;
    let said = place.says("ls /var/run/docker.sock /run/docker.sock 2>&1 | grep -c 'No such file'").await;
    assert_eq!(said, "2\n");
}

async fn an_image_that_is_missing_is_refused_by_its_name(place: Place) {
    let options = container_options(place.kind, &place.control_directory());
    let other = container(ContainerOptions { image: "no-such-image".into(), ..options }).unwrap();
    let refused = other.prepare(&place.plan(&place.session())).await.unwrap_err().to_string();
    assert!(refused.contains("IMAGE_MISSING") && refused.contains("no-such-image"), "{refused}");
    let found = other.probe().await;
    assert!(!found.usable && found.gaps.iter().any(|gap| gap.remedy.contains("no-such-image")), "{found:?}");
}

async fn a_profile_names_an_image_and_an_unknown_one_is_refused(mut place: Place) {
    for profile in ["base", "again"] {
        place.policy.container.profile = Some(profile.to_owned());
        assert_eq!(place.says("echo fine").await, "fine\n");
    }
    place.policy.container.profile = Some("gone".to_owned());
    let refused = place.backend.prepare(&place.plan(&place.session())).await.unwrap_err().to_string();
    assert!(refused.contains("IMAGE_MISSING") && refused.contains("codelia-gone"), "{refused}");
    place.policy.container.profile = Some("unheard".to_owned());
    let refused = place.backend.prepare(&place.plan(&place.session())).await;
    assert!(
        matches!(&refused, Err(Error::Unenforceable { field: "policy.container.profile" })),
        "{refused:?}"
    );
}

#[tokio::test]
async fn a_mode_without_images_refuses_a_profile() {
    let Some(mut place) = Place::of(Kind::Bwrap).await else { return };
    place.policy.container.profile = Some("base".to_owned());
    assert_eq!(place.try_plan(&place.session()).unwrap_err().field, "policy.container.profile");
}

#[tokio::test]
async fn without_an_engine_the_mode_is_not_usable() {
    let options = container_options(Kind::Runc, std::path::Path::new("/nonexistent"));
    let found = container(ContainerOptions { socket: "/no/engine".into(), ..options }).unwrap().probe().await;
    assert!(!found.usable && found.gaps[0].missing.contains("/no/engine"), "{found:?}");
}

/// A plan that gVisor could not keep.
type Change = fn(&mut Place);

#[tokio::test]
async fn what_gvisor_cannot_keep_is_refused_by_its_field() {
    let Some(place) = Place::of(Kind::Runsc).await else { return };
    assert!(!place.host.enforceable.violations && !place.host.enforceable.executables, "or the table is old");
    let changes: [(&str, Change); 3] = [
        ("policy.process.allow_exec", |place| place.policy.process.allow_exec = Some(false)),
        ("policy.process.allowed_executables", |place| {
            place.policy.process.allowed_executables = Some(vec!["/usr/bin/sh".into()]);
        }),
        ("policy.syscalls.violation_limit", |place| place.policy.syscalls.violation_limit = Some(3)),
    ];
    for (field, change) in changes {
        let mut place = Place::of(Kind::Runsc).await.unwrap();
        change(&mut place);
        let session = place.session();
        assert_eq!(place.try_plan(&session).unwrap_err().field, field);
    }
    let denied = |plan: &mut Plan| {
        plan.mounts.push(Mount::Hidden { target: "/usr/bin/nice".into(), even_if_absent: true })
    };
    let mut plan = place.plan(&place.session());
    denied(&mut plan);
    let refused = place.backend.prepare(&plan).await;
    let field = "policy.filesystem.denied_paths";
    assert!(matches!(&refused, Err(Error::Unenforceable { field: named }) if *named == field), "{refused:?}");
}

#[tokio::test]
async fn blocked_calls_are_refused_by_gvisor_too() {
    let Some(place) = Place::of(Kind::Runsc).await else { return };
    // unshare(CLONE_NEWUSER), which gVisor itself would allow.
    let script = r#"perl -e 'syscall(272, 0x10000000) == 0 and print "reached"; print 0+$!'"#;
    assert_eq!(place.says(script).await, "1");
}

/// What is not asked of gVisor is asked of everybody else.
async fn less_is_asked_only_of_a_kernel_that_is_not_the_hosts(place: Place) {
    let mut plan = place.plan(&place.session());
    plan.security.as_mut().unwrap().violation_limit = None;
    let refused = place.backend.prepare(&plan).await;
    assert!(matches!(refused, Err(Error::SharedKernel)), "{refused:?}");
}

async fn a_namespace_that_the_engine_cannot_give_is_told(place: Place) {
    let own = std::fs::read_link("/proc/self/ns/cgroup").unwrap();
    let inside = place.says("readlink /proc/self/ns/cgroup").await;
    let found = place.backend.probe().await;
    let is_told = found.gaps.iter().any(|gap| gap.missing.contains("control-group namespaces"));
    assert_eq!(is_told, own.to_string_lossy() == inside.trim(), "{inside}: {found:?}");
}

macro_rules! by_every_engine {
    ($($name:ident),+ $(,)?) => {
        in_mode!(runc = Runc: $($name),+);
        in_mode!(podman = Podman: $($name),+);
    };
}

by_every_engine!(
    what_a_killed_worker_left_is_removed_and_nothing_else,
    the_engines_socket_is_never_opened_to_a_command,
    an_image_that_is_missing_is_refused_by_its_name,
    a_profile_names_an_image_and_an_unknown_one_is_refused,
    less_is_asked_only_of_a_kernel_that_is_not_the_hosts,
    a_namespace_that_the_engine_cannot_give_is_told,
);
