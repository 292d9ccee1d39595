//! Commands in the audit: a hash, to compare, and the start of their text without secrets.

use codelia_policy::RunSpec;
use serde_json::{Value, json};

use super::event::Hasher;

/// Characters of a preview.
const PREVIEW: usize = 100;
/// Bytes of arguments that are looked at for it.
const MAX_TEXT: usize = 4096;
/// Stands for a secret.
const REDACTED: &str = "[redacted]";
/// Parts of names whose values are secrets.
const SECRET_NAMES: [&str; 9] = [
    "password",
    "passwd",
    "secret",
    "token",
    "apikey",
    "api_key",
    "api-key",
    "credential",
    "private",
];
/// How the values of well-known secrets begin.
const SECRET_STARTS: [&str; 10] =
    ["ghp_", "gho_", "ghs_", "github_pat_", "glpat-", "sk-", "xoxb-", "xoxp-", "AKIA", "eyJ"];

/// The details of the event of a run.
pub(crate) fn command_detail(spec: &RunSpec) -> Value {
    let mut hash = Hasher::new("codelia command 1");
    spec.command.argv.iter().for_each(|argument| hash.bytes(argument.as_bytes()));
    let mut detail = json!({
        "command_sha256": hex::encode(hash.finish()),
        "command_preview": preview(&spec.command.argv),
        "mode": spec.mode.as_str(),
    });
    if let Some(tool) = &spec.tool {
        detail["tool"] = json!({ "id": tool.id.as_str(), "version": tool.version, "level": tool.level.as_str() });
    }
    detail
}

/// The first characters of the command. Values that look like secrets are left out; that is a help,
/// not a promise: a secret belongs in `secret_env`.
fn preview(argv: &[String]) -> String {
    let mut text = String::new();
    let mut is_value = false;
    let words = argv
        .iter()
        .flat_map(|argument| argument[..argument.floor_char_boundary(MAX_TEXT)].split_whitespace());
    for word in words {
        if text.chars().count() > PREVIEW {
            break;
        }
        if !text.is_empty() {
            text.push(' ');
        }
        let bare = word.trim_matches(['"', '\'']);
        text.push_str(&if is_value { REDACTED.to_owned() } else { redact(word) });
        // The value of `--token VALUE`, `Bearer VALUE` and `-u USER:VALUE` is the next word.
        is_value = (bare.starts_with('-') && !bare.contains('=') && is_secret_name(bare))
            || bare.eq_ignore_ascii_case("bearer")
            || bare.eq_ignore_ascii_case("basic")
            || bare == "-u";
    }
    text.chars().take(PREVIEW).collect()
}

fn is_secret_name(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    SECRET_NAMES.iter().any(|part| name.contains(part))
}

/// A word without its secret.
fn redact(word: &str) -> String {
    let bare = word.trim_start_matches(['"', '\'']);
    if SECRET_STARTS.iter().any(|start| bare.starts_with(start)) {
        return REDACTED.to_owned();
    }
    if let Some((name, value)) = word.split_once(['=', ':'])
        && is_secret_name(name)
        && !value.is_empty()
    {
        return format!("{}{REDACTED}", &word[..=name.len()]);
    }
    if let Some((scheme, rest)) = word.split_once("://")
        && let Some((_, host)) =
            rest.split('/').next().and_then(|authority| authority.rsplit_once('@'))
    {
        let path = rest.find('/').map_or("", |at| &rest[at..]);
        return format!("{scheme}://{REDACTED}@{host}{path}");
    }
    word.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn preview_of(argv: &[&str]) -> String {
        preview(&argv.iter().map(|&argument| argument.to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn secrets_are_not_in_the_preview() {
        for argv in [
            &["curl", "-H", "Authorization: Bearer hush-1"][..],
            &["curl", "-u", "me:hush-1", "https://example.com"],
            &["sh", "-c", "API_TOKEN=hush-1 make"],
            &["login", "--password", "hush-1"],
            &["login", "--password=hush-1"],
            &["git", "clone", "https://me:hush-1@example.com/x.git"],
            &["git", "clone", "https://hush-1@example.com"],
            &["echo", "ghp_hush-1"],
            &["sh", "-c", "echo 'sk-hush-1'"],
        ] {
            let text = preview_of(argv);
            assert!(!text.contains("hush"), "{text}");
            assert!(text.contains(REDACTED) && text.starts_with(argv[0]), "{text}");
        }
        // Control: other text is kept.
        assert_eq!(
            preview_of(&["git", "clone", "https://example.com/a@b"]),
            "git clone https://example.com/a@b"
        );
    }

    #[test]
    fn preview_has_at_most_100_characters() {
        let long = "é".repeat(200_000);
        assert_eq!(preview_of(&[&long]).chars().count(), PREVIEW);
        assert_eq!(preview_of(&["a"; 10_000]).len(), PREVIEW);
    }
}
