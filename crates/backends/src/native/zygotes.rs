//! The zygotes that are kept for the next runs of their sessions: those that were used last, and
//! not for long after a use.

use std::{
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use codelia_sys::cgroup::Group;
use codelia_types::SessionId;
use tokio::sync::OnceCell;

use crate::Error;

use super::{
    plan::ZygoteSpec,
    zygote::{Started, Zygote},
};

/// How long a zygote is kept after its last use. An idle session costs nothing then.
const MAX_IDLE: Duration = Duration::from_secs(60);

/// An older zygote is not used: what it was made from may have changed.
const MAX_AGE: Duration = Duration::from_secs(600);

/// The kept zygotes.
#[derive(Debug)]
pub(super) struct Zygotes {
    /// In the order of their last use.
    kept: Mutex<Vec<Kept>>,
    max: usize,
}

#[derive(Debug)]
struct Kept {
    spec: ZygoteSpec,
    /// Made once, however many runs wait for it.
    zygote: Arc<OnceCell<Arc<Zygote>>>,
    made_at: Instant,
    used_at: Instant,
}

impl Zygotes {
    pub(super) fn new(max: usize) -> Self {
        Self { kept: Mutex::default(), max }
    }

    /// Starts a sandbox out of the zygote, which is made if there is none.
    pub(super) async fn start(
        &self,
        init: &Path,
        spec: ZygoteSpec,
        group: Option<&Group>,
    ) -> Result<(Arc<Zygote>, Started), Error> {
        let (started, existed) = self.try_start(init, &spec, group).await;
        match started {
            // The process of the zygote may have been killed since.
            Err(Error::InitExited | Error::Control(_)) if existed => {
                self.try_start(init, &spec, group).await.0
            }
            started => started,
        }
    }

    /// Returns also whether the zygote existed before. One that fails is not kept.
    async fn try_start(
        &self,
        init: &Path,
        spec: &ZygoteSpec,
        group: Option<&Group>,
    ) -> (Result<(Arc<Zygote>, Started), Error>, bool) {
        let cell = self.keep(spec);
        let existed = cell.initialized();
        let started = async {
            let create = || async { Zygote::create(init, spec, Vec::new()).await.map(Arc::new) };
            let zygote = cell.get_or_try_init(create).await?.clone();
            let started = zygote.start(group).await?;
            Ok((zygote, started))
        };
        let started = started.await;
        if started.is_err() {
            self.lock().retain(|kept| !Arc::ptr_eq(&kept.zygote, &cell));
        }
        (started, existed)
    }

    /// The place of a zygote, used now.
    fn keep(&self, spec: &ZygoteSpec) -> Arc<OnceCell<Arc<Zygote>>> {
        let mut kept = self.lock();
        let now = Instant::now();
        let found = kept.iter().position(|one| one.spec == *spec).map(|index| kept.remove(index));
        let new =
            || Kept { spec: spec.clone(), zygote: Arc::default(), made_at: now, used_at: now };
        let one = found.filter(|one| one.made_at.elapsed() < MAX_AGE).unwrap_or_else(new);
        let zygote = one.zygote.clone();
        kept.push(Kept { used_at: now, ..one });
        let surplus = kept.len().saturating_sub(self.max);
        kept.drain(..surplus);
        zygote
    }

    /// Drops zygotes that no run used for a while.
    pub(super) fn drop_idle(&self) {
        self.lock().retain(|kept| kept.is_used() || kept.used_at.elapsed() < MAX_IDLE);
    }

    /// Drops the zygotes of a session. Its sandboxes keep theirs until they end.
    pub(super) fn forget(&self, session: SessionId) {
        self.lock().retain(|kept| kept.spec.session != session);
    }

    pub(super) fn clear(&self) {
        self.lock().clear();
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Kept>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    /// Whether a sandbox lives in it, or a run waits for it.
    fn is_used(&self) -> bool {
        Arc::strong_count(&self.zygote) > 1
            || self.zygote.get().is_none_or(|zygote| Arc::strong_count(zygote) > 1)
    }
}
