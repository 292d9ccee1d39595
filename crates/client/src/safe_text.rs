//! Text of callers and sandboxes on a terminal. A control character could move the cursor, change
//! what was printed before, or type into the terminal; an invisible one could hide or reorder text.
//! Such characters appear as `\u001b`, which is also how JSON writes them.
//!
//! Every table and message passes through here; [`crate::output`] is the only way to print one.

use std::{borrow::Cow, fmt::Write, io::IsTerminal};

/// Text for one line or table cell: safe if the stream is a terminal, else unchanged.
pub(crate) fn line<'a>(text: &'a str, stream: &impl IsTerminal) -> Cow<'a, str> {
    if stream.is_terminal() { escape(text, is_unsafe) } else { Cow::Borrowed(text) }
}

/// Like [`line()`], for text with several lines.
pub(crate) fn lines<'a>(text: &'a str, stream: &impl IsTerminal) -> Cow<'a, str> {
    if stream.is_terminal() {
        escape(text, |c| c != '\n' && is_unsafe(c))
    } else {
        Cow::Borrowed(text)
    }
}

fn escape(text: &str, is_unsafe: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.contains(&is_unsafe) {
        return Cow::Borrowed(text);
    }
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        if is_unsafe(c) {
            for unit in c.encode_utf16(&mut [0; 2]) {
                // Writing to a string does not fail.
                let _ = write!(safe, "\\u{unit:04x}");
            }
        } else {
            safe.push(c);
        }
    }
    Cow::Owned(safe)
}

/// Control characters (C0, DEL, C1), line separators, characters that set the direction of text,
/// and those without a width.
fn is_unsafe(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}'..='\u{1160}' | '\u{17b4}'..='\u{17b5}'
            | '\u{180b}'..='\u{180f}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{3164}' | '\u{feff}' | '\u{ffa0}'
            | '\u{fff0}'..='\u{fffb}' | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}'
            | '\u{e0000}'..='\u{e0fff}')
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use super::*;

    #[test]
    fn unsafe_characters_are_escaped() {
        for (text, safe) in [
            ("a\x1b[31m\x07", "a\\u001b[31m\\u0007"),
            ("\u{9b}2J\x7f", "\\u009b2J\\u007f"),
            ("a\nb\tc\r", "a\\u000ab\\u0009c\\u000d"),
            ("gpj.\u{202e}exe\u{2066}\u{200f}", "gpj.\\u202eexe\\u2066\\u200f"),
            ("a\u{200b}b\u{feff}\u{2028}", "a\\u200bb\\ufeff\\u2028"),
            ("\u{e0041}", "\\udb40\\udc41"),
        ] {
            assert_eq!(escape(text, is_unsafe), safe);
        }
        for plain in ["", "naïve e\u{301} 日本語 \u{3000} שלום 🙂 \\u001b", "a/b -> ../c"]
        {
            assert_eq!(escape(plain, is_unsafe), plain);
        }
    }

    #[test]
    fn escaped_json_stays_the_same_value() {
        let value = serde_json::json!({ "name": "\u{9b}\x1b\u{202e}\u{e0041}\n" });
        let text = value.to_string();
        assert!(text.contains('\u{9b}'), "control: JSON leaves it as it is");
        let safe = escape(&text, is_unsafe);
        assert!(!safe.contains(is_unsafe));
        assert_eq!(serde_json::from_str::<serde_json::Value>(&safe).unwrap(), value);
    }

    /// Only these may write to a stream: `output` and `streams` escape text, `system` opens what
    /// `streams` writes to, and `download` copies content.
    #[test]
    fn nothing_else_writes_to_streams() {
        let allowed = [
            "output.rs",
            "streams.rs",
            "system/unix.rs",
            "system/other.rs",
            "commands/files/download.rs",
            "safe_text.rs",
        ]
        .map(|name| format!("client/src/{name}"));
        let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let mut open = vec![crates.join("client/src"), crates.join("cli/src")];
        let mut checked = 0;
        while let Some(directory) = open.pop() {
            for entry in fs::read_dir(directory).unwrap() {
                let path = entry.unwrap().path();
                let name = path.strip_prefix(&crates).unwrap().to_str().unwrap().to_owned();
                if path.is_dir() {
                    open.push(path);
                } else if !allowed.contains(&name) {
                    checked += 1;
                    let text = fs::read_to_string(&path).unwrap();
                    let writes = |line: &&str| {
                        ["stdout()", "stderr()"].iter().any(|stream| line.contains(stream))
                            && !line.contains("is_terminal")
                            && !line.contains("tcgetwinsize")
                    };
                    assert_eq!(text.lines().find(writes), None, "{name}: print with crate::output");
                }
            }
        }
        assert!(checked > 20, "{checked} files");
    }
}
