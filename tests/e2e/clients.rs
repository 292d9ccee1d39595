//! Clients in other languages, generated from `proto/`.

use std::process::Command;

use anyhow::Result;
use codelia_tests::{Process, Up, available};

#[tokio::test]
async fn python_client_works_generated_and_by_reflection() -> Result<()> {
    let python = std::env::var_os("CODELIA_TEST_PYTHON");
    let missing = python.is_none().then_some("CODELIA_TEST_PYTHON is not set: run `make test`");
    if !available("python", missing) {
        return Ok(());
    }
    let place = Up::new()?;
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/clients/python/drive.py");
    let generated = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/python/generated");
    let mut command = Command::new(python.unwrap_or_default());
    command.arg(script).arg(place.directory().join("codelia")).arg(place.data()).env("PYTHONPATH", generated);
    let done = Process::finish(command, b"").await?;
    assert_eq!(done.code, Some(0), "{}\n{}", done.stdout, done.stderr);
    place.leak_guard().expect_no_processes().await;
    Ok(())
}
