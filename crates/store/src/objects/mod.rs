//! Large output outside the database: objects in a directory or a bucket, named by rows of
//! `run_output`.
//!
//! An object is written before the row that names it, and removed after it. What no row names is
//! garbage: `upkeep/objects.rs` removes it.

mod directory;
mod identity;
mod name;
mod problem;
mod s3;

use std::{fmt, ops::Range, path::PathBuf, str::FromStr, sync::Arc, time::Duration};

use bytes::Bytes;
use codelia_types::{
    ByteSize,
    option::{self, InvalidOption, optional_text},
};
use futures::{StreamExt, TryStreamExt, stream::BoxStream};
use secrecy::SecretString;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};

use self::{
    directory::{Directory, FileList},
    s3::S3,
};
use crate::Error;

pub(crate) use self::name::ObjectName;
pub use self::problem::ObjectProblem;

/// Maximum time of one request to a server.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time of a call with its retries.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Reads of one process at a time, and other calls, so that a slow store takes neither all threads
/// nor much memory, and readers do not delay runs.
const MAX_CALLS: usize = 16;

codelia_types::options! {
    /// Where the output of runs is stored: the section `output` of the configuration.
    pub struct OutputOptions {
        /// Where large output goes: `postgres`, `file:///PATH` or `s3://BUCKET/PREFIX`. Default:
        /// `postgres`; `up` with its own database: `DATA_DIR/output`.
        #[serde(with = "optional_text")]
        pub store: Option<OutputLocation> = None,
        /// Output of one flush that is stored in the database; more goes to the store.
        pub inline: ByteSize = ByteSize::kib(64),
        /// URL of another S3-compatible server; `http://` is not encrypted. Default: AWS.
        pub s3_endpoint: Option<String> = None,
        /// Region of the bucket.
        pub s3_region: String = "us-east-1".to_owned(),
        /// Access key of the bucket. Default: what the AWS environment provides.
        pub s3_access_key_id: Option<String> = None,
        /// Secret of the access key. Default: what the AWS environment provides.
        #[serde(serialize_with = "option::masked")]
        pub s3_secret_access_key: Option<SecretString> = None,
    }
}

impl OutputOptions {
    /// Checks that the access key is complete.
    ///
    /// # Errors
    /// If one of its two keys is missing.
    pub fn check(&self) -> Result<(), InvalidOption> {
        if self.s3_access_key_id.is_some() == self.s3_secret_access_key.is_some() {
            return Ok(());
        }
        Err(InvalidOption::new(
            "output.s3_access_key_id and output.s3_secret_access_key",
            "set both or neither",
        ))
    }
}

/// Where large output goes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum OutputLocation {
    /// To the database, as all output.
    #[default]
    Postgres,
    /// To files in a directory.
    Directory(PathBuf),
    /// To a bucket.
    S3 {
        /// The bucket.
        bucket: String,
        /// The start of the names of all objects; may be empty.
        prefix: String,
    },
}

impl FromStr for OutputLocation {
    type Err = String;

    /// Parses `postgres`, `file:///PATH` or `s3://BUCKET/PREFIX`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let invalid =
            || format!("expected postgres, file:///PATH or s3://BUCKET/PREFIX, found {text:?}");
        if text == "postgres" {
            return Ok(Self::Postgres);
        }
        if let Some(path) = text.strip_prefix("file://") {
            let is_root = path.trim_matches('/').is_empty();
            return if path.starts_with('/') && !is_root {
                Ok(Self::Directory(path.into()))
            } else {
                Err(invalid())
            };
        }
        let (bucket, prefix) = match text.strip_prefix("s3://").ok_or_else(invalid)?.split_once('/')
        {
            Some((bucket, prefix)) => (bucket, prefix.trim_end_matches('/')),
            None => (text.trim_start_matches("s3://"), ""),
        };
        if bucket.is_empty() {
            return Err(invalid());
        }
        Ok(Self::S3 { bucket: bucket.to_owned(), prefix: prefix.to_owned() })
    }
}

impl fmt::Display for OutputLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Postgres => write!(f, "postgres"),
            Self::Directory(path) => write!(f, "file://{}", path.display()),
            Self::S3 { bucket, prefix } => write!(f, "s3://{bucket}/{prefix}"),
        }
    }
}

/// The objects of an installation.
#[derive(Debug)]
pub(crate) struct Objects {
    place: Place,
    location: String,
    inline_bytes: usize,
    reads: Arc<Semaphore>,
    others: Arc<Semaphore>,
}

#[derive(Debug)]
enum Place {
    Directory(Directory),
    S3(S3),
}

impl Objects {
    /// `None` if all output goes to the database.
    fn open(
        location: &OutputLocation,
        options: &OutputOptions,
    ) -> Result<Option<Self>, ObjectProblem> {
        let place = match location {
            OutputLocation::Postgres => return Ok(None),
            OutputLocation::Directory(path) => Place::Directory(Directory::open(path)?),
            OutputLocation::S3 { bucket, prefix } => Place::S3(S3::open(bucket, prefix, options)?),
        };
        Ok(Some(Self {
            place,
            location: location.to_string(),
            inline_bytes: usize::try_from(options.inline.bytes()).unwrap_or(usize::MAX),
            reads: Arc::new(Semaphore::new(MAX_CALLS)),
            others: Arc::new(Semaphore::new(MAX_CALLS)),
        }))
    }

    /// Whether output of this size goes to an object.
    pub(crate) fn takes(&self, bytes: usize) -> bool {
        bytes > self.inline_bytes
    }

    /// Writes an object. It is durable when this returns.
    pub(crate) async fn put(&self, name: &str, data: Bytes) -> Result<(), Error> {
        let put = async |permit| match &self.place {
            Place::Directory(directory) => directory.put(name, data, permit).await,
            Place::S3(s3) => s3.put(name, data).await,
        };
        call(name, &self.others, put).await.map_err(|error| match error {
            // A directory or bucket may be created again: the object is not lost.
            Error::Object { problem: ObjectProblem::Missing, .. } => {
                object_error(name, ObjectProblem::Failed("no such directory".to_owned()))
            }
            error => error,
        })
    }

    /// Reads a part of an object.
    ///
    /// # Errors
    /// [`ObjectProblem::Missing`] and [`ObjectProblem::Shortened`] if it does not have all of it.
    pub(crate) async fn read(&self, name: &str, range: Range<u64>) -> Result<Bytes, Error> {
        let length = range.end.saturating_sub(range.start);
        let expected = range.end;
        let read = async |permit| {
            let data = match &self.place {
                Place::Directory(directory) => directory.read(name, range, permit).await?,
                Place::S3(s3) => s3.read(name, range).await?,
            };
            let is_whole = u64::try_from(data.len()).is_ok_and(|found| found == length);
            if is_whole { Ok(data) } else { Err(ObjectProblem::Shortened { expected }) }
        };
        call(name, &self.reads, read).await
    }

    /// Removes objects; those that do not exist are fine.
    pub(crate) async fn delete(&self, names: &[String]) -> Result<(), Error> {
        let first = names.first().map_or("", String::as_str);
        let delete = async |permit| match &self.place {
            Place::Directory(directory) => directory.delete(names, permit).await,
            Place::S3(s3) => s3.delete(names).await,
        };
        call(first, &self.others, delete).await
    }

    /// The days that have objects.
    pub(crate) async fn days(&self) -> Result<Vec<String>, Error> {
        let days = async |permit| match &self.place {
            Place::Directory(directory) => directory.days(permit).await,
            Place::S3(s3) => s3.days().await,
        };
        call("", &self.others, days).await
    }

    /// Lists the objects of a day.
    pub(crate) async fn list(&self, day: &str) -> Result<ObjectList<'_>, Error> {
        let list = async |permit| match &self.place {
            Place::Directory(directory) => Ok(Names::Files(directory.list(day, permit).await?)),
            Place::S3(s3) => Ok(Names::Keys(s3.list(day))),
        };
        let names = call(day, &self.others, list).await?;
        Ok(ObjectList { objects: self, names })
    }

    /// Removes what a day without objects leaves behind.
    pub(crate) async fn remove_day(&self, day: &str) -> Result<(), Error> {
        let remove = async |permit| match &self.place {
            Place::Directory(directory) => directory.remove_day(day, permit).await,
            Place::S3(_) => Ok(()),
        };
        call(day, &self.others, remove).await
    }
}

/// The objects of a day.
pub(crate) struct ObjectList<'a> {
    objects: &'a Objects,
    names: Names,
}

enum Names {
    Files(FileList),
    Keys(BoxStream<'static, Result<String, ObjectProblem>>),
}

impl ObjectList<'_> {
    /// Returns up to `limit` more names; none at the end.
    pub(crate) async fn next(&mut self, limit: usize) -> Result<Vec<String>, Error> {
        let next = async |permit| match &mut self.names {
            Names::Files(files) => files.next(limit, permit).await,
            Names::Keys(keys) => keys.by_ref().take(limit).try_collect().await,
        };
        call("", &self.objects.others, next).await
    }
}

/// Works with an object within the timeout, with one of the permits.
async fn call<T>(
    name: &str,
    permits: &Arc<Semaphore>,
    work: impl AsyncFnOnce(OwnedSemaphorePermit) -> Result<T, ObjectProblem>,
) -> Result<T, Error> {
    let call = async {
        let permit = permits.clone().acquire_owned().await.map_err(|_| ObjectProblem::Timeout)?;
        work(permit).await
    };
    let done = timeout(TIMEOUT, call).await.map_err(|_| ObjectProblem::Timeout).flatten();
    done.map_err(|problem| object_error(name, problem))
}

fn object_error(name: &str, problem: ObjectProblem) -> Error {
    Error::Object { name: name.to_owned(), problem }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn location_is_parsed_and_shown() {
        for text in [
            "postgres",
            "file:///var/lib/codelia/output",
            "s3://bucket/some/prefix",
            "s3://bucket/",
        ] {
            assert_eq!(text.parse::<OutputLocation>().unwrap().to_string(), text);
        }
        for wrong in
            ["", "directory", "file://relative", "file:///", "s3://", "s3:///x", "gs://b/p", "/var"]
        {
            assert!(wrong.parse::<OutputLocation>().is_err(), "{wrong}");
        }
    }
}
