//! Arguments of `codelia cp` and `codelia ls`.

use std::{convert::Infallible, path::PathBuf, str::FromStr};

use clap::Args;

#[derive(Debug, Args)]
#[command(after_help = "\
The destination file appears once the copy is complete. An existing local file is replaced only with
--force; a link is replaced itself, never followed. Write a local name that has a colon as ./a:b.

Examples:
  codelia cp notes.txt work:             into the workspace of session `work`
  codelia cp notes.txt work:docs/new.txt under another name
  codelia cp work:out/report.pdf .       out of the session
  tar c src | codelia cp - work:src.tar  from stdin
  codelia cp work:out.log - | less       to stdout")]
pub(crate) struct Cp {
    /// SESSION:PATH, a local file, or - for stdin
    pub(crate) source: CopyPath,
    /// SESSION:PATH, a local file or directory, or - for stdout
    pub(crate) destination: CopyPath,
    /// Replace an existing local file
    #[arg(short, long)]
    pub(crate) force: bool,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  codelia ls work\n  codelia ls work:src/bin\n  codelia ls --json work | jq '.[].path'"
)]
pub(crate) struct Ls {
    /// Session, or a path in it [default path: the workspace]
    #[arg(value_name = "SESSION[:PATH]")]
    pub(crate) path: String,
    /// List at most this many entries, sorted by name [default: all]
    #[arg(long, value_name = "N", default_value_t = usize::MAX, hide_default_value = true)]
    pub(crate) limit: usize,
}

/// Source or destination of a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum CopyPath {
    /// A path in a session, given by id or alias.
    Session { session: String, path: String },
    /// A local path.
    Local(PathBuf),
    /// Standard input or output.
    Stdio,
}

impl FromStr for CopyPath {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        if text == "-" {
            return Ok(Self::Stdio);
        }
        Ok(match text.split_once(':') {
            // `./a:b` and `/a:b` are local paths.
            Some((session, path)) if !session.is_empty() && !session.starts_with(['.', '/']) => {
                Self::Session { session: session.to_owned(), path: path.to_owned() }
            }
            _ => Self::Local(text.into()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copy_path_with_session_prefix_is_remote() {
        let session =
            |session: &str, path: &str| CopyPath::Session { session: session.into(), path: path.into() };
        for (text, parsed) in [
            ("work:a/b", session("work", "a/b")),
            ("work:", session("work", "")),
            ("sessions/work:a:b", session("sessions/work", "a:b")),
            ("a/b", CopyPath::Local("a/b".into())),
            ("./a:b", CopyPath::Local("./a:b".into())),
            ("../a:b", CopyPath::Local("../a:b".into())),
            ("/a:b", CopyPath::Local("/a:b".into())),
            (":a", CopyPath::Local(":a".into())),
            ("-", CopyPath::Stdio),
        ] {
            assert_eq!(text.parse(), Ok(parsed), "{text}");
        }
    }
}
