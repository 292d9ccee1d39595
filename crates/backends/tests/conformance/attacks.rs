//! Attempts to break out of a sandbox. Each script prints `reached` if it succeeds. As a control,
//! each one must succeed in mode `logical`.

use std::{
    fs,
    net::TcpListener,
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener},
    },
    path::PathBuf,
    process::{Child, Command, Stdio},
};

use codelia_types::Outcome;

use crate::harness::{Fixture, Kind, Session, command, in_every_mode, is_root};

/// Attacks: description and script. [`Targets::env`] sets the variables.
const ATTACKS: &[(&str, &str)] = &[
    ("read another session by its path", "grep -q treasure $VICTIM/secret && echo reached"),
    (
        "read another session reached `..`",
        "grep -q treasure ../$VICTIM_NAME/secret && echo reached",
    ),
    (
        "climb from the working directory",
        "cd ../../../../.. && grep -q treasure .$VICTIM/secret && echo reached",
    ),
    (
        "read another session reached a link",
        "ln -s $VICTIM/secret l && grep -q treasure l && echo reached",
    ),
    (
        "read another session reached a hard link",
        "ln $VICTIM/secret h && grep -q treasure h && echo reached",
    ),
    ("write into another session", "echo evil > $VICTIM/planted && echo reached"),
    ("rename a file of another session", "mv $VICTIM/movable $VICTIM/moved && echo reached"),
    (
        "read reached the root of another process",
        "for p in /proc/[0-9]*; do grep -qs treasure $p/root$VICTIM/secret && echo reached; done",
    ),
    (
        "read reached the working directory of another process",
        "for p in /proc/[0-9]*; do grep -qs treasure $p/cwd/secret && echo reached; done",
    ),
    ("read the memory map of another process", "grep -q . /proc/$HOST_PID/maps && echo reached"),
    ("read a file in the host's /tmp", "grep -q treasure $SHARED_TMP && echo reached"),
    ("read a file in the host's /dev/shm", "grep -q treasure $SHARED_SHM && echo reached"),
    (
        "connect to an abstract socket",
        r#"perl -MSocket -e 'socket(S,AF_UNIX,SOCK_STREAM,0); connect(S,pack_sockaddr_un("\0".$ENV{ABSTRACT})) and print "reached"'"#,
    ),
    (
        "connect to a socket file in another session",
        r#"perl -MSocket -e 'socket(S,AF_UNIX,SOCK_STREAM,0); connect(S,pack_sockaddr_un("$ENV{VICTIM}/socket")) and print "reached"'"#,
    ),
    (
        "connect to the host's loopback",
        r#"perl -MSocket -e 'socket(S,AF_INET,SOCK_STREAM,0); connect(S,pack_sockaddr_in($ENV{PORT},INADDR_LOOPBACK)) and print "reached"'"#,
    ),
    (
        "collide with a port of the host",
        r#"perl -MSocket -e 'socket(S,AF_INET,SOCK_STREAM,0); bind(S,pack_sockaddr_in($ENV{PORT},INADDR_LOOPBACK)) or print "reached"'"#,
    ),
    (
        "see an interface of the host",
        "grep -v -e lo: -e '|' /proc/net/dev | grep -q : && echo reached",
    ),
    ("open a packet socket", r#"perl -e 'socket(S,17,3,0) and print "reached"'"#),
    ("open a raw socket", r#"perl -e 'socket(S,2,3,1) and print "reached"'"#),
    ("see the host's processes", "[ -e /proc/$HOST_PID ] && echo reached"),
    ("signal a process of the host", "kill -0 $HOST_PID && echo reached"),
    ("kill a process of the host", "kill -9 $HOST_PID && echo reached"),
    ("see more than its own processes", "[ $(ls -d /proc/[0-9]* | wc -l) -gt 12 ] && echo reached"),
    ("have the host's name", "[ $(uname -n) = $HOST_NAME ] && echo reached"),
    (
        "change the host's name",
        r#"perl -e '$n=$ENV{HOST_NAME}; syscall(170,$n,length $n)==0 and print "reached"'"#,
    ),
    ("read the host's passwords", "grep -q . /etc/shadow && echo reached"),
    ("see the home of root", "ls /root && echo reached"),
    ("see homes", "[ -e /home ] && echo reached"),
    (
        "see the host's accounts",
        "cmp -s /etc/passwd $ACCOUNTS && echo reached; grep -q daemon /etc/passwd && echo reached",
    ),
    ("see the kernel's devices and groups", "[ -e /sys/kernel ] && echo reached"),
    ("write into /usr", "touch /usr/$MARK && rm /usr/$MARK && echo reached"),
    ("write into /etc", "touch /etc/$MARK && rm /etc/$MARK && echo reached"),
    ("write into /", "touch /$MARK && rm /$MARK && echo reached"),
    ("write into /dev", "touch /dev/$MARK && rm /dev/$MARK && echo reached"),
    ("replace codelia-init", "[ -w $INIT ] && echo reached"),
    (
        "set a variable of the kernel",
        "cat /proc/sys/vm/swappiness > /proc/sys/vm/swappiness && echo reached",
    ),
    (
        "see devices of the host",
        "{ [ -e /dev/kmsg ] || [ -e /dev/tty1 ] || [ -e /dev/mem ]; } && echo reached",
    ),
    ("make a device", "mknod null c 1 3 && rm null && echo reached"),
    ("be root", "[ $(id -u) = 0 ] && echo reached"),
    ("gain by a set-user-id program", "[ $(./setuid-id -u) = 0 ] && echo reached"),
    (
        "have a set-user-id program of the host",
        "findmnt -no OPTIONS -T /usr/bin | grep -qv nosuid && echo reached",
    ),
    (
        "have capabilities",
        "grep -E '^Cap(Prm|Eff|Bnd|Inh|Amb)' /proc/self/status | grep -qv 0000000000000000 && echo reached",
    ),
    ("gain privileges by executing", "grep -q 'NoNewPrivs:.0' /proc/self/status && echo reached"),
    ("go without a filter", "grep -q 'Seccomp:.0' /proc/self/status && echo reached"),
    ("mount", "mkdir -p m; mount -t tmpfs none m && umount m && echo reached"),
    ("make a user namespace", "unshare --user true && echo reached"),
    ("make a mount namespace", "unshare --mount true && echo reached"),
    (
        "clone into a user namespace",
        r#"perl -e '$p=syscall(56,0x10000011,0,0,0,0); exit if $p==0; $p>0 and print "reached"'"#,
    ),
    (
        "enter a namespace",
        r#"perl -e 'open(N,"<","/proc/self/ns/net"); syscall(308,fileno(N),0)==0 and print "reached"'"#,
    ),
    ("change the root", r#"perl -e 'chroot(".") and print "reached"'"#),
    ("trace a process", r#"perl -e 'syscall(101,0,0,0,0)==0 and print "reached"'"#),
    (
        "use the keyring",
        r#"perl -e '($t,$n,$x)=("user","codelia-test","x"); syscall(248,$t,$n,$x,1,-1)>0 and print "reached"'"#,
    ),
    (
        "load a BPF program",
        r#"perl -e '$a=pack("L4x112",2,4,4,1); syscall(321,0,$a,128)>=0 and print "reached"'"#,
    ),
    ("set up io_uring", r#"perl -e '$a="\0"x120; syscall(425,1,$a)>=0 and print "reached"'"#),
];

/// Things on the host that an attack may reach.
struct Targets {
    victim: Session,
    process: Child,
    port: TcpListener,
    abstract_name: String,
    shared: [PathBuf; 2],
    accounts: PathBuf,
    mark: String,
    _listeners: [UnixListener; 2],
}

impl Targets {
    fn new(fixture: &Fixture) -> Self {
        let victim = fixture.session();
        victim.write("secret", "treasure\n");
        victim.write("movable", "");
        let mark = format!("codelia-test-{}", victim.ids.uid);
        let shared = ["/tmp", "/dev/shm"].map(|dir| PathBuf::from(dir).join(&mark));
        for path in &shared {
            fs::write(path, "treasure\n").unwrap();
        }
        let abstract_name = format!("codelia-test{}", victim.dir.display());
        let address = SocketAddr::from_abstract_name(&abstract_name).unwrap();
        let in_victim = UnixListener::bind(victim.dir.join("socket")).unwrap();
        victim.chown(&victim.dir.join("socket"));
        let process = Command::new("sleep")
            .arg("1000")
            .current_dir(&victim.dir)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        Self {
            process: process.unwrap(),
            port: TcpListener::bind(("127.0.0.1", 0)).unwrap(),
            _listeners: [UnixListener::bind_addr(&address).unwrap(), in_victim],
            accounts: victim.write("accounts", &fs::read_to_string("/etc/passwd").unwrap()),
            victim,
            abstract_name,
            shared,
            mark,
        }
    }

    fn env(&self) -> Vec<(&'static str, String)> {
        let host_name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        vec![
            ("VICTIM", self.victim.dir.display().to_string()),
            ("VICTIM_NAME", self.victim.dir.file_name().unwrap().to_string_lossy().into_owned()),
            ("HOST_PID", self.process.id().to_string()),
            ("HOST_NAME", host_name.trim().to_owned()),
            ("PORT", self.port.local_addr().unwrap().port().to_string()),
            ("ABSTRACT", self.abstract_name.clone()),
            ("SHARED_TMP", self.shared[0].display().to_string()),
            ("SHARED_SHM", self.shared[1].display().to_string()),
            ("ACCOUNTS", self.accounts.display().to_string()),
            ("MARK", self.mark.clone()),
            ("INIT", "/.codelia-init".to_owned()),
        ]
    }
}

impl Drop for Targets {
    fn drop(&mut self) {
        let _ = (self.process.kill(), self.process.wait());
        self.shared.iter().for_each(|path| drop(fs::remove_file(path)));
    }
}

/// Runs every attack in its own sandbox. Returns those that succeeded.
async fn successful_attacks(fixture: &Fixture) -> Vec<&'static str> {
    let mut reached = Vec::new();
    for (name, script) in ATTACKS {
        if succeeds(fixture, script).await {
            reached.push(*name);
        }
    }
    reached
}

async fn succeeds(fixture: &Fixture, script: &str) -> bool {
    let (targets, attacker) = (Targets::new(fixture), fixture.session());
    let program = attacker.dir.join("setuid-id");
    fs::copy("/usr/bin/id", &program).unwrap();
    Command::new("chmod").arg("4755").arg(&program).status().unwrap();
    let mut attack = command(&["sh", "-c", &format!("{script}\necho tried")]);
    attack.env = targets.env().into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
    let finished = fixture.launch(&attacker, &attack).await.unwrap().finish().await;
    // An attack that did not run to its end proves nothing.
    assert!(finished.stdout.contains("tried"), "{script}: {finished:?}");
    assert_eq!(finished.outcome, Outcome::Exited(0), "{script}: {finished:?}");
    finished.stdout.contains("reached")
}

async fn attacks_fail(fixture: Fixture) {
    let reached = successful_attacks(&fixture).await;
    let declared = crate::exceptions::attacks(fixture.kind);
    assert_eq!(reached, declared, "successful attacks differ from the declared exceptions");
}

/// Checks the victim from the host after a destructive attack.
async fn victim_is_untouched(fixture: Fixture) {
    let (mut targets, attacker) = (Targets::new(&fixture), fixture.session());
    let before = fs::read_dir(&targets.victim.dir).unwrap().count();
    let mut attack = command(&[
        "sh",
        "-c",
        "kill -9 $HOST_PID -1; rm -rf $VICTIM/* ../*; echo evil > $VICTIM/x",
    ]);
    attack.env = targets.env().into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
    fixture.launch(&attacker, &attack).await.unwrap().finish().await;
    assert!(targets.process.try_wait().unwrap().is_none(), "the victim's process was killed");
    assert_eq!(fs::read_dir(&targets.victim.dir).unwrap().count(), before);
}

in_every_mode!(attacks_fail, victim_is_untouched);

#[tokio::test]
async fn every_attack_succeeds_without_isolation() {
    if !is_root("an unprivileged user reaches less of the host even without a sandbox") {
        return;
    }
    let fixture = Fixture::new(Kind::Logical).await.unwrap();
    let reached = successful_attacks(&fixture).await;
    let failed: Vec<_> =
        ATTACKS.iter().map(|(name, _)| *name).filter(|name| !reached.contains(name)).collect();
    assert_eq!(failed, MADE_FOR_SANDBOXES, "attacks that fail without isolation prove nothing");
}

/// Attacks on things that only a sandbox has. They cannot succeed without one.
const MADE_FOR_SANDBOXES: [&str; 1] = ["replace codelia-init"];
