//! Connections to a database that accepts TLS alone.

use std::{
    ffi::OsString,
    fs,
    os::unix::{
        ffi::OsStringExt, fs::MetadataExt, fs::PermissionsExt, fs::chown, process::CommandExt,
    },
    path::Path,
    process::Command,
};

use anyhow::{Context, Result};
use codelia_proto::v1::outcome::Kind::Exited;
use codelia_store::{LocalPostgres, Options, Store};
use codelia_tests::{
    Certificates, Cluster, ClusterOptions, Database, Process, Scratch, eventually,
};

/// The role of a private server.
const ROLE: &str = "codelia";

/// Starts a private server again, with the settings that it had, so that it also listens at
/// addresses of this test alone, with TLS.
async fn listen_with_tls(
    server: LocalPostgres,
    scratch: &Scratch,
    addresses: &str,
) -> Result<Process> {
    let data = scratch.join("postgres/data");
    let owner = fs::metadata(&data)?;
    let pid = fs::read_to_string(data.join("postmaster.pid"))?;
    let pid = pid.lines().next().context("no process")?;
    let line = fs::read(format!("/proc/{pid}/cmdline"))?;
    server.stop().await?;

    let access = scratch.join("pg_hba.conf");
    fs::write(&access, "local all all peer map=codelia\nhostssl all all 127.0.0.0/8 trust\n")?;
    let key = scratch.join("database.key");
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600))?;
    for path in [&access, &key] {
        chown(path, Some(owner.uid()), Some(owner.gid()))?;
    }
    let mut words = line.split(|&byte| byte == 0).map(|word| OsString::from_vec(word.to_vec()));
    let mut command = Command::new(words.next().context("no program")?);
    // An empty word follows the last separator.
    command.args(words.filter(|word| !word.is_empty())).current_dir(&data);
    for (setting, value) in [
        ("listen_addresses", addresses),
        ("ssl", "on"),
        ("hba_file", &access.display().to_string()),
        ("ssl_cert_file", &scratch.join("database.pem").display().to_string()),
        ("ssl_key_file", &key.display().to_string()),
    ] {
        command.arg("-c").arg(format!("{setting}={value}"));
    }
    command.uid(owner.uid()).gid(owner.gid());
    Process::start("postgres", command, scratch.path())
}

async fn connect(url: &str) -> Result<(), codelia_store::Error> {
    let store = Store::connect(Options::from_url(url)?).await?;
    let migrated = store.check_migrated().await;
    store.close().await;
    migrated
}

/// The whole service over TLS; the controls are an authority that nobody trusts, a name that the
/// certificate does not have, and no TLS.
#[tokio::test]
async fn database_connections_verify_tls() -> Result<()> {
    let scratch = Scratch::new()?;
    let server = LocalPostgres::start_throwaway(&scratch.join("postgres")).await?;
    let none = ClusterOptions { apis: 0, workers: 0, ..ClusterOptions::default() };
    let database = Database::on(&server).await?;
    let mut cluster = Cluster::start_on(database, none).await?;
    // Other servers of this machine may have the port at 127.0.0.1.
    let process = std::process::id().to_be_bytes();
    let [address, unnamed] = [0, 0x80].map(|range| {
        format!("127.{}.{}.{}", process[1] ^ range, process[2], process[3].clamp(1, 254))
    });
    Certificates::new()?.write(scratch.path(), "database", &[&address])?;
    Certificates::new()?.write(scratch.path(), "foreign", &[&address])?;
    let mut server = listen_with_tls(server, &scratch, &format!("{address},{unnamed}")).await?;

    let name = cluster.database.name().to_owned();
    let authority = |name: &str| scratch.join(&format!("{name}-ca.pem")).display().to_string();
    let url = |host: &str, mode: &str, authority: &Path| {
        let authority = authority.display();
        format!("postgres://{ROLE}@{host}:5432/{name}?sslmode={mode}&sslrootcert={authority}")
    };
    let own = authority("database");
    let verified = url(&address, "verify-full", Path::new(&own));
    eventually("the server accepts TLS", || async { connect(&verified).await.ok() }).await;

    let foreign = authority("foreign");
    let error =
        connect(&url(&address, "verify-full", Path::new(&foreign))).await.expect_err("foreign");
    assert!(format!("{error:?}").contains("InvalidCertificate"), "{error:?}");
    let error = connect(&url(&unnamed, "verify-full", Path::new(&own))).await.expect_err("name");
    assert!(format!("{error:?}").contains("NotValidForName"), "{error:?}");
    let error = connect(&url(&address, "disable", Path::new(&own))).await.expect_err("without TLS");
    assert!(format!("{error:?}").contains("no encryption"), "{error:?}");

    let settings = [("CODELIA_DATABASE_URL", verified.as_str())];
    cluster.add_worker_with(&settings).await?;
    cluster.add_api_with(&settings).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    assert_eq!(client.exec(&session.name, "exit 3").await?.outcome(), Exited(3));
    let over = "SELECT count(*) FILTER (WHERE ssl) * 1000 + count(*) FILTER (WHERE NOT ssl)
        FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE client_addr IS NOT NULL";
    let connections = cluster.database.number(over).await?;
    assert!(connections >= 2000 && connections % 1000 == 0, "{connections}");

    cluster.end().await?;
    server.terminate().await?;
    Ok(())
}
