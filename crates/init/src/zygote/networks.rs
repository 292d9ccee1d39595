//! The networks of a zygote. A sandbox gets one that no process and no socket is in, so that
//! creating and destroying one is not part of every run.

use std::{os::fd::OwnedFd, path::Path};

use codelia_init::HOST_PROC;
use codelia_sys::{Errno, Pid, network};

/// How many networks are kept: for a sandbox that runs and one that is prepared.
const MAX_KEPT: usize = 2;

/// The networks that are kept.
#[derive(Debug)]
pub(super) struct Networks {
    kept: Vec<Network>,
    /// Whether sandboxes have networks of the zygote at all.
    are_used: bool,
}

#[derive(Debug)]
struct Network {
    namespace: OwnedFd,
    /// The init of the sandbox that is in it.
    occupant: Option<Pid>,
}

impl Networks {
    /// Creates the first one, so that this process leaves the host's.
    pub(super) fn create(are_used: bool) -> Result<Self, Errno> {
        let mut networks = Self { kept: Vec::new(), are_used };
        if are_used {
            networks.add()?;
        }
        Ok(networks)
    }

    /// Moves this process into a network for the next sandbox. Returns its index if it is kept.
    pub(super) fn enter_free(&mut self) -> Result<Option<usize>, Errno> {
        if !self.are_used {
            return Ok(None);
        }
        for (index, kept) in
            self.kept.iter().enumerate().filter(|(_, kept)| kept.occupant.is_none())
        {
            network::enter(&kept.namespace)?;
            // A connection of an earlier sandbox may still be closing.
            if network::count_sockets(Path::new(HOST_PROC)) == Some(0) {
                return Ok(Some(index));
            }
        }
        if self.kept.len() < MAX_KEPT {
            return self.add().map(Some);
        }
        // The network is gone with its sandbox, once this process has entered another one.
        new_network().map(|()| None)
    }

    pub(super) fn occupy(&mut self, index: Option<usize>, init: Pid) {
        if let Some(kept) = index.and_then(|index| self.kept.get_mut(index)) {
            kept.occupant = Some(init);
        }
    }

    pub(super) fn release(&mut self, init: Pid) {
        for kept in self.kept.iter_mut().filter(|kept| kept.occupant == Some(init)) {
            kept.occupant = None;
        }
    }

    fn add(&mut self) -> Result<usize, Errno> {
        new_network()?;
        let namespace = network::open_own(Path::new(HOST_PROC))?;
        self.kept.push(Network { namespace, occupant: None });
        Ok(self.kept.len() - 1)
    }
}

/// Commands have no capability in it: it belongs to the user namespace of the zygote.
fn new_network() -> Result<(), Errno> {
    network::unshare()?;
    network::start_loopback()
}
