//! Arguments that name objects: several of them, plain ids, starts of ids, names.

use anyhow::Result;
use codelia_proto::v1::CreateSessionRequest;
use codelia_tests::{Client, Cluster, Process, ProcessOutput, Screen, command};
use serde_json::Value;

/// Characters of an id that tests use as its start: the time in milliseconds and some more.
const START: usize = 23;

async fn codelia(cluster: &Cluster, client: &Client, arguments: &[&str]) -> Result<ProcessOutput> {
    Process::finish(cluster.cli(client, arguments), b"").await
}

async fn screen(cluster: &Cluster, client: &Client, arguments: &[&str]) -> Result<Screen> {
    Screen::of(&cluster.cli(client, arguments), 200).await
}

#[tokio::test]
async fn kill_tries_and_reports_each_run() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let run = client.start(command(&session.name, &["sleep", "1000"])).await?;
    let absent = "018f4e1c-7b2a-7c3d-8e4f-5a6b7c8d9e0f";
    let Screen { lines, code } =
        screen(&cluster, &client, &["kill", absent, &run.run_id, "018f4e1c-7b2a-7c", "nonsense"])
            .await?;
    assert_eq!(code, Some(1), "{lines:?}");
    let [first, second, third, fourth] = lines.as_slice() else { panic!("{lines:?}") };
    assert_eq!(first, &format!("error: run \"{absent}\" not found"));
    assert_eq!(second, &run.run_id);
    assert_eq!(third, "error: run \"018f4e1c-7b2a-7c\" not found");
    assert!(fourth.starts_with("error: \"nonsense\" is neither a session nor a run"), "{fourth}");
    let ended = client.watch_to_end(&run.name, 0).await?;
    assert!(matches!(ended.outcome(), codelia_proto::v1::outcome::Kind::Canceled(_)));

    let done = codelia(&cluster, &client, &["kill", "--json", absent, &run.run_id]).await?;
    let results: Value = serde_json::from_str(&done.stdout)?;
    assert_eq!(done.code, Some(1), "{done:?}");
    assert_eq!(
        (&results[0]["argument"], &results[0]["error"]["reason"]),
        (&absent.into(), &"NOT_FOUND".into())
    );
    assert_eq!(results[1]["runId"], run.run_id.as_str());
    assert_eq!(codelia(&cluster, &client, &["kill", &run.run_id]).await?.code, Some(0));
    cluster.end().await
}

#[tokio::test]
async fn close_tries_and_reports_each_session() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let mut ids = Vec::new();
    for alias in ["a", "b"] {
        let request = CreateSessionRequest { alias: alias.into(), ..Default::default() };
        ids.push(client.create(request).await?.session_id);
    }
    let Screen { lines, code } =
        screen(&cluster, &client, &["session", "close", "none", "a", "b", "a"]).await?;
    assert_eq!(code, Some(1), "{lines:?}");
    let [first, second, third, fourth] = lines.as_slice() else { panic!("{lines:?}") };
    assert_eq!(first, "error: session \"none\" not found");
    assert_eq!((second, third), (&ids[0], &ids[1]));
    assert!(fourth.starts_with("error: ") && fourth.contains("\"a\""), "{fourth}");
    cluster.end().await
}

#[tokio::test]
async fn start_of_an_id_names_it_everywhere() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let start = &session.session_id[..START];
    let shown = codelia(&cluster, &client, &["session", "show", "--json", start]).await?;
    let record: Value = serde_json::from_str(&shown.stdout)?;
    assert_eq!(record["sessionId"], session.session_id.as_str(), "{shown:?}");
    let place = format!("{start}:file");
    for (arguments, output) in [
        (vec!["run", "-s", start, "--", "sh", "-c", "echo kept > file"], ""),
        (vec!["cp", &place, "-"], "kept\n"),
        (vec!["run", "-s", &session.session_id, "--", "cat", "file"], "kept\n"),
    ] {
        let done = codelia(&cluster, &client, &arguments).await?;
        assert_eq!((done.code, done.stdout.as_str()), (Some(0), output), "{done:?}");
    }
    let run = client.start(command(&session.name, &["echo", "out"])).await?;
    client.watch_to_end(&run.name, 0).await?;
    let attached = codelia(&cluster, &client, &["attach", &run.run_id[..START]]).await?;
    assert_eq!((attached.code, attached.stdout.as_str()), (Some(0), "out\n"), "{attached:?}");

    // An alias wins over the start of an id, and an ambiguous start is refused with the candidates.
    let alias = session.session_id[..8].to_owned();
    let other =
        client.create(CreateSessionRequest { alias: alias.clone(), ..Default::default() }).await?;
    let shown = codelia(&cluster, &client, &["session", "show", "--json", &alias]).await?;
    assert!(shown.stdout.contains(&other.session_id), "{shown:?}");
    let ambiguous = codelia(&cluster, &client, &["session", "show", &alias[..4]]).await?;
    assert_eq!(ambiguous.code, Some(1), "{ambiguous:?}");
    for id in [&session.session_id, &other.session_id] {
        assert!(ambiguous.stderr.contains(id.as_str()), "{ambiguous:?}");
    }
    cluster.end().await
}

#[tokio::test]
async fn key_is_revoked_by_id_start_or_name() -> Result<()> {
    let cluster = Cluster::start().await?;
    let operator = cluster.operator().await?;
    let create = async |name: &str| -> Result<Value> {
        let arguments = ["keys", "create", "--name", name, "--scope", "run", "--json"];
        Ok(serde_json::from_str(&codelia(&cluster, &operator, &arguments).await?.stdout)?)
    };
    let id = |key: &Value| key["key"]["keyId"].as_str().unwrap_or_default().to_owned();
    let keys =
        [create("ci").await?, create("two").await?, create("twins").await?, create("twins").await?];
    let by_start = id(&keys[1])[..START].to_owned();
    for (text, key) in [("ci", &keys[0]), (&by_start, &keys[1]), (&id(&keys[2]), &keys[2])] {
        let done = codelia(&cluster, &operator, &["keys", "revoke", "--json", text]).await?;
        let revoked: Value = serde_json::from_str(&done.stdout)?;
        assert_eq!(
            (&revoked["keyId"], revoked["revokeTime"].is_string()),
            (&key["key"]["keyId"], true),
            "{done:?}"
        );
    }
    // The other key with this name is the only one that is not revoked.
    assert_eq!(codelia(&cluster, &operator, &["keys", "revoke", "twins"]).await?.code, Some(0));
    let absent = codelia(&cluster, &operator, &["keys", "revoke", "ci"]).await?;
    assert_eq!((absent.code, absent.stderr.as_str()), (Some(1), "error: key \"ci\" not found\n"));
    cluster.end().await
}
