//! The configurations that are checked. Each combines a few events; the bounds are small, so that
//! every state within them is visited.

use codelia_model::{Bounds, Budget, RunBounds};

const NONE: Budget = Budget {
    crashes: 0,
    pauses: 0,
    partitions: 0,
    broken_connections: 0,
    lost_ticks: 0,
    worker_jumps: 0,
    forward_jumps: 0,
    backward_jumps: 0,
    rejections: 0,
    lost_directories: 0,
    upkeep_crashes: 0,
    drains: 0,
    cancels: 0,
    closes: 0,
    full_pushes: 0,
    slow_calls: 0,
    slow_tasks: 0,
};

/// One session with runs that allow so many retries.
fn bounds(retries: &[u8], ticks: i8, budget: Budget) -> Bounds {
    Bounds {
        runs: retries.iter().map(|retries| RunBounds { session: 0, retries: *retries }).collect(),
        budget,
        ticks,
        pushes: 1,
        same_key: false,
        expires_at: None,
        separate_roots: false,
        allow_data_loss: false,
        output: false,
        two_upkeep_processes: false,
        check_recovery: false,
    }
}

/// A worker crashes, and its runs are lost or retried.
pub(crate) fn crashes() -> Bounds {
    Bounds { pushes: 2, ..bounds(&[0, 1], 5, Budget { crashes: 1, ..NONE }) }
}

/// A worker is paused past its lease while a call is in flight.
pub(crate) fn pauses() -> Bounds {
    Bounds { pushes: 0, ..bounds(&[1], 5, Budget { pauses: 1, slow_calls: 1, ..NONE }) }
}

/// A worker whose clock lags cannot reach the database.
pub(crate) fn partitions() -> Bounds {
    bounds(&[0], 6, Budget { partitions: 1, lost_ticks: 1, ..NONE })
}

/// A renewal is slow, and its worker cannot reach the database after it.
pub(crate) fn slow_renewals() -> Bounds {
    Bounds { pushes: 0, ..bounds(&[0], 6, Budget { partitions: 1, slow_calls: 1, ..NONE }) }
}

/// Connections break while statements continue, and a worker drains.
pub(crate) fn broken_connections() -> Bounds {
    let budget = Budget { broken_connections: 1, slow_calls: 1, full_pushes: 1, drains: 1, ..NONE };
    Bounds { pushes: 2, ..bounds(&[0], 1, budget) }
}

/// A worker drains while an insert assigns a run to it.
pub(crate) fn drains() -> Bounds {
    let budget = Budget { drains: 1, slow_calls: 1, full_pushes: 1, ..NONE };
    Bounds { pushes: 2, ..bounds(&[0], 2, budget) }
}

/// A caller cancels a run whose worker crashes.
pub(crate) fn cancels() -> Bounds {
    Bounds {
        pushes: 0,
        ..bounds(&[1], 4, Budget { crashes: 1, cancels: 1, slow_calls: 1, ..NONE })
    }
}

/// A caller closes a session while a call is in flight.
pub(crate) fn closes() -> Bounds {
    bounds(&[0], 1, Budget { closes: 1, slow_calls: 1, drains: 1, ..NONE })
}

/// A caller closes a session whose worker crashes.
pub(crate) fn closes_and_crashes() -> Bounds {
    bounds(&[0, 1], 4, Budget { closes: 1, crashes: 1, ..NONE })
}

/// A session expires while calls are in flight.
pub(crate) fn expiry() -> Bounds {
    Bounds {
        expires_at: Some(1),
        ..bounds(&[0, 0], 1, Budget { slow_calls: 1, slow_tasks: 1, ..NONE })
    }
}

/// A session expires, and its worker crashes.
pub(crate) fn expiry_and_crashes() -> Bounds {
    Bounds { expires_at: Some(3), ..bounds(&[1], 6, Budget { crashes: 1, slow_tasks: 1, ..NONE }) }
}

/// A worker crashes, and a directory is lost.
pub(crate) fn lost_directories() -> Bounds {
    bounds(&[0, 1], 5, Budget { crashes: 1, lost_directories: 1, ..NONE })
}

/// A worker with its own root crashes.
pub(crate) fn separate_roots() -> Bounds {
    Bounds { separate_roots: true, ..bounds(&[1, 0], 6, Budget { crashes: 1, ..NONE }) }
}

/// A worker with its own root is away for long, and the session may lose its files.
pub(crate) fn allowed_data_loss() -> Bounds {
    let budget = Budget { crashes: 1, partitions: 1, ..NONE };
    Bounds { separate_roots: true, allow_data_loss: true, ..bounds(&[1], 8, budget) }
}

/// Workers crash and lose their connection, over more than two lease times.
pub(crate) fn combined_faults() -> Bounds {
    Bounds { pushes: 0, ..bounds(&[1], 9, Budget { crashes: 1, partitions: 1, ..NONE }) }
}

/// Workers crash and are paused, over two lease times.
pub(crate) fn combined_pauses() -> Bounds {
    Bounds { pushes: 0, ..bounds(&[1], 8, Budget { crashes: 1, pauses: 1, ..NONE }) }
}

/// Registrations are slow, and their connections break.
pub(crate) fn registrations() -> Bounds {
    let budget = Budget { crashes: 1, slow_calls: 1, broken_connections: 1, ..NONE };
    Bounds { pushes: 0, ..bounds(&[0], 1, budget) }
}

/// A worker leaves slowly and restarts.
pub(crate) fn leaves() -> Bounds {
    bounds(&[0], 2, Budget { drains: 1, slow_calls: 1, broken_connections: 1, ..NONE })
}

/// The owner of the upkeep stops while its sweep is in flight.
pub(crate) fn upkeep() -> Bounds {
    let budget = Budget { crashes: 1, closes: 1, upkeep_crashes: 1, slow_tasks: 1, ..NONE };
    Bounds { two_upkeep_processes: true, pushes: 0, ..bounds(&[1], 5, budget) }
}

/// The clock of the database jumps forward.
pub(crate) fn forward_jumps() -> Bounds {
    bounds(&[1], 3, Budget { forward_jumps: 1, slow_calls: 1, ..NONE })
}

/// The clock of the database jumps backward and forward, and a worker crashes.
pub(crate) fn clock_jumps() -> Bounds {
    let budget = Budget { forward_jumps: 1, backward_jumps: 1, crashes: 1, ..NONE };
    Bounds { pushes: 0, ..bounds(&[1], 3, budget) }
}

/// The clock of a worker jumps forward, and it cannot reach the database.
pub(crate) fn worker_jumps() -> Bounds {
    bounds(&[1], 5, Budget { worker_jumps: 1, partitions: 1, ..NONE })
}

/// A worker that appends output crashes.
pub(crate) fn output() -> Bounds {
    let budget = Budget { crashes: 1, slow_calls: 1, ..NONE };
    Bounds { output: true, pushes: 0, ..bounds(&[1], 5, budget) }
}

/// The database rejects a result, and connections break.
pub(crate) fn rejections() -> Bounds {
    let budget = Budget { rejections: 1, slow_calls: 1, broken_connections: 1, ..NONE };
    bounds(&[0], 1, budget)
}

/// Two sessions on two workers, one of which crashes.
pub(crate) fn two_sessions() -> Bounds {
    let runs = vec![RunBounds { session: 0, retries: 0 }, RunBounds { session: 1, retries: 1 }];
    Bounds { runs, pushes: 0, ..bounds(&[], 5, Budget { crashes: 1, ..NONE }) }
}

/// A caller sends a request twice with one idempotency key.
pub(crate) fn same_key() -> Bounds {
    let budget = Budget { slow_calls: 2, broken_connections: 1, crashes: 1, ..NONE };
    Bounds { same_key: true, ..bounds(&[0, 0], 0, budget) }
}
