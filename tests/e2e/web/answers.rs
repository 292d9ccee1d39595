//! Requests that call no method, and the headers for browsers.

use anyhow::Result;
use bytes::Bytes;
use codelia_tests::{Certificates, Cluster, ClusterOptions, Http1Response, Process};
use http::Request;

const METHOD: &str = "/codelia.v1.SessionService/GetSession";
const PAGE: &str = "https://app.example";

#[tokio::test]
async fn plain_http_gets_a_readable_answer() -> Result<()> {
    let cluster = Cluster::start_with(ClusterOptions { workers: 0, ..Default::default() }).await?;
    for (http_method, path, content_type, status, words) in [
        ("GET", "/", "", 200, "This is the API of Codelia"),
        ("GET", "/index.html", "", 404, "/index.html not found"),
        ("GET", METHOD, "", 405, "with POST"),
        ("POST", METHOD, "text/plain", 415, "application/json"),
        ("POST", METHOD, "application/grpc", 505, "gRPC needs HTTP/2"),
    ] {
        let request =
            Request::builder().method(http_method).uri(path).header("content-type", content_type);
        let answer =
            Http1Response::to(&cluster.apis[0].address, request.body(Bytes::new())?).await?;
        assert_eq!(answer.status, status, "{http_method} {path}");
        assert_eq!(answer.header("content-type"), "text/plain; charset=utf-8");
        assert_eq!(answer.header("location"), "");
        let text = answer.text().await?;
        assert!(text.contains(words) && text.contains("docs/web.md") && text.len() < 500, "{text}");
    }
    let request = Request::post("/codelia.v1.SessionService/Nosuch")
        .header("content-type", "application/json");
    let answer = Http1Response::to(&cluster.apis[0].address, request.body("{}".into())?).await?;
    assert_eq!(answer.status, 404);
    assert_eq!(answer.json().await?["code"], "unimplemented");
    cluster.end().await
}

#[tokio::test]
async fn only_configured_origins_get_headers() -> Result<()> {
    let mut cluster =
        Cluster::start_with(ClusterOptions { apis: 0, workers: 0, ..Default::default() }).await?;
    cluster.add_api().await?;
    cluster.add_api_with(&[("CODELIA_API_CORS_ORIGINS", PAGE)]).await?;
    cluster.add_api_with(&[("CODELIA_API_CORS_ORIGINS", "*")]).await?;
    for (api, origin, status, allowed) in [
        (0, PAGE, 403, ""),
        (1, PAGE, 204, PAGE),
        (1, "https://other.example", 403, ""),
        (2, "https://other.example", 204, "*"),
    ] {
        let address = &cluster.apis[api].address;
        let preflight = Request::options(METHOD)
            .header("origin", origin)
            .header("access-control-request-method", "POST")
            .header("access-control-request-headers", "authorization,content-type");
        let answer = Http1Response::to(address, preflight.body(Bytes::new())?).await?;
        assert_eq!(answer.status, status, "{origin} at api {api}");
        assert_eq!(answer.header("access-control-allow-origin"), allowed);
        // The call itself has the header too, even if it fails.
        let call = Request::post(METHOD)
            .header("origin", origin)
            .header("content-type", "application/json");
        let answer = Http1Response::to(address, call.body("{}".into())?).await?;
        assert_eq!((answer.status, answer.header("access-control-allow-origin")), (401, allowed));
        assert_eq!(
            answer.header("access-control-expose-headers").contains("grpc-status"),
            !allowed.is_empty()
        );
    }
    cluster.end().await
}

#[tokio::test]
async fn http1_and_http2_work_over_tls() -> Result<()> {
    let mut cluster =
        Cluster::start_with(ClusterOptions { apis: 0, workers: 0, ..Default::default() }).await?;
    let authority = Certificates::new()?;
    authority.write(cluster.directory(), "api", &["localhost"])?;
    let file = |name: &str| cluster.directory().join(name).display().to_string();
    let (certificate, key) = (file("api.pem"), file("api.key"));
    cluster
        .add_api_with(&[("CODELIA_API_TLS_CERT", &certificate), ("CODELIA_API_TLS_KEY", &key)])
        .await?;
    let port = cluster.apis[0].address.rsplit(':').next().unwrap_or_default().to_owned();
    let url = format!("https://localhost:{port}/grpc.health.v1.Health/Check");
    for (version, expected) in [("--http1.1", "1.1"), ("--http2", "2")] {
        let mut curl = std::process::Command::new("curl");
        // Which certificate it is, is tested in `tls`.
        curl.args([
            "-sS",
            "--noproxy",
            "*",
            "--insecure",
            version,
            "-w",
            "%{http_version}",
            "-d",
            "{}",
        ])
        .args(["-H", "content-type: application/json", &url]);
        let ended = Process::finish(curl, b"").await?;
        assert_eq!(
            ended.stdout,
            format!("{{\"status\":\"SERVING\"}}\n{expected}"),
            "{}",
            ended.stderr
        );
    }
    cluster.end().await
}
