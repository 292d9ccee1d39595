//! A test of the documents: every `codelia …` command line in them parses against the CLI.

use std::{
    iter::Peekable,
    path::{Path, PathBuf},
    str::Chars,
};

use clap::{
    CommandFactory, Parser,
    error::{ContextKind, ContextValue, ErrorKind},
};

use crate::args::Cli;

/// Fenced blocks in other languages hold no command lines.
const SHELL_LANGUAGES: [&str; 6] = ["", "sh", "bash", "shell", "console", "text"];
/// Words that may stand before `codelia` in a command line.
const PREFIXES: [&str; 5] = ["$", "#", "sudo", "time", "try"];

#[test]
fn commands_in_documents_parse() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut files = vec![root.join("README.md"), root.join("CONTRIBUTING.md")];
    collect_markdown(&root.join("docs"), &mut files);
    collect_markdown(&root.join("deploy"), &mut files);
    let mut count = 0;
    let mut failures = Vec::new();
    for file in files {
        let name = file.strip_prefix(&root).unwrap().display().to_string();
        for snippet in snippets(&std::fs::read_to_string(&file).unwrap()) {
            for command in commands(&snippet) {
                count += 1;
                if let Err(reason) = check(&command, snippet.inline) {
                    failures.push(format!(
                        "{name}:{}: {}: {reason}",
                        snippet.line,
                        command.words.join(" ")
                    ));
                }
            }
        }
    }
    assert!(count > 20, "found only {count} commands");
    assert!(
        failures.is_empty(),
        "commands in documents that do not parse:\n{}",
        failures.join("\n")
    );
}

#[test]
fn wrong_commands_in_documents_are_found() {
    let failing = |text: &str| {
        let snippets = snippets(text);
        snippets
            .iter()
            .flat_map(|snippet| {
                commands(snippet).into_iter().map(|command| check(&command, snippet.inline))
            })
            .filter(Result::is_err)
            .count()
    };
    for wrong in [
        "`codelia wrokers list`",
        "`codelia workers`",
        "`codelia run --no-such-flag -- true`",
        "`codelia run --static --ro --no-such-flag`",
        "```sh\n$ codelia run --memry 5 -- true\n```",
        "```\nCODELIA_API_KEY=x codelia sesion list | less\n```",
        "```\ncodelia attach $(codelia start -- true)\n```",
        "```\ncodelia run\n```",
        "```\ncodelia kill ID --force\n```",
        "```\ncodelia session create \\\n  --no-such-flag\n```",
    ] {
        assert_eq!(failing(wrong), 1, "{wrong}");
    }
    for right in [
        "`codelia workers list` and `codelia run`; see `codelia tenants floor`, `codelia --help`",
        "`codelia run --static --ro --overlay --deny`",
        "`codelia session extend SESSION --ttl DURATION`, `codelia kill <run>`, `codelia run …`",
        "```sh\n$ codelia run -- sh -c 'echo out; exit 7' > out 2>&1   # a comment\n```",
        "```\ncodelia attach $(codelia run -d -- make test) && codelia ps\n```",
        "```\ncodelia 0.1.0\ncodelia: SYSCALL_BLOCKED\n```",
        "```rust\ncodelia nonsense\n```",
    ] {
        assert_eq!(failing(right), 0, "{right}");
    }
}

fn collect_markdown(directory: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect_markdown(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            files.push(path);
        }
    }
}

/// A piece of code in a document.
struct Snippet {
    text: String,
    /// Line number, from 1.
    line: usize,
    /// In a sentence, where a command may be named without its arguments.
    inline: bool,
}

/// Lines of fenced shell blocks, and inline code.
fn snippets(document: &str) -> Vec<Snippet> {
    let mut found = Vec::new();
    let mut paragraph = (1, String::new());
    let mut fence: Option<&str> = None;
    let mut continued: Option<(usize, String)> = None;
    for (number, line) in (1..).zip(document.lines()) {
        if let Some(language) = line.trim_start().strip_prefix("```") {
            inline_code(&std::mem::take(&mut paragraph.1), paragraph.0, &mut found);
            fence = if fence.is_some() { None } else { Some(language.trim()) };
        } else if let Some(language) = fence {
            if !SHELL_LANGUAGES.contains(&language) {
                continue;
            }
            let (first, mut text) = continued.take().unwrap_or((number, String::new()));
            match line.strip_suffix('\\') {
                Some(start) => {
                    text.push_str(start);
                    continued = Some((first, text));
                }
                None => found.push(Snippet { text: text + line, line: first, inline: false }),
            }
        } else if line.trim().is_empty() {
            inline_code(&std::mem::take(&mut paragraph.1), paragraph.0, &mut found);
        } else {
            if paragraph.1.is_empty() {
                paragraph.0 = number;
            }
            paragraph.1.push_str(line);
            paragraph.1.push('\n');
        }
    }
    inline_code(&paragraph.1, paragraph.0, &mut found);
    found
}

fn inline_code(paragraph: &str, first_line: usize, found: &mut Vec<Snippet>) {
    let mut line = first_line;
    for (index, part) in paragraph.split('`').enumerate() {
        if index % 2 == 1 {
            found.push(Snippet { text: part.replace('\n', " "), line, inline: true });
        }
        line += part.matches('\n').count();
    }
}

/// A command line that starts with `codelia`.
#[derive(Default)]
struct CommandLine {
    words: Vec<String>,
    /// Ended by `…`: more arguments follow.
    is_partial: bool,
}

/// The `codelia` commands of a snippet.
fn commands(snippet: &Snippet) -> Vec<CommandLine> {
    let mut all = Vec::new();
    split(&mut snippet.text.chars().peekable(), &mut all);
    all.into_iter().filter_map(codelia_command).collect()
}

fn codelia_command(mut command: CommandLine) -> Option<CommandLine> {
    let is_prefix = |word: &String| PREFIXES.contains(&word.as_str()) || word.contains('=');
    let start = command.words.iter().position(|word| !is_prefix(word))?;
    command.words.drain(..start);
    let is_codelia = command.words[0] == "codelia" || command.words[0].ends_with("/codelia");
    // `codelia 0.1.0` is the first line of the banner.
    let is_version =
        command.words.get(1).is_some_and(|word| word.starts_with(|c: char| c.is_ascii_digit()));
    let is_bare = command.words.len() == 1 && !command.is_partial;
    (is_codelia && !is_version && !is_bare).then_some(command)
}

/// Splits shell text into commands and words, up to a closing parenthesis or the end.
fn split(text: &mut Peekable<Chars<'_>>, all: &mut Vec<CommandLine>) {
    let mut command = CommandLine::default();
    let mut word: Option<String> = None;
    // After a redirection or `…`, the rest of the command is ignored.
    let mut ignored = false;
    while let Some(c) = text.next() {
        match c {
            ')' => break,
            '$' if text.peek() == Some(&'(') => {
                text.next();
                split(text, all);
                word.get_or_insert_default().push_str("OUTPUT");
            }
            '\'' | '"' => {
                let quoted: String = text.take_while(|inner| *inner != c).collect();
                word.get_or_insert_default().push_str(&quoted);
            }
            '#' if word.is_none() && !command.words.is_empty() => break,
            '<' if placeholder(text, &mut word) => {}
            '>' | '<' => {
                // `2>` redirects a descriptor: the number is not an argument.
                word.take_if(|word| word.chars().all(|c| c.is_ascii_digit()));
                command.words.extend(word.take().filter(|_| !ignored));
                ignored = true;
                text.next_if(|next| matches!(next, '&' | '>'));
            }
            '…' => {
                command.words.extend(word.take().filter(|_| !ignored));
                command.is_partial = true;
                ignored = true;
            }
            '|' | ';' | '&' => {
                command.words.extend(word.take().filter(|_| !ignored));
                all.push(std::mem::take(&mut command));
                ignored = false;
            }
            '[' | ']' => {}
            c if c.is_whitespace() => command.words.extend(word.take().filter(|_| !ignored)),
            c => word.get_or_insert_default().push(c),
        }
    }
    command.words.extend(word.filter(|_| !ignored));
    all.push(command);
}

/// Reads `run>` of `<run>` as a value.
fn placeholder(text: &mut Peekable<Chars<'_>>, word: &mut Option<String>) -> bool {
    let name: String =
        text.clone().take_while(|c| c.is_alphanumeric() || matches!(c, '-' | '_')).collect();
    let is_placeholder = !name.is_empty() && text.clone().nth(name.chars().count()) == Some('>');
    if is_placeholder {
        text.nth(name.chars().count());
        word.get_or_insert_default().push_str(&name.to_uppercase());
    }
    is_placeholder
}

/// Whether the CLI accepts a command line.
fn check(command: &CommandLine, inline: bool) -> Result<(), String> {
    let error = match Cli::try_parse_from(&command.words) {
        Ok(_) => return Ok(()),
        Err(error) => error,
    };
    let accepted = match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => true,
        ErrorKind::MissingRequiredArgument => inline || command.is_partial,
        ErrorKind::MissingSubcommand | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            command.is_partial
        }
        ErrorKind::InvalidValue | ErrorKind::ValueValidation => match error
            .get(ContextKind::InvalidValue)
        {
            Some(ContextValue::String(value)) if value.is_empty() => inline || command.is_partial,
            Some(ContextValue::String(value)) => {
                value.chars().all(|c| c.is_ascii_uppercase() || matches!(c, '_' | '-'))
            }
            _ => inline || command.is_partial,
        },
        _ => false,
    };
    if !accepted {
        return Err(match error.kind() {
            ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => "missing subcommand".to_owned(),
            _ => error.to_string().lines().next().unwrap_or_default().to_owned(),
        });
    }
    check_flags(&command.words)
}

/// Looks up every long flag: the parser stopped before it saw them all.
fn check_flags(words: &[String]) -> Result<(), String> {
    let mut cli = Cli::command();
    cli.build();
    let mut command = &cli;
    for word in words.iter().skip(1).take_while(|word| *word != "--") {
        if let Some(flag) = word.strip_prefix("--") {
            let name = flag.split('=').next().unwrap_or(flag);
            if !command.get_arguments().any(|argument| argument.get_long() == Some(name)) {
                return Err(format!("unknown flag --{name}"));
            }
        } else if let Some(subcommand) = command.find_subcommand(word) {
            command = subcommand;
        }
    }
    Ok(())
}
