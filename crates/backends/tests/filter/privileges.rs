//! A command has no privileges and cannot gain any.

use crate::harness::{Fixture, Kind};

async fn capabilities_are_empty_and_cannot_be_gained(fixture: Fixture) {
    let session = fixture.session();
    let status = fixture.sh(&session, "cat /proc/self/status").await.stdout;
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(":\t"));
        line.unwrap_or_else(|| panic!("no {name} in {status}")).to_owned()
    };
    // gVisor has no ambient set and does not show NoNewPrivs.
    let is_linux = fixture.kind != Kind::Runsc;
    let sets = ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"];
    for set in sets.into_iter().filter(|set| is_linux || *set != "CapAmb") {
        assert_eq!(field(set), "0000000000000000", "{set}");
    }
    assert_eq!(field("Seccomp"), "2");
    assert!(!is_linux || field("NoNewPrivs") == "1");
    let uid = fixture.ids_inside(&session).uid;
    assert_eq!(field("Uid"), format!("{uid}\t{uid}\t{uid}\t{uid}"));
}

async fn securebits_are_locked(fixture: Fixture) {
    // prctl(PR_GET_SECUREBITS): all but KEEP_CAPS, and every lock.
    let ask = "import ctypes; print(bin(ctypes.CDLL(None).prctl(27, 0, 0, 0, 0)))";
    let expected = match fixture.kind {
        // Locking them takes a capability that a container does not have. They can only grant what
        // is in the bounding set, which is empty.
        Kind::Runc | Kind::Podman => "0b0\n",
        // gVisor has no securebits.
        Kind::Runsc => "-0b1\n",
        _ => "0b11101111\n",
    };
    assert_eq!(fixture.stdout_of(&format!("python3 -c '{ask}'")).await, expected);
}

async fn init_cannot_be_inspected(fixture: Fixture) {
    let stdout = fixture
        .stdout_of("for f in mem environ maps fd/0 root cwd exe; do cat /proc/1/$f 2>/dev/null && echo read; done; echo held")
        .await;
    assert_eq!(stdout, "held\n");
}

in_every_runtime!(
    capabilities_are_empty_and_cannot_be_gained,
    securebits_are_locked,
    init_cannot_be_inspected,
);
