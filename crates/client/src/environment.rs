//! The environment of a command: from arguments, this process's environment and files. Messages
//! name variables and lines, never values.

use std::{
    collections::HashMap,
    env,
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail, ensure};

use crate::args::EnvArgs;

/// The server accepts 1 MiB of variables.
const MAX_FILE_BYTES: u64 = 2 * 1024 * 1024;

type Variables = HashMap<String, String>;

/// The ordinary variables. An argument overrides a file.
pub(crate) fn plain(args: &EnvArgs) -> Result<Variables> {
    let mut variables = read_files("--env-file", &args.env_file)?;
    for text in &args.env {
        let (name, value) = match text.split_once('=') {
            Some((name, value)) => (name.to_owned(), value.to_owned()),
            None => (text.clone(), inherited("--env", text)?),
        };
        variables.insert(name, value);
    }
    Ok(variables)
}

/// The secret variables. An argument overrides a file.
pub(crate) fn secret(args: &EnvArgs) -> Result<Variables> {
    let mut variables = read_files("--secret-env-file", &args.secret_env_file)?;
    for name in &args.secret_env {
        if let Some((name, _)) = name.split_once('=') {
            bail!(
                "--secret-env {name}=…: other users can read arguments; set {name} in the environment and \
                 use --secret-env {name}, or use --secret-env-file"
            );
        }
        variables.insert(name.clone(), inherited("--secret-env", name)?);
    }
    Ok(variables)
}

/// A variable of this process.
fn inherited(flag: &str, name: &str) -> Result<String> {
    match env::var(name) {
        Ok(value) => Ok(value),
        Err(env::VarError::NotPresent) => {
            bail!("{flag} {name}: {name} is not set in this environment")
        }
        Err(env::VarError::NotUnicode(_)) => {
            bail!("{flag} {name}: the value of {name} is not UTF-8")
        }
    }
}

fn read_files(flag: &str, files: &[PathBuf]) -> Result<Variables> {
    let mut variables = Variables::new();
    for file in files {
        variables.extend(read_file(file).with_context(|| format!("{flag} {}", file.display()))?);
    }
    Ok(variables)
}

fn read_file(path: &Path) -> Result<Variables> {
    let mut text = String::new();
    let size = File::open(path)?.take(MAX_FILE_BYTES + 1).read_to_string(&mut text)?;
    ensure!(size as u64 <= MAX_FILE_BYTES, "larger than 2 MiB");
    parse(&text)
}

/// Parses lines `K=V`. The value is the rest of the line as it is: quotes belong to it.
fn parse(text: &str) -> Result<Variables> {
    let is_variable =
        |line: &str| !line.trim_start().is_empty() && !line.trim_start().starts_with('#');
    let lines = text.lines().zip(1..).filter(|(line, _)| is_variable(line));
    lines
        .map(|(line, number)| match line.trim_start().split_once('=') {
            Some((name, value)) if !name.is_empty() && !name.contains(char::is_whitespace) => {
                Ok((name.to_owned(), value.to_owned()))
            }
            _ => bail!("line {number}: expected K=V"),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn file(text: &str) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file
    }

    fn message(result: Result<Variables>) -> String {
        format!("{:#}", result.unwrap_err())
    }

    #[test]
    fn file_has_lines_comments_and_blanks() {
        let text = "# comment\n\nA=1\n  B= x # y\nC=\nD=\"quoted\"=\r\n";
        let variables = parse(text).unwrap();
        let mut sorted: Vec<_> = variables.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
        sorted.sort_unstable();
        assert_eq!(sorted, [("A", "1"), ("B", " x # y"), ("C", ""), ("D", "\"quoted\"=")]);
    }

    #[test]
    fn bad_line_is_named_without_its_text() {
        for text in ["A=1\n\nhush\n", "A=1\n#\n=hush", "A=1\n\nB = hush"] {
            let file = file(text);
            let args =
                EnvArgs { secret_env_file: vec![file.path().to_owned()], ..Default::default() };
            let message = message(secret(&args));
            assert!(
                message.contains("--secret-env-file") && message.contains("line 3"),
                "{message}"
            );
            assert!(!message.contains("hush"), "{message}");
        }
    }

    #[test]
    fn argument_overrides_file() {
        let file = file("A=1\nB=2\n");
        let args = EnvArgs {
            env: vec!["B=3=4".into(), "PATH".into()],
            env_file: vec![file.path().to_owned()],
            ..Default::default()
        };
        let variables = plain(&args).unwrap();
        assert_eq!((variables["A"].as_str(), variables["B"].as_str()), ("1", "3=4"));
        assert_eq!(variables["PATH"], env::var("PATH").unwrap());
    }

    #[test]
    fn unset_variable_and_secret_in_argument_are_refused() {
        let name = || vec!["CODELIA_TEST_NO_SUCH_VARIABLE".to_owned()];
        for result in [
            plain(&EnvArgs { env: name(), ..Default::default() }),
            secret(&EnvArgs { secret_env: name(), ..Default::default() }),
        ] {
            assert!(message(result).contains("is not set"));
        }
        let message =
            message(secret(&EnvArgs { secret_env: vec!["A=hush".into()], ..Default::default() }));
        assert!(message.contains("--secret-env-file") && !message.contains("hush"), "{message}");
    }
}
