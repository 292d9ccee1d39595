//! A real browser uses the API from the page in `examples/web`.

use std::path::Path;

use anyhow::{Context, Result};
use codelia_tests::{Browser, Client, Cluster, ClusterOptions, eventually};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, TcpStream},
    task::JoinSet,
};

/// Serves the files of `examples/web` until it is dropped.
async fn serve_example() -> Result<(u16, JoinSet<()>)> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let port = listener.local_addr()?.port();
    let mut server = JoinSet::new();
    server.spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            drop(serve_file(stream).await);
        }
    });
    Ok((port, server))
}

async fn serve_file(stream: TcpStream) -> Result<()> {
    let mut stream = BufReader::new(stream);
    let (mut first, mut line) = (String::new(), String::new());
    stream.read_line(&mut first).await?;
    while stream.read_line(&mut line).await? > 2 {
        line.clear();
    }
    let name = first.split([' ', '/']).nth(2).unwrap_or_default();
    let name = if name.is_empty() { "index.html" } else { name };
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/web").join(name);
    let kind = if name.ends_with(".js") { "text/javascript" } else { "text/html" };
    let (status, content) =
        std::fs::read(path).map_or(("404 Not Found", Vec::new()), |content| ("200 OK", content));
    let length = content.len();
    let head = format!(
        "HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n"
    );
    stream.write_all(&[head.as_bytes(), &content].concat()).await?;
    Ok(stream.shutdown().await?)
}

/// Opens the page, fills in its form and submits it.
async fn submit(page: &str, cluster: &Cluster, client: &Client, script: &str) -> Result<Browser> {
    let browser = Browser::open(page).await?;
    eventually("the page is loaded", || async {
        let loaded = browser
            .evaluate("document.readyState === 'complete' && typeof runCommand === 'function'")
            .await;
        (loaded.ok()? == true).then_some(())
    })
    .await;
    for (field, value) in [
        ("endpoint", cluster.endpoint(0)),
        ("key", client.secret.clone()),
        ("command", script.into()),
    ] {
        browser.evaluate(&format!("form.elements[{field:?}].value = {value:?}")).await?;
    }
    browser.evaluate("form.requestSubmit()").await?;
    Ok(browser)
}

async fn text_of(browser: &Browser, expression: &str) -> Option<String> {
    Some(browser.evaluate(expression).await.ok()?.as_str()?.to_owned())
}

#[tokio::test]
async fn browser_runs_a_command_and_streams() -> Result<()> {
    if !Browser::is_available() {
        return Ok(());
    }
    let (port, _server) = serve_example().await?;
    let allowed = format!("http://localhost:{port}");
    let settings = vec![("CODELIA_API_CORS_ORIGINS", allowed.clone())];
    let cluster = Cluster::start_with(ClusterOptions { settings, ..Default::default() }).await?;
    let client = cluster.tenant("a").await?;
    let script = "echo first; until [ -e go ]; do sleep 0.05; done; cat go";
    let browser = submit(&allowed, &cluster, &client, script).await?;
    eventually("the page shows output of a command that runs", || async {
        let shown = text_of(&browser, "state.textContent + ' | ' + output.textContent").await?;
        (shown == "running | first\n").then_some(())
    })
    .await;
    let session = text_of(&browser, "output.dataset.session").await.context("the session")?;
    client.put(&session, "go", "second ü\n").await?;
    let shown = eventually("the page shows the end", || async {
        let shown = text_of(&browser, "state.textContent + ' | ' + output.textContent").await?;
        shown.starts_with("ended").then_some(shown)
    })
    .await;
    assert_eq!(shown.split(" | ").nth(1), Some("first\nsecond ü\n"));

    // The control: the browser keeps a page of another origin from the same server.
    let other = format!("http://127.0.0.1:{port}");
    let browser = submit(&other, &cluster, &client, "echo never").await?;
    let shown = eventually("the other page fails", || async {
        text_of(&browser, "state.textContent").await.filter(|text| text.starts_with("failed"))
    })
    .await;
    assert!(shown.contains("fetch"), "{shown}");
    drop(browser);
    cluster.end().await
}
