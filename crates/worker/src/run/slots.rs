//! Slots and the fair queue before them. Pure: no clock, no I/O, no task.
//!
//! A slot is the right to have one command running. When one is free it goes to the tenant with
//! the fewest running runs here, then to the one whose last turn is longest ago; first in, first
//! out within a tenant. A tenant that comes anew is as if its last turn was a moment ago.

use std::collections::{BTreeSet, HashMap, VecDeque};

use codelia_types::TenantId;

/// The queue takes no more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Full;

/// `capacity` slots and who waits for one.
#[derive(Debug)]
pub(crate) struct Slots<T> {
    capacity: usize,
    busy: usize,
    max_waiting: usize,
    waiting: usize,
    arrivals: u64,
    /// Turns given so far.
    turns: u64,
    lanes: HashMap<TenantId, Lane<T>>,
    /// Tenants with somebody waiting, the next one first.
    order: BTreeSet<Place>,
}

/// A tenant's place among those that wait: (running, last turn, arrival of its first, tenant).
type Place = (usize, u64, u64, TenantId);

#[derive(Debug)]
struct Lane<T> {
    running: usize,
    turn: u64,
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
            turns: 0,
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

    /// Takes a slot for a tenant at once, if one is free and nobody waits for it.
    pub(crate) fn try_take(&mut self, tenant: &TenantId) -> bool {
        if self.free() == 0 || self.waiting > 0 {
            return false;
        }
        self.change_running(tenant, |running| running + 1);
        self.busy += 1;
        true
    }

    /// Lets a run wait for a slot.
    pub(crate) fn wait(&mut self, tenant: &TenantId, item: T) -> Result<(), Full> {
        if self.waiting >= self.max_waiting {
            return Err(Full);
        }
        self.arrivals += 1;
        self.waiting += 1;
        let turns = self.turns;
        let lane = self.lanes.entry(tenant.clone()).or_insert_with(|| Lane::new(turns));
        lane.queue.push_back((self.arrivals, item));
        if lane.queue.len() == 1 {
            self.order.extend(lane.place(tenant));
        }
        Ok(())
    }

    /// Gives the next free slot to whoever is to have it. `None` if there is no slot or nobody waits.
    pub(crate) fn next(&mut self) -> Option<(TenantId, T)> {
        if self.free() == 0 {
            return None;
        }
        let (.., tenant) = self.order.pop_first()?;
        let lane = self.lanes.get_mut(&tenant)?;
        let (_, item) = lane.queue.pop_front()?;
        self.turns += 1;
        lane.running += 1;
        // Behind a tenant that comes before the next turn is given.
        lane.turn = self.turns + 1;
        self.order.extend(lane.place(&tenant));
        self.waiting -= 1;
        self.busy += 1;
        Some((tenant, item))
    }

    /// A tenant's run does not need its slot any more.
    pub(crate) fn release(&mut self, tenant: &TenantId) {
        self.busy = self.busy.saturating_sub(1);
        self.change_running(tenant, |running| running.saturating_sub(1));
    }

    /// Forgets everybody who waits, and returns them.
    pub(crate) fn clear_waiting(&mut self) -> Vec<T> {
        self.order.clear();
        self.waiting = 0;
        let items =
            self.lanes.values_mut().flat_map(|lane| lane.queue.drain(..)).map(|(_, item)| item).collect();
        self.lanes.retain(|_, lane| lane.running > 0);
        items
    }

    fn change_running(&mut self, tenant: &TenantId, change: impl Fn(usize) -> usize) {
        let turns = self.turns;
        let lane = self.lanes.entry(tenant.clone()).or_insert_with(|| Lane::new(turns));
        if let Some(place) = lane.place(tenant) {
            self.order.remove(&place);
        }
        lane.running = change(lane.running);
        self.order.extend(lane.place(tenant));
        if lane.running == 0 && lane.queue.is_empty() {
            self.lanes.remove(tenant);
        }
    }
}

impl<T> Lane<T> {
    fn new(turn: u64) -> Self {
        Self { running: 0, turn, queue: VecDeque::new() }
    }

    /// Its place, if somebody waits in it.
    fn place(&self, tenant: &TenantId) -> Option<Place> {
        let (since, _) = self.queue.front()?;
        Some((self.running, self.turn, *since, tenant.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tenant(name: &str) -> TenantId {
        name.parse().unwrap()
    }

    #[test]
    fn a_free_slot_is_taken_at_once_and_a_full_house_is_not() {
        let mut slots = Slots::<u32>::new(2, 10);
        assert!(slots.try_take(&tenant("a")));
        assert!(slots.try_take(&tenant("b")));
        assert!(!slots.try_take(&tenant("c")));
        slots.release(&tenant("a"));
        assert!(slots.try_take(&tenant("c")));
        assert_eq!((slots.busy(), slots.free()), (2, 0));
    }

    #[test]
    fn a_flooding_tenant_delays_another_by_at_most_one_slot_turn() {
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
            assert_eq!(next, Some((quiet.clone(), 9_999)), "the very next slot is the quiet tenant's");
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
        assert_eq!(served, [1, 2, 3, 4], "one each, the one that came first first");
    }

    #[test]
    fn a_tenant_with_fewer_running_goes_first_even_if_it_came_later() {
        let (many, few) = (tenant("many"), tenant("few"));
        let mut slots = Slots::new(3, 100);
        assert!(slots.try_take(&many) && slots.try_take(&many) && slots.try_take(&few));
        slots.wait(&many, "many").unwrap();
        slots.wait(&few, "few").unwrap();
        slots.release(&many);
        // One each now: the longer wait decides.
        assert_eq!(slots.next(), Some((many.clone(), "many")));
        slots.release(&few);
        assert_eq!(slots.next(), Some((few, "few")));
    }

    #[test]
    fn nobody_overtakes_those_who_wait() {
        let mut slots = Slots::new(1, 100);
        assert!(slots.try_take(&tenant("a")));
        slots.wait(&tenant("b"), 1).unwrap();
        slots.release(&tenant("a"));
        assert!(!slots.try_take(&tenant("a")));
        assert_eq!(slots.next(), Some((tenant("b"), 1)));
    }

    #[test]
    fn the_queue_is_bounded_and_leaves_nothing_behind() {
        let mut slots = Slots::new(1, 2);
        assert!(slots.try_take(&tenant("a")));
        slots.wait(&tenant("a"), 1).unwrap();
        slots.wait(&tenant("b"), 2).unwrap();
        assert_eq!(slots.wait(&tenant("c"), 3), Err(Full));
        let mut forgotten = slots.clear_waiting();
        forgotten.sort_unstable();
        assert_eq!(forgotten, [1, 2]);
        slots.release(&tenant("a"));
        assert_eq!(slots.next(), None);
        assert!(slots.lanes.is_empty());
    }
}
