//! Commands that take all they can get. Each ends by its limit or its timeout, and is started again.

/// What a bad neighbour runs, and the name of the row of a neighbour beside it.
pub(crate) const HOGS: [(&str, &str); 8] = [
    ("… beside one that takes processors", "while :; do :; done"),
    ("… beside a fork bomb", "bomb() { bomb | bomb & }; bomb; sleep 2"),
    ("… beside a thread bomb", THREADS),
    ("… beside one that takes memory", "tail /dev/zero"),
    ("… beside a flood of output", "yes"),
    ("… beside a hoarder of descriptors", DESCRIPTORS),
    ("… beside one that fills /tmp", "while :; do head -c 60000000 /dev/zero > /tmp/fill; done"),
    ("… beside one that fills /dev/shm", "while :; do head -c 60000000 /dev/zero > /dev/shm/fill; done"),
];

const THREADS: &str = r#"exec python3 -c '
import threading, time
def idle(): time.sleep(2)
while True:
    try: threading.Thread(target=idle).start()
    except RuntimeError: pass
'"#;

const DESCRIPTORS: &str = r#"exec python3 -c '
held = []
while True:
    try: held.append(open("/dev/null"))
    except OSError: held.clear()
'"#;
