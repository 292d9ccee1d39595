//! Commands that take all they can get. Each ends by its limit or its timeout, and is started again.

/// What a bad neighbour runs: processors, processes, memory, output, files.
pub(crate) const HOGS: [&str; 5] = [
    "while :; do :; done",
    "bomb() { bomb | bomb & }; bomb; sleep 1",
    "tail /dev/zero",
    "yes",
    "while :; do head -c 60000000 /dev/zero > /tmp/fill; done",
];
