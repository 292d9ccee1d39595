//! Lists change while runs are being executed, and a run may have less than its session.

use anyhow::{Context, Result, ensure};
use codelia_proto::v1::{NetworkMode, UpdateSessionRequest};
use codelia_tests::{Exec, Process, refusal};
use tonic::Status;

use super::{ALLOWED, OTHER, Place, exit_code, network_policy, with_authority};

/// Prints the status of a request to each host, until the run is canceled.
pub(super) fn poll(hosts: &[&str]) -> String {
    let get = |host: &&str| {
        format!(
            "printf '{host}=%s\\n' $(curl -s -o /dev/null --max-time 5 -w '%{{http_code}}' http://{host}/hello)"
        )
    };
    format!(
        "while :; do {}; sleep 0.05; done",
        hosts.iter().map(get).collect::<Vec<_>>().join("; ")
    )
}

async fn update(place: &Place, session: &str, hosts: &[&str]) -> Result<(), Status> {
    let request = UpdateSessionRequest {
        name: session.to_owned(),
        update_mask: Some(prost_types::FieldMask { paths: vec!["network".into()] }),
        network: network_policy(hosts, &[]).network,
        ..UpdateSessionRequest::default()
    };
    place.client.sessions().update_session(request).await.map(drop)
}

#[tokio::test]
async fn running_run_follows_the_lists_of_its_session() -> Result<()> {
    let Some(place) = Place::start("bwrap").await? else { return Ok(()) };
    let session = place.session(&[ALLOWED], &[]).await?;
    let mut run =
        Exec::start(&place.client, with_authority(&session, &poll(&[ALLOWED, OTHER]))).await?;
    run.until_stdout(&format!("{ALLOWED}=200")).await?;
    run.until_stdout(&format!("{OTHER}=403")).await?;
    update(&place, &session, &[OTHER]).await?;
    run.until_stdout(&format!("{OTHER}=200")).await?;
    run.until_stdout(&format!("{ALLOWED}=403")).await?;
    drop(run);

    // Later runs have the new lists, too, and the session shows them.
    let get = |host: &str| {
        format!("curl -s -o /dev/null --max-time 20 -w '%{{http_code}}' http://{host}/hello")
    };
    ensure!(place.output(&session, &get(OTHER)).await? == "200", "the new host");
    ensure!(place.output(&session, &get(ALLOWED)).await? == "403", "the old host");
    let shown = place.client.get_session(&session).await?.policy.context("a policy")?.network;
    let hosts = shown.context("a network policy")?.allowed_hosts.context("hosts")?.values;
    ensure!(hosts == [OTHER], "{hosts:?}");
    place.end().await
}

#[tokio::test]
async fn change_ends_connections_that_are_no_longer_allowed() -> Result<()> {
    let Some(place) = Place::start("bwrap").await? else { return Ok(()) };
    let session = place.session(&[ALLOWED], &[]).await?;
    // Without end, unless the proxy ends it.
    let mut run = Exec::start(
        &place.client,
        with_authority(&session, &format!("curl -sN http://{ALLOWED}/slow")),
    )
    .await?;
    run.until_stdout("tick").await?;
    update(&place, &session, &[OTHER]).await?;
    let done = run.finish().await?;
    // A connection that ends in an ordinary way would have been a complete response.
    ensure!(exit_code(&done).is_some_and(|code| code != 0), "{done:?}");
    place.end().await
}

#[tokio::test]
async fn change_must_stay_within_the_installation() -> Result<()> {
    let policy = "network: {mode: proxy, allowed_hosts: ['*.example.com']}";
    let Some(place) = Place::start_under("bwrap", policy, Vec::new()).await? else { return Ok(()) };
    let session = place.session(&[ALLOWED], &[]).await?;
    let refused = refusal(&update(&place, &session, &["example.org"]).await.unwrap_err());
    ensure!(
        refused.fields.iter().any(|field| field.contains("network.allowed_hosts")),
        "{refused:?}"
    );
    update(&place, &session, &[OTHER])
        .await
        .context("control: within the installation's policy")?;
    place.end().await
}

#[tokio::test]
async fn run_with_own_lists_is_held_to_both() -> Result<()> {
    let Some(place) = Place::start("bwrap").await? else { return Ok(()) };
    let session = place.session(&[ALLOWED, OTHER], &[]).await?;
    let mut request = with_authority(&session, &poll(&[ALLOWED, OTHER]));
    request.policy = Some(network_policy(&[ALLOWED], &[]));
    let mut run = Exec::start(&place.client, request).await?;
    run.until_stdout(&format!("{ALLOWED}=200")).await?;
    run.until_stdout(&format!("{OTHER}=403")).await?;
    update(&place, &session, &[OTHER]).await?;
    run.until_stdout(&format!("{ALLOWED}=403")).await?;
    ensure!(
        !run.transcript.stdout_text().contains(&format!("{OTHER}=200")),
        "{:?}",
        run.transcript
    );
    drop(run);
    place.end().await
}

#[tokio::test]
async fn network_none_cuts_a_run_of_a_proxy_session() -> Result<()> {
    let Some(place) = Place::start("bwrap").await? else { return Ok(()) };
    let session = place.session(&[ALLOWED], &[]).await?;
    let get = format!("curl -sS -f --max-time 20 http://{ALLOWED}/hello");
    let mut request = with_authority(&session, &get);
    request.network = NetworkMode::None.into();
    let done = Exec::start(&place.client, request).await?.finish().await?;
    ensure!(exit_code(&done).is_some_and(|code| code != 0), "{done:?}");
    ensure!(
        super::finished(&done)?.usage.as_ref().is_some_and(|usage| usage.network.is_none()),
        "{done:?}"
    );
    ensure!(place.network.requests().is_empty(), "{:?}", place.network.requests());

    // By the command line, too.
    let id = session.trim_start_matches("sessions/");
    let cli = |network: &[&str]| {
        let arguments = [&["run", "-s", id][..], network, &["--", "sh", "-c", &get]].concat();
        Process::finish(place.cluster.cli(&place.client, &arguments), b"")
    };
    let cut = cli(&["--network", "none"]).await?;
    ensure!(cut.code != Some(0) && place.network.requests().is_empty(), "{cut:?}");
    let control = cli(&[]).await?;
    ensure!(control.code == Some(0) && control.stdout.contains("hello"), "{control:?}");
    place.end().await
}
