//! Commands that use all they can get. Each ends by a limit or timeout and is started again.

/// Row names, and the scripts of the noisy neighbour.
pub(crate) const HOGS: [(&str, &str); 8] = [
    ("… next to a CPU hog", "while :; do :; done"),
    ("… next to a fork bomb", "bomb() { bomb | bomb & }; bomb; sleep 2"),
    ("… next to a thread bomb", THREADS),
    ("… next to a memory hog", "tail /dev/zero"),
    ("… next to an output flood", "yes"),
    ("… next to a descriptor hog", DESCRIPTORS),
    ("… next to one that fills /tmp", "while :; do head -c 60000000 /dev/zero > /tmp/fill; done"),
    (
        "… next to one that fills /dev/shm",
        "while :; do head -c 60000000 /dev/zero > /dev/shm/fill; done",
    ),
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
