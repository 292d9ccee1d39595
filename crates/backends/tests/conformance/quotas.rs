//! Disk quotas of the kernel bite in commands: of the project of a session, and of its user. They
//! need a file system with quotas, which the VM of `vm.rs` has.

use std::{fs::File, path::Path};

use codelia_sys::quota::{Amounts, QuotaKind, Quotas, project_of, set_project};
use codelia_types::Outcome;

use crate::{
    harness::{Fixture, Kind, Session, in_mode},
    require::available,
};

const LIMITS: Amounts = Amounts { bytes: 4 << 20, inodes: 60 };

/// Writes 12 MiB, then empty files until one fails. Prints the errors, the size, and the number.
const FILL: &str =
    "dd if=/dev/zero of=big bs=64k count=192 2>&1 | grep -o 'quota exceeded'; stat -c %s big; rm big
    truncate -s 1G sparse && ln sparse link && echo sparse
    i=0; while [ $i -lt 100 ] && true > n$i; do i=$((i + 1)); done 2>/dev/null; echo $i";

/// Tries to leave the project: by its id, by a directory that does not hand it on, by the newer
/// call.
const LEAVE: &str = r#"perl -e '
    $p = "out"; mkdir $p; open($f, "<", $p) or die;
    $x = pack("L5x8", 0); printf "%d ", ioctl($f, 0x401c5820, $x) ? 1 : 0;
    $n = pack("Q", 0); printf "%d ", ioctl($f, 0x40086602, $n) ? 1 : 0;
    $x = pack("L5x8", 0); printf "%d", syscall(469, -100, $p, $x, 28, 0) == 0 ? 1 : 0'"#;

/// The quotas of a kind, if this file system has some.
fn quotas(session: &Session, kind: QuotaKind) -> Option<Quotas> {
    let quotas = Quotas::open(&session.dir, kind).unwrap();
    let missing = (!quotas.are_enforced().unwrap()).then_some("the file system has no quotas");
    available("quota", missing).then_some(quotas)
}

/// Fills a session with limits and one without, at the same time.
async fn fill(fixture: &Fixture, session: &Session, quotas: &Quotas, room: u64) {
    quotas.set_limits(session.ids.uid, LIMITS).unwrap();
    let neighbour = fixture.session();
    let (limited, free) = tokio::join!(fixture.sh(session, FILL), fixture.sh(&neighbour, FILL));
    let lines: Vec<_> = limited.stdout.lines().collect();
    let [error, size, sparse, files] = lines[..] else { panic!("{limited:?}") };
    assert_eq!((error, sparse), ("quota exceeded", "sparse"), "{limited:?}");
    let bytes = size.parse::<u64>().unwrap();
    assert!(bytes <= LIMITS.bytes && bytes > LIMITS.bytes - (1 << 20), "{limited:?}");
    assert!(files.parse::<u64>().unwrap() <= LIMITS.inodes - room, "{limited:?}");
    assert_eq!(free.stdout, "12582912\nsparse\n100\n", "the control: {free:?}");
    let used = quotas.usage(session.ids.uid).unwrap();
    assert!(used.inodes <= LIMITS.inodes && used.inodes > 50, "{used:?}");
    quotas.remove_limits(session.ids.uid).unwrap();
    let after = fixture.sh(session, "dd if=/dev/zero of=big bs=1M count=8 2>/dev/null").await;
    assert_eq!(after.outcome, Outcome::Exited(0), "the control: without the limit");
}

async fn project_quota_refuses_bytes_and_inodes(fixture: Fixture) {
    let session = fixture.session();
    let Some(quotas) = quotas(&session, QuotaKind::Project) else { return };
    set_project(File::open(&session.dir).unwrap(), session.ids.uid).unwrap();
    fill(&fixture, &session, &quotas, 2).await;
}

async fn user_quota_refuses_bytes_and_inodes(fixture: Fixture) {
    let session = fixture.session();
    let Some(quotas) = quotas(&session, QuotaKind::User) else { return };
    fill(&fixture, &session, &quotas, 2).await;
}

fn project_id(path: &Path) -> (u32, bool) {
    let project = project_of(File::open(path).unwrap()).unwrap();
    (project.id, project.is_inherited)
}

async fn command_cannot_leave_project(fixture: Fixture) {
    let session = fixture.session();
    if quotas(&session, QuotaKind::Project).is_none() {
        return;
    }
    let id = session.ids.uid;
    set_project(File::open(&session.dir).unwrap(), id).unwrap();
    assert_eq!(fixture.sh(&session, LEAVE).await.stdout, "0 0 0");
    assert_eq!(project_id(&session.dir.join("out")), (id, true), "it is inherited");
    let open = Fixture::new(Kind::Logical).await.unwrap();
    let control = open.session();
    set_project(File::open(&control.dir).unwrap(), id).unwrap();
    assert!(open.sh(&control, LEAVE).await.stdout.starts_with("1 1"), "the control: no filter");
    assert_eq!(project_id(&control.dir.join("out")), (0, false));
}

in_mode!(bwrap = Bwrap:
    project_quota_refuses_bytes_and_inodes,
    user_quota_refuses_bytes_and_inodes,
    command_cannot_leave_project,
);
in_mode!(nsjail = Nsjail: project_quota_refuses_bytes_and_inodes);
in_mode!(native = Native: project_quota_refuses_bytes_and_inodes, user_quota_refuses_bytes_and_inodes);
