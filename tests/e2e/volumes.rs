//! Volumes: caches of a tenant that sessions mount. The package managers are in
//! `network/caches.rs`.

use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::PathBuf,
};

use anyhow::{Context, Result, ensure};
use codelia_proto::v1::{
    CreateSessionRequest, CreateVolumeRequest, DeleteVolumeRequest, FilesystemPolicy,
    GetVolumeRequest, ListVolumesRequest, Policy, SandboxMode, Session, StartRunRequest, Volume,
    VolumeMode, VolumeMount, VolumeMountList, outcome,
};
use codelia_store::EventKind;
use codelia_tests::{
    Client, Cluster, ClusterOptions, Process, Transcript, eventually, is_root, recorded_events,
    refusal, shell,
};
use rustix::process::{Pid, Signal, kill_process};
use tonic::{Code, Status};

use crate::{isolation::isolating, kills::started};

const PATH: &str = "/cache/test";

pub(crate) async fn create(client: &Client, name: &str, max_bytes: Option<i64>) -> Result<Volume> {
    let request = CreateVolumeRequest { volume_id: name.into(), max_bytes, ..Default::default() };
    client.volumes().create_volume(request).await?.into_inner().volume.context("a volume")
}

/// A policy that mounts a volume.
pub(crate) fn mounting(name: &str, path: &str, mode: VolumeMode) -> Policy {
    let mount = VolumeMount { name: name.into(), path: path.into(), mode: mode.into() };
    let volumes = Some(VolumeMountList { values: vec![mount] });
    let filesystem = Some(FilesystemPolicy { volumes, ..Default::default() });
    Policy { filesystem, ..Policy::default() }
}

async fn session(client: &Client, name: &str, mode: VolumeMode) -> Result<Session, Status> {
    let policy = Some(mounting(name, PATH, mode));
    client.create(CreateSessionRequest { policy, ..Default::default() }).await
}

async fn get(client: &Client, name: &str) -> Result<Volume, Status> {
    let found =
        client.volumes().get_volume(GetVolumeRequest { name: format!("volumes/{name}") }).await?;
    Ok(found.into_inner().volume.unwrap_or_default())
}

async fn delete(client: &Client, name: &str) -> Result<(), Status> {
    let request = DeleteVolumeRequest { name: format!("volumes/{name}") };
    client.volumes().delete_volume(request).await.map(drop)
}

/// Runs a script that must succeed and returns its output.
async fn output(client: &Client, session: &Session, script: &str) -> Result<String> {
    let done = client.exec(&session.name, script).await?;
    ensure!(matches!(done.outcome(), outcome::Kind::Exited(0)), "{script}: {done:?}");
    Ok(done.stdout_text())
}

/// The directories of volumes, and what is in the trash.
fn directories(cluster: &Cluster) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for worker in &cluster.workers {
        for name in ["volumes", "trash"] {
            let entries = fs::read_dir(worker.root.join(name))?;
            found.extend(
                entries
                    .map(|entry| entry.map(|entry| entry.path()))
                    .collect::<Result<Vec<_>, _>>()?,
            );
        }
    }
    Ok(found)
}

async fn nothing_is_left(cluster: &Cluster) {
    let is_gone =
        || async { directories(cluster).is_ok_and(|found| found.is_empty()).then_some(()) };
    eventually("no directory of a volume is left", is_gone).await;
}

/// Closes a session and waits until its volumes are free.
async fn close(client: &Client, session: &Session, volume: &str) -> Result<()> {
    client.close(&session.name).await?;
    let is_free =
        || async { get(client, volume).await.is_ok_and(|found| found.sessions == 0).then_some(()) };
    eventually("the volume is free", is_free).await;
    Ok(())
}

/// What a session writes is there in the next one, for the user of that session; only one writes at
/// a time.
async fn sessions_share_a_volume(mode: &'static str) -> Result<()> {
    let Some(cluster) = isolating(mode, 1).await? else { return Ok(()) };
    let client = cluster.tenant("a").await?;
    create(&client, "shared", None).await?;
    let first = session(&client, "shared", VolumeMode::Exclusive).await?;
    let write = format!(
        "cd {PATH} && id -u && stat -c %u . && umask 077 && mkdir d && echo 1 > d/f && \
                         echo x > run && chmod 755 run && ln -s /etc/passwd out && stat -c '%u %a' d/f"
    );
    let written = output(&client, &first, &write).await?;
    ensure!(written == "1000\n1000\n1000 600\n", "{written}");

    // The directory belongs to nobody who has an account, and only the worker gets there.
    let [directory] = &directories(&cluster)?[..] else { anyhow::bail!("one volume") };
    ensure!(fs::metadata(directory)?.permissions().mode() & 0o777 == 0o700);
    if is_root() {
        let file = fs::symlink_metadata(directory.join("data/d/f"))?;
        ensure!((file.uid(), file.gid()) == (65_534, 65_534), "{file:?}");
    }

    // A second writer is refused while the first session is open; readers are not.
    let refused = session(&client, "shared", VolumeMode::Exclusive).await.expect_err("two writers");
    ensure!(refusal(&refused).reason == "VOLUME_IN_USE", "{refused:?}");
    let reader = session(&client, "shared", VolumeMode::ReadOnly).await?;
    let read = output(
        &client,
        &reader,
        &format!("cd {PATH} && cat d/f && stat -c %u d/f && ! touch new 2>&1"),
    )
    .await?;
    ensure!(read.starts_with("1\n1000\n") && read.contains("Read-only file system"), "{read}");
    let refused = delete(&client, "shared").await.expect_err("it is mounted");
    ensure!(refusal(&refused).reason == "VOLUME_IN_USE", "{refused:?}");

    // A copy has the content and may change all of it, for itself.
    let copy = session(&client, "shared", VolumeMode::Copy).await?;
    let change = format!(
        "cd {PATH} && echo 2 > d/f && rm run && echo 2 > d/new && chmod 755 d && cat d/f && ls d"
    );
    ensure!(output(&client, &copy, &change).await? == "2\nf\nnew\n");
    let again =
        output(&client, &copy, &format!("cat {PATH}/d/new; findmnt -no OPTIONS {PATH} || true"))
            .await?;
    ensure!(again.starts_with("2\n"), "changes stay in the session: {again}");
    let unchanged =
        output(&client, &first, &format!("cd {PATH} && cat d/f && ls . d && stat -c %a d")).await?;
    ensure!(unchanged == "1\n.:\nd\nout\nrun\n\nd:\nf\n700\n", "{unchanged}");
    // Neither setuid nor devices work in it, and its links stay in the sandbox.
    let flags =
        output(&client, &first, &format!("grep ' {PATH} ' /proc/self/mounts; cat {PATH}/out"))
            .await?;
    ensure!(
        flags.contains("nosuid") && flags.contains("nodev") && flags.contains("codelia:x:1000"),
        "{flags}"
    );

    // The next writer, with another user on the host, owns what is there.
    client.close(&first.name).await?;
    let next = session(&client, "shared", VolumeMode::Exclusive).await?;
    let rewritten = output(
        &client,
        &next,
        &format!("cd {PATH} && cat d/f && echo 3 > d/f && rm -r d run out && ls | wc -l"),
    )
    .await?;
    ensure!(rewritten == "1\n0\n", "{rewritten}");
    for session in [&reader, &copy, &next] {
        client.close(&session.name).await?;
    }
    eventually("the volume can be deleted", || async { delete(&client, "shared").await.ok() })
        .await;
    ensure!(get(&client, "shared").await.is_err_and(|status| status.code() == Code::NotFound));
    nothing_is_left(&cluster).await;
    let tenant = "a".parse()?;
    let events = |kind| recorded_events(&cluster.store, &tenant, Some(kind));
    ensure!(!events(EventKind::VolumeCreated).await?.is_empty(), "the audit has its creation");
    ensure!(!events(EventKind::VolumeDeleted).await?.is_empty(), "the audit has its deletion");
    cluster.end().await
}

#[tokio::test]
async fn bwrap_sessions_share_a_volume() -> Result<()> {
    sessions_share_a_volume("bwrap").await
}

#[tokio::test]
async fn nsjail_sessions_share_a_volume() -> Result<()> {
    sessions_share_a_volume("nsjail").await
}

#[tokio::test]
async fn native_sessions_share_a_volume() -> Result<()> {
    sessions_share_a_volume("native").await
}

#[tokio::test]
async fn volume_of_another_tenant_is_not_found() -> Result<()> {
    let Some(cluster) = isolating("native", 1).await? else { return Ok(()) };
    let (owner, other) = (cluster.tenant("owner").await?, cluster.tenant("other").await?);
    create(&owner, "secret", None).await?;
    let first = session(&owner, "secret", VolumeMode::Exclusive).await?;
    output(&owner, &first, &format!("echo secret > {PATH}/file")).await?;

    for result in [get(&other, "secret").await.map(drop), delete(&other, "secret").await] {
        ensure!(result.is_err_and(|status| status.code() == Code::NotFound));
    }
    let refused = session(&other, "secret", VolumeMode::ReadOnly).await.expect_err("not theirs");
    ensure!(refusal(&refused).fields == ["policy.filesystem.volumes[0].name"], "{refused:?}");
    let listed =
        other.volumes().list_volumes(ListVolumesRequest::default()).await?.into_inner().volumes;
    ensure!(listed.is_empty(), "{listed:?}");

    // The same name is another volume.
    create(&other, "secret", None).await?;
    let theirs = session(&other, "secret", VolumeMode::Exclusive).await?;
    ensure!(output(&other, &theirs, &format!("ls {PATH} | wc -l")).await? == "0\n");
    // Nothing of the host's directory is to be seen from a session without it.
    let plain = owner.session().await?;
    let done = owner.exec(&plain.name, &format!("ls {PATH} /cache")).await?;
    ensure!(!matches!(done.outcome(), outcome::Kind::Exited(0)), "{done:?}");
    // A run cannot have a volume that its session does not have.
    let policy = Some(mounting("secret", PATH, VolumeMode::ReadOnly));
    let run = StartRunRequest { policy, ..shell(&plain.name, "true") };
    let refused = owner.start(run).await.expect_err("not of the session");
    ensure!(refused.message().contains("policy.filesystem.volumes"), "{refused:?}");
    // A run may have less than its session.
    let none = FilesystemPolicy { volumes: Some(VolumeMountList::default()), ..Default::default() };
    let policy = Some(Policy { filesystem: Some(none), ..Policy::default() });
    let run = owner
        .start(StartRunRequest { policy, ..shell(&first.name, &format!("test ! -e {PATH}")) })
        .await?;
    let done = owner.watch_to_end(&run.name, 0).await?;
    ensure!(matches!(done.outcome(), outcome::Kind::Exited(0)), "{done:?}");
    ensure!(
        output(&owner, &first, &format!("cat {PATH}/file")).await? == "secret\n",
        "the control"
    );
    cluster.end().await
}

#[tokio::test]
async fn tenant_has_at_most_100_volumes() -> Result<()> {
    let cluster =
        Cluster::start_with(ClusterOptions { workers: 0, ..ClusterOptions::default() }).await?;
    let (client, other) = (cluster.tenant("a").await?, cluster.tenant("b").await?);
    for number in 0..100 {
        create(&client, &format!("cache-{number}"), None).await?;
    }
    let request = CreateVolumeRequest { volume_id: "one-more".into(), ..Default::default() };
    let status = client.volumes().create_volume(request).await.expect_err("over the quota");
    let refused = refusal(&status);
    ensure!(
        (refused.code, refused.reason.as_str()) == (Code::ResourceExhausted, "TOO_MANY_VOLUMES")
    );
    ensure!(refused.quotas.iter().any(|quota| quota == "volumes"), "{refused:?}");
    ensure!(
        status.message().contains("codelia volume rm"),
        "says what to do: {}",
        status.message()
    );
    // The control: another tenant has its own, and one that is deleted makes room.
    create(&other, "one-more", None).await?;
    delete(&client, "cache-7").await?;
    create(&client, "one-more", None).await?;
    cluster.end().await
}

#[tokio::test]
async fn modes_without_volumes_refuse_them_by_field() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    create(&client, "cache", None).await?;
    for mode in [SandboxMode::Logical, SandboxMode::Container] {
        let policy = Some(mounting("cache", PATH, VolumeMode::Copy));
        let request = CreateSessionRequest { mode: mode.into(), policy, ..Default::default() };
        let refused = client.create(request).await.expect_err("no such mounts");
        ensure!(refused.message().contains("policy.filesystem.volumes"), "{refused:?}");
        ensure!(refused.message().contains("native, bwrap or nsjail"), "{refused:?}");
    }
    cluster.end().await
}

fn is_full(done: &Transcript) -> bool {
    matches!(done.outcome(), outcome::Kind::Limit(limit) if limit.resource == "volume_bytes")
}

#[tokio::test]
async fn run_that_fills_a_volume_is_stopped() -> Result<()> {
    let Some(cluster) = isolating("native", 1).await? else { return Ok(()) };
    let client = cluster.tenant("a").await?;
    create(&client, "small", Some(4 << 20)).await?;
    let writer = session(&client, "small", VolumeMode::Exclusive).await?;
    output(&client, &writer, &format!("head -c 2M /dev/zero > {PATH}/two")).await?;
    let used = get(&client, "small").await?.used_bytes;
    ensure!((2 << 20..3 << 20).contains(&used), "{used}");

    // While it runs: it would write for a long time.
    let script =
        format!("i=0; while :; do i=$((i+1)); head -c 1M /dev/zero > {PATH}/$i; sleep 0.2; done");
    let run = client.start(shell(&writer.name, &script)).await?;
    let done = client.watch_to_end(&run.name, 0).await?;
    ensure!(is_full(&done), "{done:?}");
    let used = get(&client, "small").await?.used_bytes;
    ensure!((4 << 20..32 << 20).contains(&used), "{used}");
    // A run may remove files, and one that ends before it was seen is not spared.
    let done = client.exec(&writer.name, &format!("rm {PATH}/*")).await?;
    ensure!(matches!(done.outcome(), outcome::Kind::Exited(0)), "{done:?}");
    let done = client.exec(&writer.name, &format!("head -c 5M /dev/zero > {PATH}/five")).await?;
    ensure!(is_full(&done), "{done:?}");
    // A copy of it is the session's own space.
    close(&client, &writer, "small").await?;
    let copy = session(&client, "small", VolumeMode::Copy).await?;
    output(&client, &copy, &format!("head -c 5M /dev/zero > {PATH}/more")).await?;
    cluster.end().await
}

#[tokio::test]
async fn unused_volumes_expire_and_the_oldest_are_evicted() -> Result<()> {
    let Some(cluster) = isolating("native", 1).await? else { return Ok(()) };
    let client = cluster.tenant("a").await?;
    for name in ["expired", "used", "old", "new"] {
        create(&client, name, None).await?;
        let writer = session(&client, name, VolumeMode::Exclusive).await?;
        output(&client, &writer, &format!("echo {name} > {PATH}/file")).await?;
        if name != "used" {
            close(&client, &writer, name).await?;
        }
    }
    ensure!(directories(&cluster)?.len() >= 4);
    cluster
        .database
        .execute(
            "UPDATE volumes SET used_at = now() - interval '31 days' WHERE name IN ('expired', 'used');
             UPDATE volumes SET used_at = now() - interval '1 day', used_bytes = 15::bigint << 30 WHERE name = 'old';
             UPDATE volumes SET used_bytes = 15::bigint << 30 WHERE name = 'new'",
        )
        .await?;
    let names = || async {
        let listed = client.volumes().list_volumes(ListVolumesRequest::default()).await.ok()?;
        let names: Vec<_> =
            listed.into_inner().volumes.into_iter().map(|volume| volume.volume_id).collect();
        (names == ["new", "used"]).then_some(())
    };
    eventually("the expired and the evicted volume are gone", names).await;
    let left = || async { directories(&cluster).is_ok_and(|found| found.len() == 2).then_some(()) };
    eventually("their directories are removed", left).await;
    cluster.end().await
}

#[tokio::test]
async fn volume_is_deleted_after_its_worker_was_killed() -> Result<()> {
    let Some(mut cluster) = isolating("bwrap", 1).await? else { return Ok(()) };
    let client = cluster.tenant("a").await?;
    create(&client, "cache", None).await?;
    let writer = session(&client, "cache", VolumeMode::Exclusive).await?;
    output(&client, &writer, &format!("echo kept > {PATH}/file")).await?;
    let run =
        client.start(shell(&writer.name, &format!("echo more > {PATH}/more; sleep 1000"))).await?;
    started(&client, &run.name).await?;
    let pid = Pid::from_raw(i32::try_from(cluster.workers[0].process.pid())?).context("pid")?;
    kill_process(pid, Signal::KILL)?;
    cluster.workers[0].process.exited().await?;
    cluster.restart_worker(0).await?;
    // The cache is still there, also for another session.
    client.close(&writer.name).await?;
    let next = session(&client, "cache", VolumeMode::Exclusive).await?;
    ensure!(output(&client, &next, &format!("cat {PATH}/file")).await? == "kept\n");
    close(&client, &next, "cache").await?;
    delete(&client, "cache").await?;
    nothing_is_left(&cluster).await;
    cluster.end().await
}

#[tokio::test]
async fn cli_manages_and_mounts_volumes() -> Result<()> {
    let Some(cluster) = isolating("native", 1).await? else { return Ok(()) };
    let client = cluster.tenant("a").await?;
    let codelia =
        async |arguments: &[&str]| Process::finish(cluster.cli(&client, arguments), b"").await;
    let created = codelia(&["volume", "create", "pip", "--max-size", "64m", "--ttl", "1h"]).await?;
    ensure!(created.code == Some(0) && created.stdout.contains("pip"), "{created:?}");
    let again = codelia(&["volume", "create", "pip"]).await?;
    ensure!(again.code != Some(0) && again.stderr.contains("exists"), "{again:?}");
    let mount = |mode: &str| format!("pip:{PATH}{mode}");
    let write =
        ["run", "--volume", &mount(":rw"), "--", "sh", "-c", &format!("echo hello > {PATH}/file")];
    ensure!(codelia(&write).await?.code == Some(0));
    let read =
        codelia(&["run", "--volume", &mount(""), "--", "cat", &format!("{PATH}/file")]).await?;
    ensure!(read.code == Some(0) && read.stdout == "hello\n", "{read:?}");
    let listed = codelia(&["volume", "ls"]).await?;
    ensure!(listed.stdout.contains("pip") && listed.stdout.contains("64 MiB"), "{listed:?}");
    let missing = codelia(&["run", "--volume", "nosuch:/cache/x", "--", "true"]).await?;
    ensure!(
        missing.code == Some(125) && missing.stderr.contains("codelia volume create nosuch"),
        "{missing:?}"
    );
    let removed = || async {
        codelia(&["volume", "rm", "pip"]).await.ok().filter(|done| done.code == Some(0))
    };
    eventually("the volume is removed", removed).await;
    nothing_is_left(&cluster).await;
    cluster.end().await
}
