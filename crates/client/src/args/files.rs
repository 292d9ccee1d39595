//! Arguments of the file commands: `codelia cp`, `cat`, `ls`, `rm`, `mkdir`, `mv`, `export`,
//! `import` and `watch`.

use std::{convert::Infallible, fmt, path::PathBuf, str::FromStr};

use clap::Args;

#[derive(Debug, Args)]
#[command(after_help = "\
A destination file appears once its copy is complete. An existing local file is replaced only with
--force; a link is replaced itself, never followed. Write a local name that has a colon as ./a:b.

With several sources the destination must be a directory: an existing one, or one that ends with a
slash in a session. Missing directories in a session are created. A directory is copied into an
existing directory, else under the new name. Links and special files in a directory are skipped
with a message.

With --resume, files that the destination has already are skipped: those of the same size that are
not older than the source. A download that is interrupted leaves a hidden file next to its
destination (.codelia-*.part), and the next one continues it, unless the source has changed. A file
that is interrupted while it is uploaded is uploaded again from its beginning.

Examples:
  codelia cp notes.txt work:             into the workspace of session `work`
  codelia cp notes.txt work:docs/new.txt under another name
  codelia cp a.txt b.txt work:docs/      several files
  codelia cp -r src work:                a directory with everything in it
  codelia cp -r work:out results         out of the session
  codelia cp -r --resume work:out res    continue a copy that was interrupted
  tar c src | codelia cp - work:src.tar  from stdin
  codelia cp work:out.log - | less       to stdout")]
pub struct Cp {
    /// SESSION:PATH, a local file or directory, or - for stdin
    #[arg(required = true, value_name = "SOURCE")]
    pub sources: Vec<CopyPath>,
    /// SESSION:PATH, a local file or directory, or - for stdout
    #[arg(required = true)]
    pub destination: CopyPath,
    /// Copy directories with everything in them
    #[arg(short, long)]
    pub recursive: bool,
    /// Replace existing local files
    #[arg(short, long)]
    pub force: bool,
    /// Continue a copy that was interrupted: skip complete files, continue downloads
    #[arg(long)]
    pub resume: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  codelia cat work:out.log work:err.log | less")]
pub struct Cat {
    /// Files to write to stdout, one after the other
    #[arg(required = true, value_name = "SESSION:PATH")]
    pub paths: Vec<SessionPath>,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  codelia ls work\n  codelia ls -R work:src\n  codelia ls -R --depth 2 work\n  codelia ls --json work | jq '.[].path'"
)]
pub struct Ls {
    /// Session, or a path in it [default path: the workspace]
    #[arg(value_name = "SESSION[:PATH]", value_parser = session_or_path)]
    pub path: SessionPath,
    /// List directories with everything in them
    #[arg(short = 'R', long)]
    pub recursive: bool,
    /// With --recursive, list this many levels of directories [default: all, max: 100]
    #[arg(long, value_name = "N", requires = "recursive", value_parser = clap::value_parser!(i32).range(1..=100))]
    pub depth: Option<i32>,
    /// List at most this many entries, sorted by name [default: all]
    #[arg(long, value_name = "N", default_value_t = usize::MAX, hide_default_value = true)]
    pub limit: usize,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  codelia rm work:notes.txt\n  codelia rm -r work:build work:dist"
)]
pub struct Rm {
    /// Files, links or directories to remove; a link is not followed
    #[arg(required = true, value_name = "SESSION:PATH")]
    pub paths: Vec<SessionPath>,
    /// Remove directories with everything in them
    #[arg(short, long)]
    pub recursive: bool,
    /// Ignore files that do not exist
    #[arg(short, long)]
    pub force: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  codelia mkdir -p work:src/bin")]
pub struct Mkdir {
    /// Directories to create
    #[arg(required = true, value_name = "SESSION:PATH")]
    pub paths: Vec<SessionPath>,
    /// Create missing parents too, and succeed if the directory exists
    #[arg(short, long)]
    pub parents: bool,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  codelia mv work:a.txt work:b.txt\n  codelia mv work:a.txt work:docs/"
)]
pub struct Mv {
    /// File, link or directory to move; a link is not followed
    #[arg(value_name = "SESSION:PATH")]
    pub source: SessionPath,
    /// New path in the same session, or an existing directory
    #[arg(value_name = "SESSION:NEW_PATH")]
    pub destination: SessionPath,
    /// Replace an existing file or empty directory
    #[arg(short, long)]
    pub force: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Names in the archive are relative to the directory. Links are packed as links. FIFOs, sockets and
devices are skipped with a message; files that cannot be read too, and then the exit status is 1.
An export that is interrupted cannot be resumed: start it again, or use `codelia cp -r --resume`.

Examples:
  codelia export work:src -o src.tar       a directory
  codelia export work -o work.tar.zst      the workspace, compressed
  codelia export work:out | tar x -C out   to another program")]
pub struct Export {
    /// Session, or a directory in it [default path: the workspace]
    #[arg(value_name = "SESSION[:DIRECTORY]", value_parser = session_or_path)]
    pub path: SessionPath,
    /// File to write, or - for stdout
    #[arg(short, long, value_name = "FILE", default_value = "-")]
    pub output: PathBuf,
    /// Compress with zstd [default: if the name of the file ends with zst]
    #[arg(long)]
    pub zstd: bool,
    /// Replace an existing file
    #[arg(short, long)]
    pub force: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Reads tar archives, also compressed with zstd. A directory that does not exist appears when the
import is complete. Existing files are replaced only with --force; without it the first one ends
the import. An import that is interrupted cannot be resumed: start it again (with --force if the
directory existed), or use `codelia cp -r --resume`.

Examples:
  codelia import src.tar work:src
  codelia import --force node_modules.tar.zst work:
  tar c src | codelia import - work:copy")]
pub struct Import {
    /// Archive to unpack, or - for stdin
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Directory to unpack into
    #[arg(value_name = "SESSION:DIRECTORY")]
    pub path: SessionPath,
    /// Replace existing files
    #[arg(short, long)]
    pub force: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Prints a line for each change: created, modified, removed, renamed, or overflow, after which some
changes are missing and the directory should be listed again. With --json each line is an object.
Ends with the session. At most 4096 directories are watched; links are not followed.

Examples:
  codelia watch work
  codelia watch -r work:src
  codelia watch -r --json work | jq -r .path")]
pub struct Watch {
    /// Session, or a directory in it [default path: the workspace]
    #[arg(value_name = "SESSION[:DIRECTORY]", value_parser = session_or_path)]
    pub path: SessionPath,
    /// Also watch the directories in it
    #[arg(short, long)]
    pub recursive: bool,
}

/// Source or destination of a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CopyPath {
    Session(SessionPath),
    /// A local path.
    Local(PathBuf),
    /// Standard input or output.
    Stdio,
}

/// A path in a session, given by id or alias.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionPath {
    pub session: String,
    pub path: String,
}

impl FromStr for CopyPath {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(match text.parse() {
            _ if text == "-" => Self::Stdio,
            Ok(path) => Self::Session(path),
            Err(_) => Self::Local(text.into()),
        })
    }
}

impl fmt::Display for CopyPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Session(path) => path.fmt(f),
            Self::Local(path) => path.display().fmt(f),
            Self::Stdio => f.write_str("-"),
        }
    }
}

impl SessionPath {
    /// Another path in the same session.
    pub(crate) fn with_path(&self, path: String) -> Self {
        Self { session: self.session.clone(), path }
    }
}

impl FromStr for SessionPath {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once(':') {
            // `./a:b` and `/a:b` are local paths.
            Some((session, path)) if !session.is_empty() && !session.starts_with(['.', '/']) => {
                Ok(Self { session: session.to_owned(), path: path.to_owned() })
            }
            _ => Err("expected SESSION:PATH, such as work:notes.txt"),
        }
    }
}

/// Parses a session, which means its workspace, or a path in it.
fn session_or_path(text: &str) -> Result<SessionPath, Infallible> {
    let (session, path) = text.split_once(':').unwrap_or((text, ""));
    Ok(SessionPath { session: session.to_owned(), path: path.to_owned() })
}

impl fmt::Display for SessionPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.session, self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copy_path_with_session_prefix_is_remote() {
        let session = |session: &str, path: &str| {
            CopyPath::Session(SessionPath { session: session.into(), path: path.into() })
        };
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
            assert_eq!(text.parse(), Ok(parsed.clone()), "{text}");
            assert_eq!(parsed.to_string(), text);
        }
        assert!("notes.txt".parse::<SessionPath>().is_err());
    }
}
