//! The environment of a command, and how its end is reported.

use codelia_types::Outcome;

use crate::harness::{Fixture, command};

#[tokio::test]
async fn exit_code_is_reported() {
    let fixture = Fixture::new().await;
    for code in [0, 1, 7, 255] {
        let finished = fixture.run(&["sh", "-c", &format!("exit {code}")]).await;
        assert_eq!(finished.outcome, Outcome::Exited(code));
    }
}

#[tokio::test]
async fn fatal_signal_is_reported() {
    let fixture = Fixture::new().await;
    for signal in [1, 9, 11, 15] {
        let finished = fixture.run(&["sh", "-c", &format!("kill -{signal} $$")]).await;
        assert_eq!(finished.outcome, Outcome::Signaled(signal));
    }
}

#[tokio::test]
async fn signal_reaches_process_group() {
    let fixture = Fixture::new().await;
    let mut started =
        fixture.start(&["sh", "-c", "trap 'exit 5' USR1; echo ready; read line"]).await;
    assert_eq!(started.line(), "ready");
    started.running.signal(10).await;
    assert_eq!(started.running.wait().await.0, Outcome::Exited(5));
    assert_eq!(started.running.wait().await.0, Outcome::Exited(5), "wait can be called again");
    assert!(started.running.destroy().await.is_clean());
}

#[tokio::test]
async fn streams_pass_every_byte() {
    let fixture = Fixture::new().await;
    let input: Vec<u8> =
        (0..3_000_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let finished = fixture.run_with(&command(&["tee", "/dev/stderr"]), &input).await;
    assert_eq!(finished.outcome, Outcome::Exited(0));
    assert!(finished.stdout == input && finished.stderr == input);
}

#[tokio::test]
async fn environment_is_only_plan_and_command() {
    let fixture = Fixture::new().await;
    let mut env = command(&["env"]);
    env.env =
        [("LANG", "de"), ("OWN", "a=b\n")].map(|(key, value)| (key.into(), value.into())).into();
    let mut expected = fixture.plan().env;
    expected.extend(env.env.clone());
    let expected: String = expected.iter().map(|(key, value)| format!("{key}={value}\n")).collect();
    assert_eq!(fixture.run_with(&env, b"").await.text(), expected);
}

#[tokio::test]
async fn command_has_three_descriptors() {
    let fixture = Fixture::new().await;
    // A descriptor without close-on-exec.
    let leaky = rustix::io::dup(std::io::stdin()).unwrap();
    rustix::io::fcntl_setfd(&leaky, rustix::io::FdFlags::empty()).unwrap();
    let finished = fixture.run(&["sh", "-c", "ls /proc/$$/fd; true"]).await;
    assert_eq!(finished.text(), "0\n1\n2\n");
    let control = fixture.run(&["sh", "-c", "exec 7</dev/null; ls /proc/$$/fd; true"]).await;
    assert_eq!(control.text(), "0\n1\n2\n7\n");
}

#[tokio::test]
async fn command_starts_with_default_signals() {
    let fixture = Fixture::new().await;
    let text = fixture.run(&["grep", "-E", "Sig(Blk|Ign)", "/proc/self/status"]).await.text();
    assert_eq!(text, "SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n");
}

#[tokio::test]
async fn command_leads_its_own_session() {
    let fixture = Fixture::new().await;
    // Fields of stat: pid, name, state, parent, group, session.
    let text = fixture.run(&["cat", "/proc/self/stat"]).await.text();
    let fields: Vec<&str> = text.split(' ').collect();
    assert_eq!((fields[0], fields[0]), (fields[4], fields[5]));
}

#[tokio::test]
async fn working_directory_is_inside_root() {
    let fixture = Fixture::new().await;
    std::fs::create_dir_all(fixture.root.path().join("a/b")).unwrap();
    let root = fixture.root.path().canonicalize().unwrap();
    for (requested, expected) in
        [("", root.clone()), ("a/b", root.join("a/b")), ("a/b/..", root.join("a"))]
    {
        let mut pwd = command(&["pwd"]);
        pwd.working_directory = requested.to_owned();
        assert_eq!(fixture.run_with(&pwd, b"").await.text().trim_end(), expected.to_str().unwrap());
    }
}

#[tokio::test]
async fn program_is_found_in_command_path() {
    let fixture = Fixture::new().await;
    let program = fixture.root.path().join("own");
    std::fs::write(&program, "#!/bin/sh\necho own\n").unwrap();
    std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .unwrap();
    let mut own = command(&["own"]);
    own.env.insert("PATH".into(), format!("/nonexistent:{}", fixture.root.path().display()));
    assert_eq!(fixture.run_with(&own, b"").await.text(), "own\n");
    assert_eq!(fixture.run(&["./own"]).await.text(), "own\n");
}

#[tokio::test]
async fn arguments_larger_than_socket_buffer_arrive() {
    let fixture = Fixture::new().await;
    let words: Vec<String> = (0..12).map(|_| "x".repeat(100_000)).collect();
    let mut argv = vec!["printf", "%s"];
    argv.extend(words.iter().map(String::as_str));
    assert_eq!(fixture.run(&argv).await.stdout, vec![b'x'; 1_200_000]);
}

#[tokio::test]
async fn usage_counts_command_time() {
    for fixture in [Fixture::new().await, Fixture::without_groups().await] {
        let busy = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done";
        let usage = fixture.run(&["sh", "-c", busy]).await.usage;
        assert!(usage.cpu_time.as_millis() > 10, "{usage:?}");
        assert!(usage.peak_memory_bytes > 100_000, "{usage:?}");
        assert!(usage.wall_time.as_millis() > 10, "{usage:?}");
    }
}
