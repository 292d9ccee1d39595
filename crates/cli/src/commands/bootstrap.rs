//! `codelia admin bootstrap`: the first key of an operator, created in the database.

use std::{
    fs::{self, File},
    io::{ErrorKind, Read, Write},
    os::unix::fs::PermissionsExt,
    path::Path,
};

use anyhow::{Context, Result, bail, ensure};
use codelia_client::output::Output;
use codelia_store::{Error, Key, NewKey, OperatorBootstrap, Scope, Store};
use codelia_types::TenantId;
use serde_json::{Value, json};
use tempfile::NamedTempFile;

use super::serve::connect;
use crate::{args, config::Config};

const DISPLAY_NAME: &str = "codelia admin bootstrap";
/// Longer than a file with a key.
const MAX_BYTES: u64 = 1024;

/// Creates the key and prints it, or writes it to a file.
pub(crate) async fn bootstrap(
    config: &Config,
    args: args::Bootstrap,
    output: Output,
) -> Result<()> {
    let tenant = args.tenant.parse().context("--tenant")?;
    let store = connect(config.database.clone()).await?;
    store.check_migrated().await?;
    let result = match &args.key_file {
        Some(path) => write_key(&store, &tenant, path, args.force, output).await,
        None => print_key(&store, &tenant, args.force, output).await,
    };
    store.close().await;
    result
}

async fn print_key(store: &Store, tenant: &TenantId, force: bool, output: Output) -> Result<()> {
    let (secret, _) = codelia_api::generate_secret();
    let key = match create(store, tenant, &secret, force).await? {
        OperatorBootstrap::Created(key) | OperatorBootstrap::Unchanged(key) => key,
        OperatorBootstrap::Refused(live) => bail!(refusal(&live)),
    };
    let printed = output.print_fields(&record(&key, "secret", &secret));
    if printed.is_err() {
        // Nobody knows it.
        store.key_revoke(tenant, key.id).await?;
    }
    printed
}

/// The file comes first: whatever happens then, a repetition finds the key that it may have
/// created.
async fn write_key(
    store: &Store,
    tenant: &TenantId,
    path: &Path,
    force: bool,
    output: Output,
) -> Result<()> {
    let (secret, is_new) =
        secret_in(path).with_context(|| format!("--key-file {}", path.display()))?;
    let key = match create(store, tenant, &secret, force).await {
        Ok(OperatorBootstrap::Created(key) | OperatorBootstrap::Unchanged(key)) => key,
        Ok(OperatorBootstrap::Refused(live)) => {
            if is_new {
                fs::remove_file(path)?;
            }
            bail!(refusal(&live));
        }
        Err(error) => return Err(error),
    };
    output.print_fields(&record(&key, "keyFile", &path.display().to_string()))
}

async fn create(
    store: &Store,
    tenant: &TenantId,
    secret: &str,
    force: bool,
) -> Result<OperatorBootstrap> {
    let key = NewKey {
        tenant,
        display_name: DISPLAY_NAME,
        secret_hash: codelia_api::hash_secret(secret),
        scopes: Scope::ALL,
        expires_at: None,
    };
    match store.operator_bootstrap(key, force).await {
        Ok(Some(done)) => Ok(done),
        Ok(None) => bail!("tenant {tenant} is suspended or deleted: choose another with --tenant"),
        Err(Error::AlreadyExists { .. }) => bail!(
            "the key in --key-file has expired, was revoked or is not an operator's: remove the file to \
             create another key"
        ),
        Err(error) => Err(error.into()),
    }
}

fn refusal(live: &Key) -> String {
    format!(
        "an operator key exists: {} of tenant {}, created {}; use it, or create another with --force",
        live.id, live.tenant, live.created_at
    )
}

/// Returns the secret in the file, and whether it was created for this.
fn secret_in(path: &Path) -> Result<(String, bool)> {
    match File::open(path) {
        Ok(file) => return read_secret(file).map(|secret| (secret, false)),
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error.into()),
    }
    let (secret, _) = codelia_api::generate_secret();
    let directory =
        path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // Readable only by its owner, and complete when it has its name.
    let mut new = NamedTempFile::new_in(directory)?;
    writeln!(new, "{secret}")?;
    new.as_file().sync_all()?;
    match new.persist_noclobber(path) {
        Ok(_) => {
            File::open(directory)?.sync_all()?;
            Ok((secret, true))
        }
        // Another call was faster. Both use its key.
        Err(error) if error.error.kind() == ErrorKind::AlreadyExists => {
            read_secret(File::open(path)?).map(|secret| (secret, false))
        }
        Err(error) => Err(error.error.into()),
    }
}

fn read_secret(file: File) -> Result<String> {
    let mode = file.metadata()?.permissions().mode();
    ensure!(mode & 0o077 == 0, "others may access it: run `chmod 600`");
    let mut text = String::new();
    file.take(MAX_BYTES).read_to_string(&mut text)?;
    let secret = text.trim_end();
    ensure!(codelia_api::is_secret(secret), "exists and does not hold a key");
    Ok(secret.to_owned())
}

fn record(key: &Key, name: &str, value: &str) -> Value {
    let scopes: Vec<_> = key.scopes.iter().map(|scope| scope.as_str()).collect();
    json!({
        "keyId": key.id.to_string(),
        "tenantId": key.tenant.as_str(),
        "scopes": scopes,
        name: value,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_file_is_private_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        let (secret, is_new) = secret_in(&path).unwrap();
        assert!(is_new && codelia_api::is_secret(&secret));
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(secret_in(&path).unwrap(), (secret, false));
    }

    #[test]
    fn unsuitable_key_file_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        secret_in(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        assert!(secret_in(&path).unwrap_err().to_string().contains("chmod 600"));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        for text in ["", "cdl_short", &format!("cdl_{}", "!".repeat(43)), &"a".repeat(2000)] {
            fs::write(&path, text).unwrap();
            assert!(
                secret_in(&path).unwrap_err().to_string().contains("does not hold a key"),
                "{text}"
            );
        }
    }
}
