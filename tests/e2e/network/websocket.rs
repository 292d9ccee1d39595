//! WebSockets without TLS.

use anyhow::{Result, ensure};

use super::{ALLOWED, OTHER, Place, exit_code};

/// A real exchange of frames, with a server that knows WebSockets, each way to it.
const WEBSOCKET: &str = include_str!("websocket.py");

#[tokio::test]
async fn websocket_works_in_clear_each_way() -> Result<()> {
    let Some(place) = Place::start("bwrap").await? else { return Ok(()) };
    let session = place.session(&[ALLOWED], &[80]).await?;
    place.client.put(&session, "websocket.py", WEBSOCKET).await?;
    for way in ["transparent", "connect", "absolute"] {
        let open = |host: &str| format!("/usr/bin/python3 websocket.py {way} {ALLOWED} {host}");
        let done = place.run(&session, &open(ALLOWED)).await?;
        ensure!(exit_code(&done) == Some(0), "{way}: {done:?}");
        ensure!(done.stdout_text() == "echo 1\necho 2\n", "{way}: {done:?}");
        let done = place.run(&session, &open(OTHER)).await?;
        ensure!(
            exit_code(&done) == Some(1) && done.stdout.is_empty(),
            "another host, {way}: {done:?}"
        );
    }
    let requests = place.network.requests();
    ensure!(
        requests.len() == 3 && requests.iter().all(|line| line.contains(ALLOWED)),
        "{requests:?}"
    );
    place.end().await
}
