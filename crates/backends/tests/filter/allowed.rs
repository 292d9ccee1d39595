//! Ordinary programs pass the filter without violations.

use codelia_types::Outcome;

use crate::{
    harness::Fixture,
    syscall_probe::{probe, session},
};

async fn threads_forks_memfds_and_locks_work(fixture: Fixture) {
    let Some(session) = session(&fixture) else { return };
    let finished = probe(&fixture, &session, &["ordinary"]).await;
    assert_eq!((finished.outcome, finished.stdout.as_str()), (Outcome::Exited(0), "0\n"));
    assert_eq!(finished.violations, []);
}

async fn rename_and_link_work_with_allowed_executables(mut fixture: Fixture) {
    let programs = ["sh", "mkdir", "mv", "ln", "cat"].map(|name| format!("/usr/bin/{name}").into());
    fixture.policy.process.allowed_executables = Some(programs.to_vec());
    let stdout = fixture
        .stdout_of(
            "mkdir a b; echo text > a/f; mv a/f b/g; ln b/g a/h; cat a/h; mv -T a c; cat c/h",
        )
        .await;
    assert_eq!(stdout, "text\ntext\n");
}

/// Programs that switch core dumps off, install a filter, flush disks, open terminals or keep
/// modes. Each runs only if the sandbox has it.
const SELF_RESTRICTING: &str = "has() { command -v $1 > /dev/null; }
    has ssh-agent && { ssh-agent true || echo ssh-agent; }
    has gpg && { mkdir -m 700 keys; gpg --homedir keys --batch -q --passphrase '' --quick-generate-key a@b.c || echo gpg; }
    has man && { : > conf; echo '.TH page 1' > page.1; man -C conf -P cat -l ./page.1 > /dev/null || echo man; }
    has file && { file /usr/bin/env | grep -q ELF || echo file; }
    has script && { script -qec true /dev/null > /dev/null || echo script; }
    has git && { git init -q repo && git -C repo status > /dev/null || echo git; }
    sync || echo sync
    ulimit -c 0 || echo ulimit
    touch f && cp -p f g && chmod 750 f && tar cf - f | tar xpf - || echo modes";

async fn programs_that_restrict_themselves_work(fixture: Fixture) {
    let finished = fixture.sh(&fixture.session(), SELF_RESTRICTING).await;
    assert_eq!(
        (finished.stdout.as_str(), finished.violations),
        ("", Vec::new()),
        "{}",
        finished.stderr
    );
}

in_every_runtime!(
    threads_forks_memfds_and_locks_work,
    rename_and_link_work_with_allowed_executables,
    programs_that_restrict_themselves_work,
);
