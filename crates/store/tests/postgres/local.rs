//! The private server against its own user and other local users.

use std::{
    fs::{self, OpenOptions, Permissions},
    io::Write,
    os::unix::fs::{MetadataExt, PermissionsExt, chown},
    path::Path,
    process::{Command, Output},
};

use anyhow::{Context, Result};
use codelia_store::{LocalPostgres, LocalPostgresError};
use codelia_tests::{Scratch, available, is_root};
use sqlx::{Connection, PgConnection};

fn needs_root() -> bool {
    available("root", (!is_root()).then_some("only root starts the server as another user"))
}

/// Runs a program as the server's user.
fn as_server_user(arguments: &[&str]) -> Result<Output> {
    let user = ["--reuid", "postgres", "--regid", "postgres", "--clear-groups"];
    Ok(Command::new("setpriv").args(user).args(arguments).current_dir("/").output()?)
}

/// Gives the directory to the server's user.
fn give_to_server_user(dir: &Path) -> Result<()> {
    fs::create_dir_all(dir)?;
    fs::set_permissions(dir, Permissions::from_mode(0o700))?;
    assert!(Command::new("chown").arg("postgres:").arg(dir).status()?.success());
    Ok(())
}

#[tokio::test]
async fn planted_log_link_is_not_followed() -> Result<()> {
    if !needs_root() {
        return Ok(());
    }
    let scratch = Scratch::new()?;
    let (dir, victim) = (scratch.join("postgres"), scratch.join("victim"));
    let log = dir.join("log");
    fs::write(&victim, "untouched")?;
    give_to_server_user(&dir)?;
    let plant = ["ln", "-s", victim.to_str().context("a path")?, log.to_str().context("a path")?];
    assert!(as_server_user(&plant)?.status.success());
    let refused = LocalPostgres::start(&dir).await;
    assert!(
        matches!(&refused, Err(LocalPostgresError::ForeignFile(path)) if *path == log),
        "{refused:?}"
    );
    assert_eq!(fs::read_to_string(&victim)?, "untouched");
    let mut followed = OpenOptions::new().create(true).append(true).open(&log)?;
    followed.write_all(b"!")?;
    assert_eq!(
        fs::read_to_string(&victim)?,
        "untouched!",
        "the control: a plain open follows the link"
    );

    fs::remove_file(&log)?;
    let server = LocalPostgres::start(&dir).await?;
    assert!(fs::metadata(&log)?.len() > 0);
    let replace = |place: &str| as_server_user(&["ln", "-sf", "/nowhere", place]);
    assert!(
        !replace(log.to_str().context("a path")?)?.status.success(),
        "only root changes the log"
    );
    let own = dir.join("run/link");
    assert!(
        replace(own.to_str().context("a path")?)?.status.success(),
        "the control: its own directory"
    );
    server.stop().await?;
    Ok(())
}

#[tokio::test]
async fn only_owner_connects() -> Result<()> {
    if !needs_root() {
        return Ok(());
    }
    let scratch = Scratch::new()?;
    let server = LocalPostgres::start_throwaway(&scratch.join("postgres")).await?;
    let url = server.url("postgres");
    let query = ["psql", &url, "-w", "-tAc", "SELECT 1"];
    let own = Command::new(query[0]).args(&query[1..]).output()?;
    assert_eq!(String::from_utf8_lossy(&own.stdout), "1\n", "the control: {own:?}");
    // It can reach the socket, which it owns.
    let refused = as_server_user(&query)?;
    let message = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && message.contains("authentication failed"), "{message}");
    let other = Command::new("setpriv")
        .args(["--reuid", "65534", "--clear-groups"])
        .args(query)
        .output()?;
    let message = String::from_utf8_lossy(&other.stderr);
    assert!(!other.status.success() && message.contains("Permission denied"), "{message}");
    server.stop().await?;
    Ok(())
}

#[tokio::test]
async fn directory_of_server_user_is_taken_over() -> Result<()> {
    if !needs_root() {
        return Ok(());
    }
    let scratch = Scratch::new()?;
    let dir = scratch.join("postgres");
    let first = LocalPostgres::start(&dir).await?;
    let mut connection = PgConnection::connect_with(&first.database("kept").await?).await?;
    sqlx::query("CREATE TABLE kept (number int)").execute(&mut connection).await?;
    connection.close().await?;
    first.stop().await?;
    give_to_server_user(&dir)?;
    fs::write(dir.join("data/pg_hba.conf"), "local all all trust\n")?;
    for name in ["run", "pg_hba.conf", "pg_ident.conf"] {
        let path = dir.join(name);
        if path.is_dir() { fs::remove_dir_all(path)? } else { fs::remove_file(path)? }
    }

    let second = LocalPostgres::start(&dir).await?;
    let mut connection = PgConnection::connect_with(&second.database("kept").await?).await?;
    sqlx::query("INSERT INTO kept VALUES (1)").execute(&mut connection).await?;
    connection.close().await?;
    assert!(
        !as_server_user(&["psql", &second.url("kept"), "-w", "-c", "SELECT 1"])?.status.success()
    );
    assert_eq!(fs::metadata(&dir)?.uid(), 0);
    second.stop().await?;

    // Data of another user, such as `nobody`, is refused with the remedy.
    chown(dir.join("data"), Some(65534), Some(65534))?;
    let refused = LocalPostgres::start(&dir).await;
    assert!(
        matches!(&refused, Err(LocalPostgresError::WrongOwner { owner: 65534, .. })),
        "{refused:?}"
    );
    Ok(())
}

#[tokio::test]
async fn private_server_has_measured_settings() -> Result<()> {
    let scratch = Scratch::new()?;
    let server = LocalPostgres::start(&scratch.join("postgres")).await?;
    let mut connection = PgConnection::connect_with(&server.database("test").await?).await?;
    let settings = "SELECT string_agg(current_setting(name), ' ' ORDER BY name) FROM pg_settings
                    WHERE name IN ('checkpoint_timeout', 'max_wal_size', 'wal_compression')";
    let found: String = sqlx::query_scalar(settings).fetch_one(&mut connection).await?;
    assert_eq!(found, "15min 2GB pglz");
    connection.close().await?;
    server.stop().await?;
    Ok(())
}
