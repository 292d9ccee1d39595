//! Slots, and the fair queue of runs that wait for one. [`Slots`] is pure: no clock, no I/O.
//!
//! A slot is the right to run one command. A free slot goes to the tenant with the fewest running
//! runs here, then to the tenant that was served longest ago; runs of one tenant are served in
//! order of arrival. A tenant that is new here counts as if it had just been served.

use std::collections::{BTreeSet, HashMap, VecDeque};

use codelia_types::{RunId, SessionId, TenantId};
use parking_lot::Mutex;
use tokio::time::Instant;

/// A queued run that waits for a slot in this worker.
#[derive(Debug)]
pub(crate) struct WaitingRun {
    pub(crate) run: RunId,
    pub(crate) session: SessionId,
    pub(crate) since: Instant,
}

/// The slots of this worker and the runs that wait for them.
pub(crate) type SlotQueue = Mutex<Slots<WaitingRun>>;

/// The queue is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Full;

/// `capacity` slots, and the items that wait for one.
#[derive(Debug)]
pub(crate) struct Slots<T> {
    capacity: usize,
    busy: usize,
    max_waiting: usize,
    waiting: usize,
    arrivals: u64,
    /// Slots given to waiting items so far.
    services: u64,
    lanes: HashMap<TenantId, Lane<T>>,
    /// Tenants with waiting items, the next one first.
    order: BTreeSet<Rank>,
}

/// A tenant's rank in the queue: (running, last service, arrival of its first item, tenant).
type Rank = (usize, u64, u64, TenantId);

#[derive(Debug)]
struct Lane<T> {
    running: usize,
    last_service: u64,
    queue: VecDeque<(u64, T)>,
}

impl<T> Slots<T> {
    pub(crate) fn new(capacity: usize, max_waiting: usize) -> Self {
        Self {
            capacity,
            busy: 0,
            max_waiting,
            waiting: 0,
            arrivals: 0,
            services: 0,
            lanes: HashMap::new(),
            order: BTreeSet::new(),
        }
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    pub(crate) fn busy(&self) -> usize {
        self.busy
    }

    pub(crate) fn free(&self) -> usize {
        self.capacity.saturating_sub(self.busy)
    }

    pub(crate) fn waiting(&self) -> usize {
        self.waiting
    }

    /// Takes a slot for a tenant if one is free and nothing waits for it.
    pub(crate) fn try_take(&mut self, tenant: &TenantId) -> bool {
        if self.free() == 0 || self.waiting > 0 {
            return false;
        }
        self.change_running(tenant, |running| running + 1);
        self.busy += 1;
        true
    }

    /// Adds an item to the queue.
    pub(crate) fn wait(&mut self, tenant: &TenantId, item: T) -> Result<(), Full> {
        if self.waiting >= self.max_waiting {
            return Err(Full);
        }
        self.arrivals += 1;
        self.waiting += 1;
        let services = self.services;
        let lane = self.lanes.entry(tenant.clone()).or_insert_with(|| Lane::new(services));
        lane.queue.push_back((self.arrivals, item));
        if lane.queue.len() == 1 {
            self.order.extend(lane.rank(tenant));
        }
        Ok(())
    }

    /// Gives a free slot to the next item. `None` if no slot is free or nothing waits.
    pub(crate) fn next(&mut self) -> Option<(TenantId, T)> {
        if self.free() == 0 {
            return None;
        }
        let (.., tenant) = self.order.pop_first()?;
        let lane = self.lanes.get_mut(&tenant)?;
        let (_, item) = lane.queue.pop_front()?;
        self.services += 1;
        lane.running += 1;
        // Behind a tenant that arrives before the next service.
        lane.last_service = self.services + 1;
        self.order.extend(lane.rank(&tenant));
        self.waiting -= 1;
        self.busy += 1;
        Some((tenant, item))
    }

    /// Returns a tenant's slot.
    pub(crate) fn release(&mut self, tenant: &TenantId) {
        self.busy = self.busy.saturating_sub(1);
        self.change_running(tenant, |running| running.saturating_sub(1));
    }

    /// Removes all waiting items and returns them.
    pub(crate) fn clear_waiting(&mut self) -> Vec<T> {
        self.order.clear();
        self.waiting = 0;
        let items = self
            .lanes
            .values_mut()
            .flat_map(|lane| lane.queue.drain(..))
            .map(|(_, item)| item)
            .collect();
        self.lanes.retain(|_, lane| lane.running > 0);
        items
    }

    fn change_running(&mut self, tenant: &TenantId, change: impl Fn(usize) -> usize) {
        let services = self.services;
        let lane = self.lanes.entry(tenant.clone()).or_insert_with(|| Lane::new(services));
        if let Some(rank) = lane.rank(tenant) {
            self.order.remove(&rank);
        }
        lane.running = change(lane.running);
        self.order.extend(lane.rank(tenant));
        if lane.running == 0 && lane.queue.is_empty() {
            self.lanes.remove(tenant);
        }
    }
}

impl<T> Lane<T> {
    fn new(last_service: u64) -> Self {
        Self { running: 0, last_service, queue: VecDeque::new() }
    }

    /// The rank of the lane, if an item waits in it.
    fn rank(&self, tenant: &TenantId) -> Option<Rank> {
        let (arrival, _) = self.queue.front()?;
        Some((self.running, self.last_service, *arrival, tenant.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tenant(name: &str) -> TenantId {
        name.parse().unwrap()
    }

    #[test]
    fn slot_is_taken_only_while_one_is_free() {
        let mut slots = Slots::<u32>::new(2, 10);
        assert!(slots.try_take(&tenant("a")));
        assert!(slots.try_take(&tenant("b")));
        assert!(!slots.try_take(&tenant("c")));
        slots.release(&tenant("a"));
        assert!(slots.try_take(&tenant("c")));
        assert_eq!((slots.busy(), slots.free()), (2, 0));
    }

    #[test]
    fn flooding_tenant_delays_others_by_one_turn() {
        let (flood, quiet) = (tenant("flood"), tenant("quiet"));
        for capacity in [1, 4] {
            let mut slots = Slots::new(capacity, 10_000);
            while slots.try_take(&flood) {}
            for item in 0..5_000 {
                slots.wait(&flood, item).unwrap();
            }
            for _ in 0..10 {
                slots.release(&flood);
                assert!(slots.next().is_some());
            }
            slots.wait(&quiet, 9_999).unwrap();
            slots.release(&flood);
            let next = slots.next();
            assert_eq!(next, Some((quiet.clone(), 9_999)), "the next slot is the quiet tenant's");
        }
    }

    #[test]
    fn tenants_with_equal_shares_take_turns() {
        let mut slots = Slots::new(1, 100);
        assert!(slots.try_take(&tenant("z")));
        for (name, item) in [("b", 1), ("b", 3), ("a", 2), ("a", 4)] {
            slots.wait(&tenant(name), item).unwrap();
        }
        let mut served = Vec::new();
        let mut last = tenant("z");
        loop {
            slots.release(&last);
            let Some((next, item)) = slots.next() else { break };
            served.push(item);
            last = next;
        }
        assert_eq!(served, [1, 2, 3, 4], "one after the other, the first to arrive first");
    }

    #[test]
    fn tenant_with_fewer_running_goes_first() {
        let (many, few) = (tenant("many"), tenant("few"));
        let mut slots = Slots::new(3, 100);
        assert!(slots.try_take(&many) && slots.try_take(&many) && slots.try_take(&few));
        slots.wait(&many, "many").unwrap();
        slots.wait(&few, "few").unwrap();
        slots.release(&many);
        // Both have one running: the longer wait decides.
        assert_eq!(slots.next(), Some((many.clone(), "many")));
        slots.release(&few);
        assert_eq!(slots.next(), Some((few, "few")));
    }

    #[test]
    fn free_slot_goes_to_waiting_run_first() {
        let mut slots = Slots::new(1, 100);
        assert!(slots.try_take(&tenant("a")));
        slots.wait(&tenant("b"), 1).unwrap();
        slots.release(&tenant("a"));
        assert!(!slots.try_take(&tenant("a")));
        assert_eq!(slots.next(), Some((tenant("b"), 1)));
    }

    #[test]
    fn queue_is_bounded_and_clears_completely() {
        let mut slots = Slots::new(1, 2);
        assert!(slots.try_take(&tenant("a")));
        slots.wait(&tenant("a"), 1).unwrap();
        slots.wait(&tenant("b"), 2).unwrap();
        assert_eq!(slots.wait(&tenant("c"), 3), Err(Full));
        let mut cleared = slots.clear_waiting();
        cleared.sort_unstable();
        assert_eq!(cleared, [1, 2]);
        slots.release(&tenant("a"));
        assert_eq!(slots.next(), None);
        assert!(slots.lanes.is_empty());
    }
}
