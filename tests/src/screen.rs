//! What a user sees who calls a program in a shell on a terminal.

use std::process::Command;

use anyhow::Result;

use crate::Terminal;

/// What a progress bar writes before it draws again or goes.
const CLEAR_LINE: &str = "\r\u{1b}[2K";

/// The lines that a program printed on a terminal, and its exit code.
#[derive(Debug)]
pub struct Screen {
    /// The lines, without their ends.
    pub lines: Vec<String>,
    /// The exit code.
    pub code: Option<i32>,
}

impl Screen {
    /// Runs a program on a terminal of this width until it exits, without colours.
    pub async fn of(program: &Command, columns: u16) -> Result<Self> {
        // The last line shows that all before it has arrived.
        let mut shell = Command::new("sh");
        shell.args(["-c", "\"$@\"; echo \"code-$?;;\"", "sh"]);
        shell.arg(program.get_program()).args(program.get_args());
        shell.env_clear().envs(program.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let mut terminal = Terminal::start(shell.env("NO_COLOR", "1"), columns, 50)?;
        let shown = terminal.shows(";;\r\n").await?;
        terminal.exited().await?;
        let visible = |line: &str| line.rsplit(CLEAR_LINE).next().unwrap_or_default().to_owned();
        let mut lines: Vec<String> = shown.lines().map(visible).collect();
        let code = lines
            .pop()
            .and_then(|line| line.strip_prefix("code-")?.strip_suffix(";;")?.parse().ok());
        Ok(Self { lines, code })
    }
}
