//! Where the output of runs is stored.

use std::path::Path;

use anyhow::{Result, anyhow, bail};
use codelia_store::{OutputLocation, OutputOptions};

use crate::config::Config;

/// The configured store; without one, this directory, or else the database.
pub(crate) fn output(config: &Config, directory: Option<&Path>) -> Result<OutputOptions> {
    let output = &config.output;
    let mut location = match (&output.store, directory) {
        (Some(store), _) => {
            store.parse().map_err(|error| anyhow!("output.store: {error}, found {store:?}"))?
        }
        (None, Some(directory)) => OutputLocation::Directory(directory.to_owned()),
        (None, None) => OutputLocation::Postgres,
    };
    if let OutputLocation::S3(s3) = &mut location {
        s3.endpoint.clone_from(&output.s3_endpoint);
        s3.region.clone_from(&output.s3_region);
        s3.credentials = match (&output.s3_access_key_id, &output.s3_secret_access_key) {
            (Some(id), Some(secret)) => Some((id.clone(), secret.clone())),
            (None, None) => None,
            _ => bail!("output.s3_access_key_id and output.s3_secret_access_key: set both or neither"),
        };
    }
    let inline_bytes = usize::try_from(output.inline_kb)?.saturating_mul(1024);
    Ok(OutputOptions { location, inline_bytes })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::tests::config;

    #[test]
    fn directory_is_default_only_where_given() {
        let location = |variables: &[(&str, &str)], directory: Option<&str>| {
            output(&config(variables), directory.map(Path::new)).unwrap().location.to_string()
        };
        assert_eq!(location(&[], None), "postgres");
        assert_eq!(location(&[], Some("/data/output")), "file:///data/output");
        let store = [("CODELIA_OUTPUT_STORE", "postgres")];
        assert_eq!(location(&store, Some("/data/output")), "postgres");
        assert_eq!(output(&config(&[]), None).unwrap().inline_bytes, 64 * 1024);
    }

    #[test]
    fn bucket_is_configured_with_its_server() {
        let id = ("CODELIA_OUTPUT_S3_ACCESS_KEY_ID", "id");
        let mut variables = vec![
            ("CODELIA_OUTPUT_STORE", "s3://bucket/prefix"),
            ("CODELIA_OUTPUT_S3_ENDPOINT", "http://127.0.0.1:9"),
            ("CODELIA_OUTPUT_S3_REGION", "eu-1"),
            ("CODELIA_OUTPUT_S3_SECRET_ACCESS_KEY", "secret"),
            id,
        ];
        let options = output(&config(&variables), None).unwrap();
        let OutputLocation::S3(s3) = options.location else { panic!("{options:?}") };
        assert_eq!(
            (s3.bucket.as_str(), s3.prefix.as_str(), s3.region.as_str()),
            ("bucket", "prefix", "eu-1")
        );
        assert_eq!(s3.endpoint.as_deref(), Some("http://127.0.0.1:9"));
        assert!(s3.credentials.is_some());
        variables.retain(|variable| *variable != id);
        assert!(output(&config(&variables), None).unwrap_err().to_string().contains("set both"));
        let wrong = output(&config(&[("CODELIA_OUTPUT_STORE", "/var/x")]), None).unwrap_err().to_string();
        assert_eq!(
            wrong,
            "output.store: expected postgres, file:///PATH or s3://BUCKET/PREFIX, found \"/var/x\""
        );
    }
}
