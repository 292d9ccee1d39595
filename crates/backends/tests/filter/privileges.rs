//! A command has no privilege and can gain none.

use crate::harness::{Fixture, Kind, in_every_mode};

async fn capabilities_are_empty_and_cannot_be_gained(fixture: Fixture) {
    let session = fixture.session();
    let status = fixture.sh(&session, "cat /proc/self/status").await.stdout;
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(":\t"));
        line.unwrap_or_else(|| panic!("no {name} in {status}")).to_owned()
    };
    // gVisor has no set that survives an exec, and does not say that privileges cannot be gained.
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
        // Locking them takes a capability that a container never has, and they give only what is in the
        // bounding set: nothing.
        Kind::Runc | Kind::Podman => "0b0\n",
        // gVisor has no such bits.
        Kind::Runsc => "-0b1\n",
        _ => "0b11101111\n",
    };
    assert_eq!(fixture.stdout_of(&format!("python3 -c '{ask}'")).await, expected);
}

async fn init_cannot_be_inspected(fixture: Fixture) {
    let said = fixture
        .stdout_of("for f in mem environ maps fd/0 root cwd exe; do cat /proc/1/$f 2>/dev/null && echo read; done; echo held")
        .await;
    assert_eq!(said, "held\n");
}

in_every_mode!(capabilities_are_empty_and_cannot_be_gained, securebits_are_locked, init_cannot_be_inspected,);
