//! Objects in a bucket of an S3-compatible server.

use std::{ops::Range, time::Duration};

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream::BoxStream};
use object_store::{
    BackoffConfig, ClientOptions, Error, GetOptions, ObjectStore, ObjectStoreExt, RetryConfig,
    aws::{AmazonS3, AmazonS3Builder},
    path::Path,
};
use secrecy::ExposeSecret;

use super::{ObjectProblem, OutputOptions, REQUEST_TIMEOUT};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const MAX_RETRIES: usize = 2;

/// A bucket, or a part of it.
#[derive(Debug)]
pub(super) struct S3 {
    client: AmazonS3,
    prefix: Path,
}

impl S3 {
    pub(super) fn open(
        bucket: &str,
        prefix: &str,
        options: &OutputOptions,
    ) -> Result<Self, ObjectProblem> {
        // An HTTP client without a provider of its own takes that of the process. Fails if there is
        // one.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let builder = match (&options.s3_access_key_id, &options.s3_secret_access_key) {
            (Some(id), Some(secret)) => AmazonS3Builder::new()
                .with_access_key_id(id)
                .with_secret_access_key(secret.expose_secret()),
            _ => AmazonS3Builder::from_env(),
        };
        let endpoint = options.s3_endpoint.as_deref();
        let plain = endpoint.is_some_and(|endpoint| endpoint.starts_with("http://"));
        let client = ClientOptions::new()
            .with_timeout(REQUEST_TIMEOUT)
            .with_connect_timeout(CONNECT_TIMEOUT)
            .with_allow_http(plain);
        let retry = RetryConfig {
            backoff: BackoffConfig::default(),
            max_retries: MAX_RETRIES,
            retry_timeout: REQUEST_TIMEOUT,
        };
        let mut builder = builder
            .with_bucket_name(bucket)
            .with_region(&options.s3_region)
            .with_client_options(client)
            .with_retry(retry);
        if let Some(endpoint) = endpoint {
            builder = builder.with_endpoint(endpoint);
        }
        Ok(Self { client: builder.build()?, prefix: Path::parse(prefix).map_err(Error::from)? })
    }

    pub(super) async fn put(&self, name: &str, data: Bytes) -> Result<(), ObjectProblem> {
        self.client.put(&self.path(name), data.into()).await?;
        Ok(())
    }

    /// Reads a range; shorter than asked for if the object is.
    pub(super) async fn read(&self, name: &str, range: Range<u64>) -> Result<Bytes, ObjectProblem> {
        let path = self.path(name);
        let options = GetOptions { range: Some(range.clone().into()), ..GetOptions::default() };
        let found = match self.client.get_opts(&path, options).await {
            // A server refuses a range that begins after the end.
            Err(error) if !matches!(error, Error::NotFound { .. }) => {
                let size = self.client.head(&path).await?.size;
                return if size <= range.start { Ok(Bytes::new()) } else { Err(error.into()) };
            }
            found => found?,
        };
        if found.range.end > range.end {
            return Err(ObjectProblem::Failed("the server ignores ranges".to_owned()));
        }
        Ok(found.bytes().await?)
    }

    pub(super) async fn delete(&self, names: &[String]) -> Result<(), ObjectProblem> {
        let paths: Vec<Path> = names.iter().map(|name| self.path(name)).collect();
        let deleted = self.client.delete_stream(futures::stream::iter(paths).map(Ok).boxed());
        let if_exists = |deleted: Result<Path, Error>| match deleted {
            Ok(_) | Err(Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(ObjectProblem::from(error)),
        };
        deleted.map(if_exists).try_collect().await
    }

    /// The first components of all names.
    pub(super) async fn days(&self) -> Result<Vec<String>, ObjectProblem> {
        let listed = self.client.list_with_delimiter(Some(&self.prefix)).await?;
        let days = listed.common_prefixes.iter().filter_map(|path| path.filename());
        Ok(days.map(str::to_owned).collect())
    }

    /// Lists the names below a first component.
    pub(super) fn list(&self, day: &str) -> BoxStream<'static, Result<String, ObjectProblem>> {
        let day = day.to_owned();
        let listed = self.client.list(Some(&self.path(&day)));
        let name = move |path: &Path| path.filename().map(|file| format!("{day}/{file}"));
        listed
            .map_err(ObjectProblem::from)
            .try_filter_map(move |found| {
                let name = name(&found.location);
                async move { Ok(name) }
            })
            .fuse()
            .boxed()
    }

    fn path(&self, name: &str) -> Path {
        name.split('/').fold(self.prefix.clone(), |path, part| path.join(part))
    }
}
