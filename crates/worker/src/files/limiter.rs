//! How many file calls are open: each holds descriptors, and no tenant may hold them all.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

const MOST: usize = 256;
const MOST_OF_TENANT: usize = 64;

/// The calls that are open.
#[derive(Debug, Default)]
pub(crate) struct Crowd {
    by_tenant: Mutex<HashMap<String, usize>>,
}

/// One of them; it is over when this is dropped.
#[derive(Debug)]
pub(crate) struct Ticket {
    crowd: Arc<Crowd>,
    tenant: String,
}

impl Crowd {
    /// Lets a call in; `None` if there are too many.
    pub(crate) fn enter(self: &Arc<Self>, tenant: &str) -> Option<Ticket> {
        let mut by_tenant = self.lock();
        let (all, own) = (by_tenant.values().sum::<usize>(), by_tenant.get(tenant).copied().unwrap_or(0));
        if all >= MOST || own >= MOST_OF_TENANT {
            return None;
        }
        by_tenant.insert(tenant.to_owned(), own + 1);
        Some(Ticket { crowd: self.clone(), tenant: tenant.to_owned() })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, usize>> {
        self.by_tenant.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut by_tenant = self.crowd.lock();
        match by_tenant.get_mut(&self.tenant) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(by_tenant.remove(&self.tenant)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_tenant_holds_all_and_who_leaves_makes_room() {
        let crowd = Arc::<Crowd>::default();
        let held: Vec<Ticket> = std::iter::from_fn(|| crowd.enter("greedy")).collect();
        assert_eq!(held.len(), MOST_OF_TENANT);
        let other = crowd.enter("other");
        assert!(other.is_some());
        drop((held, other));
        assert!(crowd.enter("greedy").is_some());
        assert!(crowd.lock().is_empty());
        let tenants: Vec<Ticket> = (0..).map_while(|n: usize| crowd.enter(&(n / 50).to_string())).collect();
        assert_eq!(tenants.len(), MOST);
    }
}
