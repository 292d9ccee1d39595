//! Clients in other languages, generated from `proto/`.

use std::{path::PathBuf, process::Command};

use anyhow::{Context, Result};
use codelia_tests::{Process, Up, available};

#[tokio::test]
async fn python_client_works_generated_and_by_reflection() -> Result<()> {
    let python = std::env::var_os("CODELIA_TEST_PYTHON").map(PathBuf::from);
    let missing = python.is_none().then_some("CODELIA_TEST_PYTHON is not set: run `make test`");
    available("python", missing);
    let Some(python) = python else { return Ok(()) };
    let place = Up::new()?;
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/clients/python/drive.py");
    // scripts/python-client puts the generated modules next to the venv.
    let generated =
        python.ancestors().nth(3).context("the interpreter is in a venv")?.join("generated");
    let mut command = Command::new(&python);
    command
        .arg(script)
        .arg(place.directory().join("codelia"))
        .arg(place.data())
        .env("PYTHONPATH", generated);
    let done = Process::finish(command, b"").await?;
    assert_eq!(done.code, Some(0), "{}\n{}", done.stdout, done.stderr);
    place.leak_guard().expect_no_processes().await;
    Ok(())
}
