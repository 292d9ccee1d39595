//! Shell completion: candidates for the last word of a command line, among them names that the
//! server knows. Bounded by a short deadline; whatever fails yields no candidates.

mod names;

use std::{path::Path, time::Duration};

use anyhow::Result;
use clap::{Arg, Command};
use clap_complete::Shell;

use self::names::Source;
use crate::{
    output,
    settings::{Flag, Settings},
};

/// A user waits for the candidates.
const DEADLINE: Duration = Duration::from_secs(1);
/// Flags that decide which server is asked, with their configuration keys.
const SERVER_FLAGS: [(&str, &str); 3] =
    [("endpoint", "client.endpoint"), ("context", "client.context"), ("data-dir", "data_dir")];
/// Formats of policy files.
const POLICY_EXTENSIONS: [&str; 3] = ["json", "yaml", "toml"];

/// Prints a completion script.
pub fn print_script(shell: Shell, mut program: Command) -> Result<()> {
    let script = match shell {
        Shell::Bash => include_str!("codelia.bash").to_owned(),
        Shell::Zsh => include_str!("codelia.zsh").to_owned(),
        Shell::Fish => include_str!("codelia.fish").to_owned(),
        other => {
            let mut script = Vec::new();
            clap_complete::generate(other, &mut program, "codelia", &mut script);
            String::from_utf8(script)?
        }
    };
    output::write_line(script.trim_end())
}

/// Loads the configuration with these flags.
pub type LoadSettings<'a> = &'a dyn Fn(&[Flag]) -> Result<Settings>;

/// Prints the candidates for the last of `words`, one on each line. `words` has no program name.
///
/// # Errors
/// Stdout cannot be written.
pub async fn print_candidates(
    words: &[String],
    program: Command,
    load: LoadSettings<'_>,
) -> Result<()> {
    let candidates =
        tokio::time::timeout(DEADLINE, candidates(words, program, load)).await.unwrap_or_default();
    if candidates.is_empty() { Ok(()) } else { output::write_line(&candidates.join("\n")) }
}

async fn candidates(words: &[String], mut root: Command, load: LoadSettings<'_>) -> Vec<String> {
    let Some((current, before)) = words.split_last() else { return Vec::new() };
    root.build();
    let line = Line::read(&root, before, load);
    let mut found = match (line.pending, positional(line.command, line.positionals)) {
        (Some(flag), _) => line.values(flag, current).await,
        (None, _) if current.starts_with('-') && !line.ended => flags(line.command),
        (None, argument) => {
            let subcommands =
                line.command.get_subcommands().filter(|command| !command.is_hide_set());
            let mut found: Vec<String> =
                subcommands.map(|command| command.get_name().to_owned()).collect();
            if let Some(argument) = argument {
                found.extend(line.values(argument, current).await);
            }
            found
        }
    };
    found.retain(|candidate| candidate.starts_with(current.as_str()) && is_harmless(candidate));
    found
}

/// Whether a shell takes the text as it is. Commands choose the names of files: one with special
/// characters could make the shell do something else.
fn is_harmless(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-/:@%+,=".contains(&byte))
}

fn flags(command: &Command) -> Vec<String> {
    let visible = command.get_arguments().filter(|argument| !argument.is_hide_set());
    visible.filter_map(|argument| argument.get_long().map(|long| format!("--{long}"))).collect()
}

/// A command line up to the word to complete.
struct Line<'a> {
    command: &'a Command,
    /// The flag that the next word is the value of.
    pending: Option<&'a Arg>,
    /// Positional arguments so far.
    positionals: usize,
    /// Whether `--` ended the flags.
    ended: bool,
    /// Flags that decide which server is asked.
    server: Vec<Flag>,
    load: LoadSettings<'a>,
}

impl<'a> Line<'a> {
    fn read(root: &'a Command, words: &[String], load: LoadSettings<'a>) -> Self {
        let mut line = Self {
            command: root,
            pending: None,
            positionals: 0,
            ended: false,
            server: Vec::new(),
            load,
        };
        for word in words {
            line.push(word);
        }
        line
    }

    fn push(&mut self, word: &str) {
        if let Some(flag) = self.pending.take() {
            self.add_server(flag, word);
        } else if self.ended || !word.starts_with('-') || word == "-" {
            match self.command.find_subcommand(word).filter(|_| !self.ended) {
                Some(command) => (self.command, self.positionals) = (command, 0),
                None => self.positionals += 1,
            }
        } else if word == "--" {
            self.ended = true;
        } else if let Some((name, value)) = word.split_once('=') {
            if let Some(flag) = self.find(name) {
                self.add_server(flag, value);
            }
        } else {
            self.pending = self.find(word).filter(|flag| flag.get_action().takes_values());
        }
    }

    fn find(&self, word: &str) -> Option<&'a Arg> {
        let last = word.chars().last();
        self.command.get_arguments().find(|argument| match word.strip_prefix("--") {
            Some(long) => argument.get_long() == Some(long),
            None => argument.get_short().is_some() && argument.get_short() == last,
        })
    }

    fn add_server(&mut self, flag: &Arg, value: &str) {
        let key = SERVER_FLAGS.into_iter().find(|(long, _)| flag.get_long() == Some(long));
        self.server.extend(key.map(|(_, path)| (path, value.to_owned())));
    }

    /// Candidates for the value of an argument.
    async fn values(&self, argument: &Arg, current: &str) -> Vec<String> {
        let possible = argument.get_possible_values();
        if !possible.is_empty() {
            return possible.iter().map(|value| value.get_name().to_owned()).collect();
        }
        let source = match (argument.get_id().as_str(), self.command.get_name()) {
            ("session" | "sessions", _) => Source::Sessions,
            ("run" | "runs", _) => Source::Runs,
            ("target" | "targets", "attach" | "ps" | "kill") => Source::RunsAndSessions,
            ("sources" | "destination" | "source" | "paths" | "path", _) => Source::Files,
            ("approval", _) => Source::Approvals,
            ("tenant", _) => Source::Tenants,
            ("key", _) => Source::Keys,
            ("worker", _) => Source::Workers,
            ("flag", _) => Source::Flags,
            ("tool", _) => Source::Tools,
            ("profile", _) => Source::Profiles,
            ("volume", _) => Source::Volumes,
            ("context", _) | ("name", "use" | "show" | "remove") => Source::Contexts,
            ("policy_file" | "policy" | "file", _) => return policy_files(current),
            _ => return Vec::new(),
        };
        names::find(source, current, || (self.load)(&self.server)).await.unwrap_or_default()
    }
}

/// The argument that the next positional word belongs to.
fn positional(command: &Command, position: usize) -> Option<&Arg> {
    let all: Vec<&Arg> = command.get_positionals().collect();
    let takes_more =
        |argument: &Arg| argument.get_num_args().is_some_and(|range| range.max_values() > 1);
    // In `cp` the argument that takes several values is not the last one.
    all.get(position).or_else(|| all.iter().rev().find(|argument| takes_more(argument))).copied()
}

/// Policy files and directories whose path starts with `current`.
fn policy_files(current: &str) -> Vec<String> {
    let (directory, shown) = match current.rsplit_once('/') {
        Some((directory, _)) => (format!("{directory}/"), format!("{directory}/")),
        None => (".".to_owned(), String::new()),
    };
    let entries = Path::new(&directory).read_dir().into_iter().flatten().flatten();
    let candidate = |entry: std::fs::DirEntry| {
        let name = entry.file_name().into_string().ok()?;
        if entry.path().is_dir() {
            return Some(format!("{shown}{name}/"));
        }
        let extension = Path::new(&name).extension()?.to_str()?;
        POLICY_EXTENSIONS.contains(&extension).then(|| format!("{shown}{name}"))
    };
    entries.filter_map(candidate).collect()
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::args::{self, Program};

    async fn complete(line: &str) -> Vec<String> {
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        let load: LoadSettings<'_> = &|_| Ok(Settings::default());
        candidates(&words, Program::<args::Command>::command(), load).await
    }

    #[tokio::test]
    async fn commands_and_flags_are_completed() {
        assert_eq!(complete("att").await, ["attach"]);
        assert_eq!(complete("session cl").await, ["close"]);
        assert_eq!(complete("approvals de").await, ["deny"]);
        assert_eq!(complete("approvals allow --for ten").await, ["tenant"]);
        assert_eq!(complete("run --time").await, ["--timeout"]);
        assert_eq!(complete("keys create --scope op").await, ["operator"]);
        assert!(
            complete("run --timeout 5s -- --js").await.is_empty(),
            "after -- there are no flags"
        );
    }

    #[tokio::test]
    async fn policy_files_are_completed() {
        let temp = tempfile::tempdir().unwrap();
        for name in ["strict.yaml", "strict.txt", "$(id).toml"] {
            std::fs::write(temp.path().join(name), "").unwrap();
        }
        std::fs::create_dir(temp.path().join("sub")).unwrap();
        let directory = temp.path().display();
        let mut found = complete(&format!("policy check {directory}/")).await;
        found.sort();
        assert_eq!(found, [format!("{directory}/strict.yaml"), format!("{directory}/sub/")]);
        assert_eq!(
            complete(&format!("run --policy {directory}/str")).await,
            [format!("{directory}/strict.yaml")]
        );
    }

    #[test]
    fn names_with_shell_syntax_are_not_offered() {
        for hostile in ["$(id)", "a b", "a;b", "`id`", "a\nb", "~root", "é\u{1b}", "*"] {
            assert!(!is_harmless(hostile), "{hostile}");
        }
        assert!(is_harmless("work:src/a-b_c.1"));
    }
}
