//! Encryption of the secret variables of runs. The database has only their ciphertext, and only
//! until the run ends.

use std::{
    fmt,
    fs::File,
    io::{self, Read},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use codelia_types::{RunId, SecretEnv, TenantId, option::InvalidOption};
use ring::{
    aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey},
    hkdf::{HKDF_SHA256, Prk},
    hmac,
    rand::{SecureRandom, SystemRandom},
};

/// More than a secret and a newline.
const MAX_FILE_BYTES: u64 = 1024;
/// Bytes of a key.
const KEY_LEN: usize = 32;
/// Bytes that identify the key of a ciphertext.
const KEY_ID_LEN: usize = 8;
/// Version of the format: version, key id, nonce, ciphertext with tag.
const VERSION: u8 = 1;
const HEADER_LEN: usize = 1 + KEY_ID_LEN;

codelia_types::options! {
    /// Secret variables of sessions and runs: the section `secrets` of the configuration.
    pub struct SecretOptions {
        /// File with 64 hexadecimal digits, the key that encrypts them; api and worker need the
        /// same one. Default: no secrets; `up`: `DATA_DIR/secrets.key`.
        pub key_file: Option<PathBuf> = None,
    }
}

impl SecretOptions {
    /// Reads the key; `None` if there is none.
    ///
    /// # Errors
    /// If other users have access to the file, or it holds no key.
    pub fn key(&self) -> Result<Option<SecretKey>, InvalidOption> {
        let Some(path) = &self.key_file else { return Ok(None) };
        let refused = |error: &dyn fmt::Display| {
            InvalidOption::new("secrets.key_file", format!("{}: {error}", path.display()))
        };
        let text = read_private(path).map_err(|error| refused(&error))?;
        SecretKey::parse(&text).map(Some).map_err(|error| refused(&error))
    }
}

/// Reads a short file that other users have no access to.
///
/// # Errors
/// If they have, or the file cannot be read.
pub fn read_private(path: &Path) -> io::Result<String> {
    let file = File::open(path)?;
    if file.metadata()?.permissions().mode() & 0o007 != 0 {
        return Err(io::Error::other("other users have access to it (run `chmod o= FILE`)"));
    }
    let mut text = String::new();
    file.take(MAX_FILE_BYTES).read_to_string(&mut text)?;
    Ok(text)
}

/// The installation's key for secrets. Api and worker need the same one.
#[derive(Clone)]
pub struct SecretKey {
    root: Prk,
    id: [u8; KEY_ID_LEN],
}

/// The encrypted variables of one run.
#[derive(Clone, PartialEq, Eq)]
pub struct SealedEnv(pub Vec<u8>);

/// Why secret variables cannot be encrypted or decrypted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SecretError {
    /// The text of a key is malformed.
    #[error("must have {} hexadecimal digits (create it with `openssl rand -hex {KEY_LEN}`)", KEY_LEN * 2)]
    Malformed,
    /// The system has no random numbers, or a step of the cipher failed.
    #[error("the cipher failed")]
    Cipher,
    /// Another key, or another version of Codelia, encrypted the variables.
    #[error("encrypted with another key: api and worker must have the same `secrets.key_file`")]
    OtherKey,
    /// The ciphertext was changed, or belongs to another run.
    #[error("the ciphertext is damaged or belongs to another run")]
    Damaged,
}

impl SecretKey {
    /// Parses the text of a key: 64 hexadecimal digits.
    ///
    /// # Errors
    /// [`SecretError::Malformed`].
    pub fn parse(text: &str) -> Result<Self, SecretError> {
        let mut bytes = [0; KEY_LEN];
        hex::decode_to_slice(text.trim_ascii(), &mut bytes).map_err(|_| SecretError::Malformed)?;
        let root = Prk::new_less_safe(HKDF_SHA256, &bytes);
        let mut id = [0; KEY_ID_LEN];
        id.copy_from_slice(&hmac::sign(&mac_key(&root)?, b"key id").as_ref()[..KEY_ID_LEN]);
        Ok(Self { root, id })
    }

    /// The text of a new key.
    ///
    /// # Errors
    /// [`SecretError::Cipher`].
    pub fn generate() -> Result<String, SecretError> {
        let mut bytes = [0; KEY_LEN];
        SystemRandom::new().fill(&mut bytes).map_err(|_| SecretError::Cipher)?;
        Ok(hex::encode(bytes))
    }

    /// Encrypts the variables of a run.
    ///
    /// # Errors
    /// [`SecretError::Cipher`].
    pub fn seal(&self, run: RunId, env: &SecretEnv) -> Result<SealedEnv, SecretError> {
        let mut nonce = [0; NONCE_LEN];
        SystemRandom::new().fill(&mut nonce).map_err(|_| SecretError::Cipher)?;
        let mut text = plain_text(env)?;
        let aad = Aad::from(run.0.as_bytes());
        self.run_key(run)?
            .seal_in_place_append_tag(Nonce::assume_unique_for_key(nonce), aad, &mut text)
            .map_err(|_| SecretError::Cipher)?;
        Ok(SealedEnv([&[VERSION], &self.id[..], &nonce, &text].concat()))
    }

    /// Decrypts the variables of a run.
    ///
    /// # Errors
    /// [`SecretError::OtherKey`] or [`SecretError::Damaged`].
    pub fn open(&self, run: RunId, sealed: &SealedEnv) -> Result<SecretEnv, SecretError> {
        let (header, rest) = sealed.0.split_at_checked(HEADER_LEN).ok_or(SecretError::Damaged)?;
        if header[0] != VERSION || header[1..] != self.id {
            return Err(SecretError::OtherKey);
        }
        let (nonce, text) = rest.split_at_checked(NONCE_LEN).ok_or(SecretError::Damaged)?;
        let nonce = Nonce::try_assume_unique_for_key(nonce).map_err(|_| SecretError::Damaged)?;
        let mut text = text.to_vec();
        let aad = Aad::from(run.0.as_bytes());
        let key = self.run_key(run)?;
        let plain = key.open_in_place(nonce, aad, &mut text).map_err(|_| SecretError::Damaged)?;
        serde_json::from_slice(plain).map_err(|_| SecretError::Damaged)
    }

    /// A keyed hash of a tenant's variables, to compare requests. It reveals nothing without the
    /// key, so it may stay in the database.
    ///
    /// # Errors
    /// [`SecretError::Cipher`].
    pub fn fingerprint(&self, tenant: &TenantId, env: &SecretEnv) -> Result<[u8; 32], SecretError> {
        let mut context = hmac::Context::with_key(&mac_key(&self.root)?);
        context.update(tenant.as_str().as_bytes());
        context.update(&[0]);
        context.update(&plain_text(env)?);
        context.sign().as_ref().try_into().map_err(|_| SecretError::Cipher)
    }

    /// Derives a key for another purpose.
    pub(crate) fn derive(&self, purpose: &'static str) -> Result<[u8; KEY_LEN], SecretError> {
        let mut bytes = [0; KEY_LEN];
        let purpose = [purpose.as_bytes()];
        let derived = self.root.expand(&purpose, HKDF_SHA256).map_err(|_| SecretError::Cipher)?;
        derived.fill(&mut bytes).map_err(|_| SecretError::Cipher)?;
        Ok(bytes)
    }

    /// Each run has its own key, so that a nonce is never used twice with one key.
    fn run_key(&self, run: RunId) -> Result<LessSafeKey, SecretError> {
        let info = [&b"codelia secret_env"[..], run.0.as_bytes()];
        let key = self.root.expand(&info, &AES_256_GCM).map_err(|_| SecretError::Cipher)?;
        Ok(LessSafeKey::new(UnboundKey::from(key)))
    }
}

fn mac_key(root: &Prk) -> Result<hmac::Key, SecretError> {
    let key = root.expand(&[b"codelia fingerprint"], hmac::HMAC_SHA256);
    key.map(hmac::Key::from).map_err(|_| SecretError::Cipher)
}

fn plain_text(env: &SecretEnv) -> Result<Vec<u8>, SecretError> {
    serde_json::to_vec(env).map_err(|_| SecretError::Cipher)
}

impl fmt::Debug for SecretKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretKey")
    }
}

impl fmt::Debug for SealedEnv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SealedEnv({} bytes)", self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> SecretKey {
        SecretKey::parse(&SecretKey::generate().unwrap()).unwrap()
    }

    fn env(value: &str) -> SecretEnv {
        SecretEnv([("TOKEN".to_owned(), value.to_owned())].into())
    }

    #[test]
    fn sealed_variables_open_for_their_run_only() {
        let (key, run) = (key(), RunId::generate());
        let sealed = key.seal(run, &env("hush")).unwrap();
        assert_eq!(key.open(run, &sealed), Ok(env("hush")));
        assert_eq!(key.open(RunId::generate(), &sealed), Err(SecretError::Damaged));
        assert_ne!(
            key.seal(run, &env("hush")).unwrap(),
            sealed,
            "each ciphertext has its own nonce"
        );
        assert!(!sealed.0.windows(4).any(|bytes| bytes == b"hush"));
    }

    #[test]
    fn changed_ciphertext_does_not_open() {
        let (key, run) = (key(), RunId::generate());
        let sealed = key.seal(run, &env("hush")).unwrap();
        for at in 0..sealed.0.len() {
            let mut changed = sealed.clone();
            changed.0[at] ^= 1;
            assert!(key.open(run, &changed).is_err(), "byte {at}");
            assert!(key.open(run, &SealedEnv(sealed.0[..at].to_vec())).is_err(), "{at} bytes");
        }
    }

    #[test]
    fn other_key_is_recognized() {
        let run = RunId::generate();
        assert_eq!(
            key().open(run, &key().seal(run, &env("hush")).unwrap()),
            Err(SecretError::OtherKey)
        );
    }

    #[test]
    fn fingerprint_depends_on_key_tenant_and_values() {
        let key_a = key();
        let tenant: TenantId = "a".parse().unwrap();
        let print = |key: &SecretKey, tenant: &str, value| {
            key.fingerprint(&tenant.parse().unwrap(), &env(value)).unwrap()
        };
        let one = key_a.fingerprint(&tenant, &env("hush")).unwrap();
        assert_eq!(print(&key_a, "a", "hush"), one);
        assert_ne!(print(&key_a, "a", "other"), one);
        assert_ne!(print(&key_a, "b", "hush"), one);
        assert_ne!(print(&key(), "a", "hush"), one);
    }

    #[test]
    fn malformed_key_is_refused() {
        for bad in ["", "00", &"g".repeat(64), &"0".repeat(63), &"é".repeat(32)] {
            assert_eq!(SecretKey::parse(bad).unwrap_err(), SecretError::Malformed, "{bad}");
        }
        assert!(SecretKey::parse(&format!("{}\n", "aB".repeat(32))).is_ok());
        assert!(!format!("{:?}", key()).contains("Prk"));
    }
}
