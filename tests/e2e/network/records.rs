//! What runs do in the network is recorded.

use anyhow::{Context, Result, ensure};
use codelia_store::EventKind;
use codelia_tests::{Exec, Process, eventually};
use serde_json::Value;

use super::{ALLOWED, OTHER, Place, finished, with_authority};
use crate::service::{free_address, http_get};

#[tokio::test]
async fn connections_and_refusals_are_recorded() -> Result<()> {
    let Some(place) = Place::start("bwrap").await? else { return Ok(()) };
    let session = place.session(&[ALLOWED], &[]).await?;
    let script = format!(
        "curl -fsS --max-time 20 -o /dev/null --data-binary 12345 https://{ALLOWED}/post;
         curl -s --max-time 20 https://{OTHER}/secret-path; curl -s --max-time 20 http://{ALLOWED}:8080/; true"
    );
    let done = place.run(&session, &script).await?;
    let run = finished(&done)?;
    let usage =
        run.usage.as_ref().and_then(|usage| usage.network.as_ref()).context("network usage")?;
    ensure!(usage.connections == 1 && usage.refused >= 2, "{usage:?}");
    ensure!(usage.sent_bytes > 5 && usage.received_bytes > 0, "{usage:?}");

    let connected = place.events(EventKind::NetworkConnected).await?;
    let [event] = connected.as_slice() else { anyhow::bail!("{connected:?}") };
    let detail = &event.body.detail;
    ensure!(
        event.subject.run.map(|id| id.to_string()).as_deref() == Some(&run.run_id),
        "{event:?}"
    );
    ensure!(
        detail["host"] == ALLOWED && detail["port"] == 443 && detail["via"] == "connect",
        "{detail}"
    );
    ensure!(
        detail["address"] == place.network.address().to_string() && detail["rule"] == ALLOWED,
        "{detail}"
    );
    ensure!(detail["sent_bytes"].as_u64() > Some(5) && detail["duration_ms"].is_u64(), "{detail}");
    let refused = place.events(EventKind::NetworkRefused).await?;
    let is_refused = |host: &str, reason: &str| {
        refused
            .iter()
            .any(|event| event.body.detail["host"] == host && event.body.detail["reason"] == reason)
    };
    ensure!(
        is_refused(OTHER, "host_not_allowed") && is_refused(ALLOWED, "port_not_allowed"),
        "{refused:?}"
    );
    ensure!(
        !format!("{connected:?}{refused:?}").contains("secret-path"),
        "a path is not part of the record"
    );

    // The command line shows the same.
    let id = session.trim_start_matches("sessions/");
    let run =
        ["run", "--json", "-s", id, "--", "sh", "-c", &format!("curl -fsS http://{ALLOWED}/hello")];
    let done = Process::finish(place.cluster.cli(&place.client, &run), b"").await?;
    let record: Value = serde_json::from_str(done.stdout.lines().last().context("a record")?)?;
    let network = &record["usage"]["network"];
    ensure!(network["connections"] == "1" && network["receivedBytes"].is_string(), "{record}");
    place.end().await
}

#[tokio::test]
async fn open_connections_are_a_metric() -> Result<()> {
    let Some(mut place) = Place::start("bwrap").await? else { return Ok(()) };
    // Only a worker of its own can have an address for metrics.
    let metrics = free_address().await?;
    place.cluster.workers[0].process.terminate().await?;
    place.cluster.add_worker_with(&[("CODELIA_METRICS_LISTEN", &metrics)]).await?;
    let shows = |line: &'static str| {
        let metrics = metrics.clone();
        async move { http_get(&metrics, "/metrics").await.ok()?.1.contains(line).then_some(()) }
    };
    let session = place.session(&[ALLOWED], &[]).await?;
    let slow = format!("curl -sN http://{ALLOWED}/slow");
    let mut run = Exec::start(&place.client, with_authority(&session, &slow)).await?;
    run.until_stdout("tick").await?;
    eventually("the connection is counted", || shows("\ncodelia_egress_connections 1\n")).await;
    drop(run);
    eventually("its end is counted", || shows("\ncodelia_egress_connections 0\n")).await;
    place.end().await
}

#[tokio::test]
async fn many_attempts_are_counted_and_few_are_stored() -> Result<()> {
    let Some(place) = Place::start("bwrap").await? else { return Ok(()) };
    let session = place.session(&[ALLOWED], &[]).await?;
    let script = "for i in $(seq 150); do echo \"url = http://host$i.example.org/\"; done > urls;
                  curl -s --max-time 20 -o /dev/null -K urls; true";
    let done = place.run(&session, script).await?;
    let usage =
        finished(&done)?.usage.as_ref().and_then(|usage| usage.network).context("network usage")?;
    ensure!(usage.refused >= 150, "{usage:?}");
    let stored = place.events(EventKind::NetworkRefused).await?.len();
    ensure!((1..=100).contains(&stored), "{stored} events");
    place.end().await
}
