//! `codelia config show`: every key with its effective value and source.

use anyhow::Result;
use codelia_client::output::Output;
use figment::value::{Empty, Value};
use serde_json::json;

use super::{
    keys::{KEYS, Key},
    loaded::{Loaded, source},
};

/// Prints every key with its value and source. Secrets write themselves masked.
pub(crate) fn show(loaded: &Loaded, output: Output) -> Result<()> {
    output.print_whole_list(
        &["KEY", "VALUE", "SOURCE", "VARIABLE"],
        &rows(loaded)?,
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
    /// The text for a key without a value: what applies then.
    unset: &'static str,
    source: String,
    variable: &'static str,
}

fn rows(loaded: &Loaded) -> Result<Vec<Row>> {
    let effective = Value::serialize(&loaded.config)?;
    let row = |key: &'static Key| {
        let value = effective.find_ref(&key.path).and_then(text);
        let source = loaded.figment.find_metadata(&key.path).filter(|_| value.is_some());
        Row {
            key: &key.path,
            value,
            unset: key.option.unset(),
            source: source.map_or_else(|| "unset".to_owned(), self::source),
            variable: &key.variable,
        }
    };
    let mut rows: Vec<Row> = KEYS.iter().map(row).collect();
    rows.sort_by_key(|row| row.key);
    Ok(rows)
}

/// The text of a value; `None` if there is none.
pub(super) fn text(value: &Value) -> Option<String> {
    match value {
        Value::Empty(_, Empty::None | Empty::Unit) => None,
        Value::String(_, text) => Some(text.clone()),
        Value::Bool(_, value) => Some(value.to_string()),
        Value::Num(_, number) => {
            let whole = number.to_u128().map(|number| number.to_string());
            let signed = || number.to_i128().map(|number| number.to_string());
            whole.or_else(signed).or_else(|| number.to_f64().map(|number| number.to_string()))
        }
        other => Some(format!("{other:?}")),
    }
}

#[cfg(test)]
mod tests {
    use super::{super::tests::loaded, *};

    fn shown(loaded: &Loaded, path: &str) -> (Option<String>, String) {
        let row = rows(loaded).unwrap().into_iter().find(|row| row.key == path).unwrap();
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
        let mode =
            rows(&loaded).unwrap().into_iter().find(|row| row.key == "sandbox.mode").unwrap();
        assert_eq!(mode.unset, "the strongest usable mode");
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
            assert_eq!(shown(&loaded, path).0.as_deref(), Some("********"));
        }
        assert!(!format!("{:?}", loaded.config).contains("hush"));
    }
}
