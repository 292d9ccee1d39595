//! Limits that are measured while a command runs, and may end it.

pub(crate) mod directories;
pub(crate) mod near_limits;
pub(crate) mod size;
pub(crate) mod volumes;

use std::fmt::Debug;

use codelia_types::Outcome;
use futures::future::{BoxFuture, FutureExt, pending, select_all};

use crate::disk::WatchedRun;

/// A limit of a command that is measured for as long as this lives.
pub(crate) trait LimitWatch: Debug + Send + Sync {
    /// Waits until the limit is exceeded, and returns the name of its resource. The command is
    /// killed then. May be called again: a limit that was exceeded stays so.
    fn exceeded(&self) -> BoxFuture<'_, &'static str>;
}

/// All limits of one command that are measured.
#[derive(Debug)]
pub(crate) struct LimitWatches(pub(crate) Vec<Box<dyn LimitWatch>>);

impl LimitWatches {
    /// Waits until the first limit is exceeded, and returns the outcome of the run.
    pub(crate) async fn exceeded(&self) -> Outcome {
        if self.0.is_empty() {
            return pending().await;
        }
        let (resource, ..) = select_all(self.0.iter().map(|watch| watch.exceeded())).await;
        Outcome::Limit(resource.to_owned())
    }
}

impl LimitWatch for WatchedRun {
    fn exceeded(&self) -> BoxFuture<'_, &'static str> {
        self.exceeded_limit().map(|limit| limit.resource()).boxed()
    }
}
