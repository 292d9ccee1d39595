//! Runs work that keeps a processor busy off the async runtime, with a limit for each tenant.

use std::{
    collections::HashMap, future::pending, panic::resume_unwind, sync::Arc,
    thread::available_parallelism,
};

use parking_lot::Mutex;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    task::spawn_blocking,
};

/// How much work of one tenant runs at the same time.
const MAX_RUNNING: usize = 2;

/// The tenant has as much work waiting as it may.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the tenant has {max_waiting} calls waiting already")]
pub struct TenantBusy {
    /// How much work of one tenant may wait.
    pub max_waiting: usize,
}

/// Limits the work of each tenant, and of all together to the number of processors.
#[derive(Debug)]
pub struct TenantPool {
    max_waiting: usize,
    processors: Arc<Semaphore>,
    tenants: Mutex<HashMap<String, Tenant>>,
}

#[derive(Debug)]
struct Tenant {
    running: Arc<Semaphore>,
    /// Work that runs or waits.
    admitted: usize,
}

/// The right to do work of one tenant.
#[derive(Debug)]
pub struct Permit {
    _running: (OwnedSemaphorePermit, OwnedSemaphorePermit),
    _admission: Admission,
}

/// Counts as work of its tenant until it is dropped.
#[derive(Debug)]
struct Admission {
    pool: Arc<TenantPool>,
    tenant: String,
    running: Arc<Semaphore>,
}

impl TenantPool {
    /// A pool in which up to `max_waiting` pieces of work of each tenant may wait.
    #[must_use]
    pub fn new(max_waiting: usize) -> Arc<Self> {
        let processors = available_parallelism().map_or(1, usize::from);
        Arc::new(Self {
            max_waiting,
            processors: Arc::new(Semaphore::new(processors)),
            tenants: Mutex::default(),
        })
    }

    /// Waits until the tenant may do one more piece of work.
    ///
    /// # Errors
    /// Too much work of the tenant waits already.
    pub async fn acquire(self: &Arc<Self>, tenant: &str) -> Result<Permit, TenantBusy> {
        let admission = self.admit(tenant)?;
        let own = acquire(admission.running.clone()).await;
        let any = acquire(self.processors.clone()).await;
        Ok(Permit { _running: (own, any), _admission: admission })
    }

    /// Does work of a tenant on another thread and returns its result. Work that has begun ends
    /// even if the caller does not wait for it, and counts until then.
    ///
    /// # Errors
    /// As [`TenantPool::acquire`].
    pub async fn run<T: Send + 'static>(
        self: &Arc<Self>,
        tenant: &str,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, TenantBusy> {
        let permit = self.acquire(tenant).await?;
        let work = move || {
            let result = work();
            drop(permit);
            result
        };
        match spawn_blocking(work).await.map_err(tokio::task::JoinError::try_into_panic) {
            Ok(result) => Ok(result),
            Err(Ok(panic)) => resume_unwind(panic),
            // The runtime shuts down.
            Err(Err(_)) => pending().await,
        }
    }

    fn admit(self: &Arc<Self>, name: &str) -> Result<Admission, TenantBusy> {
        let mut tenants = self.tenants.lock();
        let new = || Tenant { running: Arc::new(Semaphore::new(MAX_RUNNING)), admitted: 0 };
        let tenant = tenants.entry(name.to_owned()).or_insert_with(new);
        if tenant.admitted >= self.max_waiting.saturating_add(MAX_RUNNING) {
            return Err(TenantBusy { max_waiting: self.max_waiting });
        }
        tenant.admitted += 1;
        Ok(Admission {
            pool: self.clone(),
            tenant: name.to_owned(),
            running: tenant.running.clone(),
        })
    }
}

/// Takes a permit of a semaphore that is never closed.
async fn acquire(semaphore: Arc<Semaphore>) -> OwnedSemaphorePermit {
    match semaphore.acquire_owned().await {
        Ok(permit) => permit,
        Err(_) => pending().await,
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        let mut tenants = self.pool.tenants.lock();
        match tenants.get_mut(&self.tenant) {
            Some(tenant) if tenant.admitted > 1 => tenant.admitted -= 1,
            _ => drop(tenants.remove(&self.tenant)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use futures::FutureExt;

    use super::*;

    #[tokio::test]
    async fn tenant_with_too_much_work_is_refused() {
        let pool = TenantPool::new(1);
        // Enough for both tenants, whatever the machine.
        pool.processors.add_permits(8);
        let mut held = Vec::new();
        for _ in 0..MAX_RUNNING {
            held.push(pool.acquire("greedy").await.unwrap());
        }
        let mut waiting = Box::pin(pool.acquire("greedy"));
        assert!((&mut waiting).now_or_never().is_none(), "it waits");
        assert_eq!(pool.acquire("greedy").await.unwrap_err(), TenantBusy { max_waiting: 1 });
        assert!(pool.acquire("other").await.is_ok(), "another tenant is served");
        held.pop();
        waiting.await.unwrap();
        drop(held);
        assert!(pool.tenants.lock().is_empty());
    }

    #[tokio::test]
    async fn abandoned_work_counts_until_it_ends() {
        let pool = TenantPool::new(0);
        let (go, wait) = mpsc::channel::<()>();
        let mut work = Box::pin(pool.run("a", move || wait.recv().ok()));
        assert!((&mut work).now_or_never().is_none());
        drop(work);
        assert_eq!(pool.tenants.lock()["a"].admitted, 1);
        go.send(()).unwrap();
        while !pool.tenants.lock().is_empty() {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    #[should_panic(expected = "broken")]
    async fn panic_reaches_caller() {
        let _ = TenantPool::new(0).run("a", || panic!("broken")).await;
    }
}
