//! `codelia config show`: every key with its effective value and source.

use anyhow::Result;
use figment::{Metadata, Source, value::Value};
use serde_json::json;

use super::{
    Loaded,
    keys::{KEYS, Key},
};
use crate::output::Output;

const MASK: &str = "********";

/// Prints every key with its value and source. Secrets are masked.
pub(crate) fn show(loaded: &Loaded, output: Output) -> Result<()> {
    let rows: Vec<Row> = KEYS.iter().map(|key| row(loaded, key)).collect();
    output.print_whole_list(
        &["KEY", "VALUE", "SOURCE", "VARIABLE"],
        &rows,
        |row| json!({ "key": row.key, "value": row.value, "source": row.source, "variable": row.variable }),
        |row| {
            let value = row.value.clone().unwrap_or_else(|| format!("({})", row.unset));
            vec![row.key.to_owned(), value, row.source.clone(), row.variable.to_owned()]
        },
    )
}

struct Row {
    key: &'static str,
    value: Option<String>,
    source: String,
    variable: &'static str,
    unset: &'static str,
}

fn row(loaded: &Loaded, key: &Key) -> Row {
    let value = loaded.figment.find_value(key.path).ok().map(|value| text(&value));
    Row {
        key: key.path,
        value: if key.secret { value.map(|_| MASK.to_owned()) } else { value },
        source: loaded.figment.find_metadata(key.path).map_or_else(|| "unset".to_owned(), source),
        variable: key.env,
        unset: key.unset,
    }
}

/// Describes the source of a value: `default`, `file:PATH`, `env:NAME` or `flag`.
pub(super) fn source(metadata: &Metadata) -> String {
    match &metadata.source {
        Some(Source::File(path)) => format!("file:{}", path.display()),
        _ => metadata.name.to_string(),
    }
}

fn text(value: &Value) -> String {
    match value {
        Value::String(_, text) => text.clone(),
        Value::Bool(_, value) => value.to_string(),
        Value::Num(_, number) => number
            .to_i128()
            .map(|n| n.to_string())
            .or_else(|| number.to_f64().map(|n| n.to_string()))
            .unwrap_or_default(),
        other => format!("{other:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::{super::tests::loaded, *};

    fn shown(loaded: &Loaded, path: &str) -> (Option<String>, String) {
        let row = row(loaded, KEYS.iter().find(|key| key.path == path).unwrap());
        (row.value, row.source)
    }

    #[test]
    fn values_are_shown_with_their_source() {
        let flags = [("worker.slots", "4".to_owned())];
        let loaded = loaded(None, &flags, &[("CODELIA_SANDBOX_CPU_LIMIT", "1.5")]).unwrap();
        assert_eq!(shown(&loaded, "worker.slots"), (Some("4".into()), "flag".into()));
        assert_eq!(
            shown(&loaded, "sandbox.cpu_limit"),
            (Some("1.5".into()), "env:CODELIA_SANDBOX_CPU_LIMIT".into())
        );
        assert_eq!(shown(&loaded, "api.listen"), (Some("127.0.0.1:7300".into()), "default".into()));
        assert_eq!(shown(&loaded, "sandbox.mode"), (None, "unset".into()));
    }

    #[test]
    fn secrets_are_masked() {
        let variables = [
            ("CODELIA_API_KEY", "cdl_hush"),
            ("CODELIA_DATABASE_URL", "postgres://u:hush@h/d"),
            ("CODELIA_OUTPUT_S3_SECRET_ACCESS_KEY", "hush"),
        ];
        let loaded = loaded(None, &[], &variables).unwrap();
        for path in ["client.api_key", "database.url", "output.s3_secret_access_key"] {
            assert_eq!(shown(&loaded, path).0.as_deref(), Some(MASK));
        }
        assert!(!format!("{:?}", loaded.config).contains("hush"));
    }
}
