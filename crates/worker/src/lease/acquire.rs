//! Taking sessions, and giving them back.

use std::{collections::HashSet, sync::Arc};

use codelia_policy::Ids;
use codelia_store::{Error, Lease, ReleaseOutcome};
use codelia_types::{LeaseEpoch, SessionId};
use futures::{TryStreamExt, stream};

use crate::{lease::keeper::Current, lease::sessions::Holding, worker::Worker, workspace::root::RootError};

/// Sessions given back at once.
const RELEASED_AT_ONCE: usize = 8;

/// Takes a session if that is possible, and prepares for its first run. Returns the epoch if the
/// session is held now.
pub(crate) async fn take_session(worker: &Arc<Worker>, id: SessionId) -> Result<Option<LeaseEpoch>, Error> {
    let current = worker.current();
    if let Holding::Held { epoch, closing: false } = worker.sessions.holding(id) {
        return Ok(Some(epoch));
    }
    if worker.is_draining() || !current.is_live() || !worker.sessions.begin_acquire(id) {
        return Ok(None);
    }
    let answer = worker.store.lease_acquire(id, worker.id(), current.incarnation).await;
    let Ok(Some(lease)) = answer else {
        // Whether a failed acquisition was stored is unknown; the poll finds out.
        worker.sessions.forget(id);
        return answer.map(|_| None);
    };
    if current.fence.is_cancelled() {
        worker.sessions.forget(id);
        return Ok(None);
    }
    let epoch = lease.token.epoch;
    match directory(worker, &lease).await {
        Ok(None) => {
            tracing::error!(session = %id, "the files of a session are gone: it ends");
            let ended = worker.store.session_end_data_lost(id, &lease.token).await;
            // If that was not stored, the poll gives the session back, and who takes it finds out again.
            worker.sessions.forget(id);
            worker.clean_now.notify_one();
            ended.map(|()| None)
        }
        Ok(Some(ids)) => {
            worker.sessions.acquired(lease, ids);
            worker.keep_spare(id);
            worker.poll_now.notify_one();
            Ok(Some(epoch))
        }
        Err(error) => {
            tracing::error!(error = &error as &dyn std::error::Error, session = %id, "no directory for a session");
            let released = worker.store.lease_release(id, &lease.token).await;
            // If that failed, the poll finds that the session is held and not known.
            worker.sessions.forget(id);
            released.map(|_| None)
        }
    }
}

/// Gives back the sessions that have no run here.
pub(crate) async fn release_idle(worker: &Worker) -> Result<(), Error> {
    let current = worker.current();
    let busy: HashSet<_> = worker.runs.all_active().iter().map(|run| run.assigned.session).collect();
    let idle = worker.sessions.all().into_iter().filter(|id| !busy.contains(id)).map(Ok);
    stream::iter(idle)
        .try_for_each_concurrent(RELEASED_AT_ONCE, |id| release_held(worker, &current, id))
        .await
}

/// From here on nothing of the session is started. A run that the store has recorded for us keeps
/// it busy until it is committed or handed back.
async fn release_held(worker: &Worker, current: &Current, id: SessionId) -> Result<(), Error> {
    let Some(epoch) = worker.sessions.begin_release(id) else { return Ok(()) };
    if release(worker, current, id, epoch).await? != ReleaseOutcome::Busy {
        worker.sessions.forget(id);
    }
    Ok(())
}

pub(crate) async fn release(
    worker: &Worker,
    current: &Current,
    id: SessionId,
    epoch: LeaseEpoch,
) -> Result<ReleaseOutcome, Error> {
    worker.store.lease_release(id, &worker.lease_token(current.incarnation, epoch)).await
}

/// Makes sure that a session has its directory, and tells whose it is; `None` if it had files and they
/// are gone.
async fn directory(worker: &Arc<Worker>, lease: &Lease) -> Result<Option<Ids>, RootError> {
    let (worker, id, has_files) = (worker.clone(), lease.session, lease.has_files);
    let look = move || {
        if has_files && !worker.root.has_session(id)? {
            return Ok(None);
        }
        worker.root.create_session(id).map(|(_, ids)| Some(ids))
    };
    tokio::task::spawn_blocking(look).await.map_err(|panic| RootError::interrupted(panic.into())).flatten()
}
