//! A headless browser, driven by the DevTools protocol over pipes.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    process::{Child, ChildStdin, ChildStdout},
    sync::Mutex,
};

use crate::{Scratch, available, within};

const PROGRAMS: [&str; 2] = ["/usr/bin/chromium-headless-shell", "/usr/bin/chromium"];
/// The protocol is on descriptors 3 and 4.
const START: &str = r#"exec "$0" "$@" 3<&0 4>&1 </dev/null >&2"#;

/// A page of a browser of its own. Dropping it ends the browser.
#[derive(Debug)]
pub struct Browser {
    _child: Child,
    pipes: Mutex<Pipes>,
    session: String,
    _profile: Scratch,
}

#[derive(Debug)]
struct Pipes {
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
    last_id: u64,
}

impl Browser {
    /// Whether a test with a browser can run here.
    #[must_use]
    pub fn is_available() -> bool {
        let missing = program().is_none().then_some("chromium is not installed");
        available("browser", missing)
    }

    /// Opens a page.
    pub async fn open(url: &str) -> Result<Self> {
        let profile = Scratch::new()?;
        let mut command = Command::new("sh");
        command
            .args(["-c", START, program().context("no browser")?, "--headless", "--no-sandbox"])
            .args([
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--remote-debugging-pipe",
            ])
            .args([
                "--disable-background-networking",
                "--disable-component-update",
                "--no-proxy-server",
            ])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .env("HOME", profile.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut child = tokio::process::Command::from(command).kill_on_drop(true).spawn()?;
        let mut pipes = Pipes {
            commands: child.stdin.take().context("stdio is not piped")?,
            answers: BufReader::new(child.stdout.take().context("stdio is not piped")?),
            last_id: 0,
        };
        let target = pipes.call(None, "Target.createTarget", json!({ "url": url })).await?;
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let attached = pipes.call(None, "Target.attachToTarget", attach).await?;
        let session =
            attached["sessionId"].as_str().context("a session of the browser")?.to_owned();
        Ok(Self { _child: child, pipes: Mutex::new(pipes), session, _profile: profile })
    }

    /// Evaluates JavaScript in the page and returns its value.
    pub async fn evaluate(&self, expression: &str) -> Result<Value> {
        let parameters =
            json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let answer = self
            .pipes
            .lock()
            .await
            .call(Some(&self.session), "Runtime.evaluate", parameters)
            .await?;
        if let Some(thrown) = answer.get("exceptionDetails") {
            bail!("{expression}: {thrown}");
        }
        Ok(answer["result"]["value"].clone())
    }
}

fn program() -> Option<&'static str> {
    PROGRAMS.into_iter().find(|path| std::path::Path::new(path).exists())
}

impl Pipes {
    async fn call(
        &mut self,
        session: Option<&str>,
        method: &str,
        parameters: Value,
    ) -> Result<Value> {
        self.last_id += 1;
        let mut command = json!({ "id": self.last_id, "method": method, "params": parameters });
        if let Some(session) = session {
            command["sessionId"] = session.into();
        }
        self.commands.write_all(format!("{command}\0").as_bytes()).await?;
        loop {
            let mut message = Vec::new();
            within("the browser answers", self.answers.read_until(0, &mut message)).await?;
            message.pop().context("the browser has ended")?;
            let mut message: Value = serde_json::from_slice(&message)?;
            if message["id"] == self.last_id {
                if let Some(error) = message.get("error") {
                    bail!("{method}: {error}");
                }
                return Ok(message["result"].take());
            }
        }
    }
}
