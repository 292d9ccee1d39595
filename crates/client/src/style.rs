//! Colours: only on terminals, and not if `NO_COLOR` is set (no-color.org).

use std::{borrow::Cow, env, io::IsTerminal};

const RED: &str = "\x1b[1;31m";
const RESET: &str = "\x1b[0m";

/// Marks a word as an error.
pub(crate) fn error<'a>(word: &'a str, stream: &impl IsTerminal) -> Cow<'a, str> {
    if has_colours(stream) { format!("{RED}{word}{RESET}").into() } else { word.into() }
}

fn has_colours(stream: &impl IsTerminal) -> bool {
    let is_off = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    stream.is_terminal() && !is_off && env::var_os("TERM").is_none_or(|terminal| terminal != "dumb")
}
