//! The key that encrypts secret variables.

use std::{fs::File, io::Read, os::unix::fs::PermissionsExt, path::Path};

use anyhow::{Context, Result, ensure};
use codelia_store::SecretKey;

use crate::config::Config;

/// More than a key and a newline.
const MAX_FILE_BYTES: u64 = 1024;

/// Reads the configured key; `None` if there is none.
pub(crate) fn secret_key(config: &Config) -> Result<Option<SecretKey>> {
    let Some(path) = &config.secrets.key_file else { return Ok(None) };
    let key = read(path).with_context(|| format!("secrets.key_file: {}", path.display()))?;
    Ok(Some(key))
}

fn read(path: &Path) -> Result<SecretKey> {
    Ok(SecretKey::parse(&read_private(path)?)?)
}

/// Reads a short file that other users have no access to.
pub(super) fn read_private(path: &Path) -> Result<String> {
    let file = File::open(path)?;
    let mode = file.metadata()?.permissions().mode();
    ensure!(mode & 0o007 == 0, "other users have access to it (run `chmod o= FILE`)");
    let mut text = String::new();
    file.take(MAX_FILE_BYTES).read_to_string(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::{fs, fs::Permissions};

    use super::*;
    use crate::options::tests::config;

    #[test]
    fn key_must_be_private_and_well_formed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        let load = || secret_key(&config(&[("CODELIA_SECRETS_KEY_FILE", path.to_str().unwrap())]));
        assert!(secret_key(&config(&[])).unwrap().is_none());
        assert!(format!("{:#}", load().unwrap_err()).contains("secrets.key_file"));
        fs::write(&path, SecretKey::generate().unwrap()).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        assert!(format!("{:#}", load().unwrap_err()).contains("chmod"));
        fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        assert!(load().unwrap().is_some());
        fs::write(&path, "short").unwrap();
        assert!(format!("{:#}", load().unwrap_err()).contains("openssl rand"));
    }
}
