//! `codelia context …`.

use std::{fs::File, io::Read, path::Path};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use crate::{
    args,
    client::{Server, parse_endpoint},
    contexts::{Context, Contexts},
    output::{self, Output},
    settings::Settings,
};

/// Bytes of a key file that are read.
const MAX_KEY_BYTES: u64 = 1024;

/// Executes `codelia context`.
pub(crate) fn context(settings: &Settings, command: args::Context, output: Output) -> Result<()> {
    let mut contexts = Contexts::read()?;
    match command {
        args::Context::List => list(&contexts, output),
        args::Context::Show { name: Some(name) } => {
            output.print_fields(&to_json(&contexts, &name, contexts.get(&name)?))
        }
        args::Context::Show { name: None } => show_effective(settings, output),
        args::Context::Use { name } => {
            contexts.get(&name)?;
            contexts.current = Some(name.clone());
            contexts.write()?;
            warn_if_overridden(settings);
            print_one(&contexts, &name, output)
        }
        args::Context::Add { name, url, key_file, tls_ca } => {
            ensure!(is_name(&name), "{name:?} is not a name: expected [A-Za-z0-9._-]{{1,63}}");
            parse_endpoint(&url)?;
            let api_key = read_key(&key_file)?;
            let tls_ca = tls_ca.map(std::path::absolute).transpose()?;
            contexts.contexts.insert(name.clone(), Context { endpoint: url, api_key, tls_ca });
            contexts.write()?;
            print_one(&contexts, &name, output)
        }
        args::Context::Remove { name } => {
            contexts.get(&name)?;
            let removed = contexts.contexts.remove(&name);
            contexts.current.take_if(|current| *current == name);
            contexts.write()?;
            let json = removed.map(|removed| to_json(&contexts, &name, &removed));
            output.print(&json.unwrap_or_default(), &name)
        }
    }
}

fn list(contexts: &Contexts, output: Output) -> Result<()> {
    let all: Vec<_> = contexts.contexts.iter().collect();
    output.print_whole_list(
        &["CONTEXT", "IN USE", "ENDPOINT"],
        &all,
        |(name, context)| to_json(contexts, name, context),
        |(name, context)| {
            let in_use = if contexts.current.as_ref() == Some(*name) { "*" } else { "" };
            vec![(*name).clone(), in_use.to_owned(), context.endpoint.clone()]
        },
    )
}

/// Shows the server that commands call.
fn show_effective(settings: &Settings, output: Output) -> Result<()> {
    let server = Server::find(settings)?;
    output.print_fields(&json!({
        "endpoint": server.endpoint,
        "endpointFrom": server.endpoint_source,
        "keyFrom": server.key_source,
        "tlsCa": server.tls_ca,
    }))
}

fn print_one(contexts: &Contexts, name: &str, output: Output) -> Result<()> {
    output.print(&to_json(contexts, name, contexts.get(name)?), name)
}

/// A context, without its key.
fn to_json(contexts: &Contexts, name: &str, context: &Context) -> Value {
    json!({
        "context": name,
        "inUse": contexts.current.as_deref() == Some(name),
        "endpoint": context.endpoint,
        "tlsCa": context.tls_ca,
    })
}

fn warn_if_overridden(settings: &Settings) {
    for path in ["client.context", "client.endpoint", "client.api_key", "data_dir"] {
        if let Some(source) = settings.source(path) {
            output::write_note(&format!("warning: {path} ({source}) overrides the context in use"));
        }
    }
}

fn read_key(file: &Path) -> Result<String> {
    let cannot = || format!("cannot read the key from {}", file.display());
    let reader: Box<dyn Read> = if file == Path::new("-") {
        Box::new(std::io::stdin())
    } else {
        Box::new(File::open(file).with_context(cannot)?)
    };
    let mut text = String::new();
    reader.take(MAX_KEY_BYTES).read_to_string(&mut text).with_context(cannot)?;
    let key = text.trim();
    let is_key = !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_graphic());
    ensure!(is_key, "{}: expected one line with an API key (cdl_…)", file.display());
    Ok(key.to_owned())
}

fn is_name(name: &str) -> bool {
    (1..=63).contains(&name.len())
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-'))
}
