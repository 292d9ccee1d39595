//! The commands in the guides work: each fenced `sh` block runs against a real `codelia up`, in
//! order, in one shell. A `text` block lists lines that the block before it prints; a `python`
//! block is a file, named in its first line.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result, ensure};
use codelia_tests::{Process, Up};

/// A fenced block: its language and its text.
fn blocks(document: &str) -> Vec<(&str, &str)> {
    let mut fences = document.split("\n```").skip(1);
    let mut blocks = Vec::new();
    while let Some(block) = fences.next() {
        blocks.extend(block.split_once('\n'));
        // Text between two blocks.
        fences.next();
    }
    blocks
}

/// Programs for the shell: `codelia`, and a `make` that only starts and stops it.
fn programs(up: &Up) -> Result<std::path::PathBuf> {
    let dir = up.directory().join("guide-bin");
    fs::create_dir(&dir)?;
    let command = up.command(&[]);
    // The program before it ends processes with the test, which those of `up --detach` outlive.
    let program = command.get_args().last().unwrap_or(command.get_program()).to_owned();
    let program = Path::new(&program).display();
    let make = "case $1 in up) exec codelia up --detach --listen 127.0.0.1:0 --metrics-listen 127.0.0.1:0 ;;\n\
                down) exec codelia down ;; esac; exit 1\n";
    for (name, script) in
        [("codelia", format!("exec {program} \"$@\"\n")), ("make", make.to_owned())]
    {
        let path = dir.join(name);
        fs::write(&path, format!("#!/bin/sh\n{script}"))?;
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    }
    Ok(dir)
}

/// Runs the blocks of a document in one shell and checks what they print.
async fn follow(up: &Up, document: &str) -> Result<()> {
    let blocks = blocks(document);
    let mut script = String::from("set -euo pipefail\n");
    for (number, (language, text)) in blocks.iter().enumerate() {
        match *language {
            "sh" => script += &format!("echo '== {number}'\n{text}\n"),
            "python" => {
                let name = text
                    .lines()
                    .next()
                    .and_then(|line| line.strip_prefix("# "))
                    .context("a file name")?;
                fs::write(up.directory().join(name), text)?;
            }
            "text" | "json" | "console" => {}
            other => anyhow::bail!("a block of unknown language {other:?}"),
        }
    }
    let mut path = programs(up)?.into_os_string();
    path.push(":/usr/bin:/bin");
    let mut shell = Command::new("bash");
    shell.args(["-c", &script]).current_dir(up.directory()).env_clear().env("PATH", path);
    shell.envs(
        up.command(&[])
            .get_envs()
            .filter_map(|(name, value)| Some((name, value?)))
            .filter(|(name, _)| *name != "PATH"),
    );
    let ended = Process::finish(shell, b"").await?;
    ensure!(
        ended.code == Some(0),
        "exit code {:?}\n{}\n{}",
        ended.code,
        ended.stdout,
        ended.stderr
    );
    for (number, (_, expected)) in
        blocks.iter().enumerate().filter(|(_, (language, _))| *language == "text")
    {
        let printed =
            ended.stdout.split_once(&format!("== {}\n", number - 1)).context("a block before")?.1;
        let printed: Vec<_> = printed.split("== ").next().unwrap_or_default().lines().collect();
        for line in expected.lines() {
            ensure!(
                printed.iter().any(|printed| printed.contains(line)),
                "{line:?} is not in {printed:?}"
            );
        }
    }
    Ok(())
}

fn read(path: &str) -> Result<String> {
    Ok(fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path))?)
}

#[tokio::test]
async fn quickstart_works_as_written() -> Result<()> {
    let up = Up::new()?;
    let followed = follow(&up, &read("docs/quickstart.md")?).await;
    if followed.is_err() {
        Process::finish(up.command(&["down"]), b"").await?;
    }
    followed?;
    up.leak_guard().expect_no_processes().await;
    Ok(())
}

#[tokio::test]
async fn curl_examples_work_as_written() -> Result<()> {
    let up = Up::new()?;
    let mut process = up.start().await?;
    follow(&up, &read("docs/web.md")?).await?;
    process.terminate().await?;
    up.leak_guard().expect_no_processes().await;
    Ok(())
}

#[tokio::test]
async fn failing_guide_is_detected() -> Result<()> {
    let guide = |block: &str| format!("# Guide\n\n{block}");
    for (bad, error) in [
        ("```sh\nfalse\n```\n", "exit code Some(1)"),
        ("```sh\ntrue\nnosuch\ntrue\n```\n", "exit code Some(127)"),
        ("```sh\necho one\n```\n\n```text\ntwo\n```\n", "\"two\" is not in"),
        ("```bash\ntrue\n```\n", "unknown language"),
    ] {
        let refused = follow(&Up::new()?, &guide(bad)).await.expect_err(bad);
        assert!(refused.to_string().contains(error), "{bad}: {refused}");
    }
    follow(&Up::new()?, &guide("```sh\necho one\n```\n\n```text\none\n```\n")).await
}
