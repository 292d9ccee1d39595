//! `codelia certs dev`: an authority and certificates for development and tests.

use std::{
    fs::{self, Permissions},
    io::Write,
    os::unix::fs::{DirBuilderExt, PermissionsExt},
    path::Path,
};

use anyhow::{Context, Result, ensure};
use codelia_client::output::Output;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose,
};
use serde_json::json;
use tempfile::NamedTempFile;
use time::{Duration, OffsetDateTime};

use crate::{
    args::{Certs, DevCerts},
    config::Config,
};

/// Names of the public API on the machine that it runs on.
const LOCAL_NAMES: [&str; 3] = ["localhost", "127.0.0.1", "::1"];
/// The name that apis expect of every worker.
const WORKER_NAME: &str = "codelia-worker";
const API_NAME: &str = "codelia-api";
/// For clocks that are slow.
const CLOCK_SKEW: Duration = Duration::hours(1);

type Issuer = CertifiedIssuer<'static, KeyPair>;

/// A file and its content.
struct NewFile {
    name: String,
    pem: String,
    mode: u32,
}

pub(crate) fn certs(config: &Config, command: &Certs, output: Output) -> Result<()> {
    let Certs::Dev(args) = command;
    let dir = args.dir.clone().unwrap_or_else(|| config.data_dir.join("certs"));
    let dir = std::path::absolute(dir)?;
    let files = create(args)?;
    write(&dir, &files, args.force)
        .with_context(|| format!("cannot write to {}", dir.display()))?;
    print(&dir, output)
}

fn create(args: &DevCerts) -> Result<Vec<NewFile>> {
    use ExtendedKeyUsagePurpose::{ClientAuth, ServerAuth};
    let days = Duration::days(args.days.into());
    let mut params = params(&[], "Codelia development authority", days)?;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
    let mut files = vec![NewFile { name: "ca.pem".to_owned(), pem: issuer.pem(), mode: 0o644 }];
    let public: Vec<_> =
        LOCAL_NAMES.into_iter().chain(args.names.iter().map(String::as_str)).collect();
    // A worker's key must not open other workers: each key is for one side of a connection.
    for (name, names, usage) in [
        ("api", public.as_slice(), ServerAuth),
        ("internal-worker", &[WORKER_NAME], ServerAuth),
        ("internal-api", &[API_NAME], ClientAuth),
    ] {
        files.extend(
            issue(&issuer, name, names, usage, days)
                .with_context(|| format!("certificate {name}"))?,
        );
    }
    Ok(files)
}

fn issue(
    issuer: &Issuer,
    name: &str,
    names: &[&str],
    usage: ExtendedKeyUsagePurpose,
    days: Duration,
) -> Result<[NewFile; 2]> {
    let mut params = params(names, name, days)?;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![usage];
    params.use_authority_key_identifier_extension = true;
    let key = KeyPair::generate()?;
    let certificate = params.signed_by(&key, issuer)?;
    Ok([
        NewFile { name: format!("{name}.key"), pem: key.serialize_pem(), mode: 0o600 },
        NewFile { name: format!("{name}.pem"), pem: certificate.pem(), mode: 0o644 },
    ])
}

fn params(names: &[&str], common_name: &str, valid: Duration) -> Result<CertificateParams> {
    let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
    let mut params = CertificateParams::new(names)?;
    params.distinguished_name.push(DnType::CommonName, common_name);
    let now = OffsetDateTime::now_utc();
    params.not_before = now - CLOCK_SKEW;
    params.not_after = now + valid;
    Ok(params)
}

/// Each file is complete when it has its name, so that a process that follows them reads no half.
fn write(dir: &Path, files: &[NewFile], force: bool) -> Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    let existing = files.iter().map(|file| &file.name).find(|name| dir.join(name).exists());
    if let (Some(name), false) = (existing, force) {
        anyhow::bail!("{name} exists: replace all files with --force, or choose another --dir");
    }
    for file in files {
        let mut new = NamedTempFile::new_in(dir)?;
        new.as_file().set_permissions(Permissions::from_mode(file.mode))?;
        new.write_all(file.pem.as_bytes())?;
        new.as_file().sync_all()?;
        new.persist(dir.join(&file.name))?;
    }
    Ok(fs::File::open(dir)?.sync_all()?)
}

/// Prints the variables of each process.
fn print(dir: &Path, output: Output) -> Result<()> {
    let path = |name: &str| -> Result<String> {
        let path = dir.join(name).into_os_string().into_string().ok();
        let path = path.context("the path is not UTF-8")?;
        ensure!(!path.contains(['\n', '\r']), "the path has a line break");
        Ok(path)
    };
    let internal = |side: &str| -> Result<[(&str, String); 3]> {
        Ok([
            ("CODELIA_INTERNAL_TLS_CA", path("ca.pem")?),
            ("CODELIA_INTERNAL_TLS_CERT", path(&format!("internal-{side}.pem"))?),
            ("CODELIA_INTERNAL_TLS_KEY", path(&format!("internal-{side}.key"))?),
        ])
    };
    let public =
        [("CODELIA_API_TLS_CERT", path("api.pem")?), ("CODELIA_API_TLS_KEY", path("api.key")?)];
    let api: Vec<_> = public.into_iter().chain(internal("api")?).collect();
    let worker = internal("worker")?.to_vec();
    let client = vec![("CODELIA_CLIENT_TLS_CA", path("ca.pem")?)];
    let mut text = String::new();
    let mut json = serde_json::Map::new();
    for (name, settings) in [("api", api), ("worker", worker), ("client", client)] {
        let lines: String =
            settings.iter().map(|(key, value)| format!("{key}={value}\n")).collect();
        text += &format!("# {name}\n{lines}");
        let settings = settings.into_iter().map(|(key, value)| (key.to_owned(), value.into()));
        json.insert(name.to_owned(), serde_json::Value::Object(settings.collect()));
    }
    output.print(&json!({ "directory": dir, "settings": json }), text.trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(names: &[&str]) -> DevCerts {
        let names = names.iter().map(|&name| name.to_owned()).collect();
        DevCerts { dir: None, names, days: 30, force: false }
    }

    #[test]
    fn files_are_kept_without_force_and_keys_are_private() {
        let scratch = tempfile::tempdir().unwrap();
        let dir = scratch.path().join("new/certs");
        let files = create(&args(&["api.example.test"])).unwrap();
        write(&dir, &files, false).unwrap();
        for file in &files {
            let mode = fs::metadata(dir.join(&file.name)).unwrap().permissions().mode() & 0o777;
            let is_key = file.name.ends_with(".key");
            assert_eq!(mode, if is_key { 0o600 } else { 0o644 }, "{}", file.name);
        }
        assert_eq!(fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
        let before = fs::read(dir.join("api.key")).unwrap();
        let other = create(&args(&[])).unwrap();
        let refused = write(&dir, &other, false).unwrap_err().to_string();
        assert!(refused.contains("ca.pem exists") && refused.contains("--force"), "{refused}");
        assert_eq!(fs::read(dir.join("api.key")).unwrap(), before);
        write(&dir, &other, true).unwrap();
        assert_ne!(fs::read(dir.join("api.key")).unwrap(), before);
        assert_eq!(fs::read_dir(&dir).unwrap().count(), files.len(), "nothing else is left");
    }

    #[test]
    fn name_that_no_certificate_can_have_is_refused() {
        assert!(create(&args(&["münchen.test"])).is_err());
    }
}
