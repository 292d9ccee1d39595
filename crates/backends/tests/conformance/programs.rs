//! Installed programs work under the default policy, without violations.

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use codelia_types::Outcome;

use crate::{
    harness::{Fixture, command, in_every_mode, skip},
    require::available,
};

const MIB: u64 = 1024 * 1024;

/// Runs a script that needs a program and must succeed without violations.
async fn works(fixture: &Fixture, program: &str, script: &str) {
    let missing = (!Path::new(program).exists()).then(|| format!("{program} is not installed"));
    if !available("programs", missing.as_deref()) {
        return;
    }
    let finished = fixture.sh(&fixture.session(), &format!("set -e\n{script}\necho works")).await;
    assert_eq!(finished.outcome, Outcome::Exited(0), "{finished:?}");
    assert!(finished.stdout.ends_with("works\n"), "{finished:?}");
    assert!(finished.violations.is_empty(), "{finished:?}");
}

async fn python_threads_and_processes_work(fixture: Fixture) {
    let script = r#"cat > t.py <<'END'
import concurrent.futures as f, multiprocessing as m, subprocess, tempfile, socket, ssl, sqlite3, asyncio
def square(n): return n * n
if __name__ == "__main__":
    with f.ThreadPoolExecutor(8) as pool: assert sum(pool.map(square, range(100))) == 328350
    with m.Pool(2) as pool: assert pool.map(square, range(5)) == [0, 1, 4, 9, 16]
    assert subprocess.check_output(["sh", "-c", "echo hi | tr a-z A-Z"]) == b"HI\n"
    with tempfile.TemporaryFile() as t: t.write(b"x")
    sqlite3.connect("db.sqlite").execute("create table t (x)")
    async def talk():
        server = await asyncio.start_server(lambda r, w: (w.write(b"hi"), w.close()), "127.0.0.1", 0)
        reader, _ = await asyncio.open_connection(*server.sockets[0].getsockname())
        assert await reader.read() == b"hi"
    asyncio.run(talk())
END
/usr/bin/python3 t.py && /usr/bin/python3 -m venv --without-pip v && v/bin/python -c 'print(1)'"#;
    works(&fixture, "/usr/bin/python3", script).await;
}

async fn node_workers_and_children_work(mut fixture: Fixture) {
    fixture.limits.memory_bytes = 1024 * MIB;
    let script = r#"cat > t.js <<'END'
const { Worker } = require('worker_threads'), { execFileSync } = require('child_process'), http = require('http');
const assert = require('assert');
assert.equal(execFileSync('sh', ['-c', 'echo hi']).toString(), 'hi\n');
const worker = new Worker('require("worker_threads").parentPort.postMessage(42)', { eval: true });
worker.on('message', n => {
  assert.equal(n, 42);
  const server = http.createServer((_, r) => r.end('ok')).listen(0, '127.0.0.1', () =>
    http.get({ port: server.address().port, host: '127.0.0.1' }, r => { assert.equal(r.statusCode, 200); server.close(); }));
});
END
node t.js"#;
    works(&fixture, "/usr/bin/node", script).await;
}

async fn java_threads_and_security_settings_work(mut fixture: Fixture) {
    fixture.limits.memory_bytes = 1024 * MIB;
    let script = r#"cat > T.java <<'END'
import java.util.concurrent.*;
public class T {
  public static void main(String[] a) throws Exception {
    var pool = Executors.newFixedThreadPool(8);
    if (pool.submit(() -> 42).get() != 42) throw new Error();
    pool.shutdown();
    if (java.security.MessageDigest.getInstance("SHA-256").digest(new byte[1]).length != 32) throw new Error();
    new java.security.SecureRandom().nextInt();
    if (new ProcessBuilder("true").start().waitFor() != 0) throw new Error();
  }
}
END
javac T.java && java T"#;
    works(&fixture, "/usr/bin/javac", script).await;
}

async fn git_commits_and_clones(fixture: Fixture) {
    let git = ["/usr/bin/git", "/usr/local/bin/git"].into_iter().find(|path| Path::new(path).exists());
    let script = "git init -q a && cd a && git config user.email a@b && git config user.name a
        echo x > f && git add f && git commit -qm one && git clone -q . ../b && git -C ../b log --oneline | grep -q one";
    works(&fixture, git.unwrap_or("/usr/bin/git"), script).await;
}

async fn gcc_and_make_build(fixture: Fixture) {
    let script = r#"printf '#include <stdio.h>\n#include <pthread.h>\nint main(){puts("built");}\n' > m.c
        printf 'all: m\n\t./m\nm: m.c\n\tgcc -O1 -pthread -o m m.c\n' > Makefile
        make -j2 | grep -q built"#;
    works(&fixture, "/usr/bin/gcc", script).await;
}

async fn perl_and_shell_tools_work(fixture: Fixture) {
    let script = "seq 100 | sort -rn | head -1 | grep -qx 100; find /usr/share -maxdepth 1 | xargs -n 5 echo | awk 'END{exit NR==0}'
        tar cf - /etc/hosts 2>/dev/null | tar tf - | grep -q hosts; echo a b | sed s/a/c/ | cut -d' ' -f1 | grep -qx c
        date -u +%Y | grep -q 20; sleep 0.01; timeout 5 true; mktemp; ls -la / /proc/self > /dev/null; df . > /dev/null
        perl -e 'use POSIX; my $p = open(my $f, \"-|\", \"echo x\"); print <$f>; fork // die; wait'; nproc; uname -a; getent hosts localhost";
    works(&fixture, "/usr/bin/perl", script).await;
}

/// The policy opens a toolchain outside of /usr.
async fn cargo_builds_offline(mut fixture: Fixture) {
    let staged = tempfile::tempdir().unwrap();
    let toolchain = match stage_toolchain(staged.path()) {
        Ok(toolchain) => toolchain,
        Err(reason) => return skip("cargo", reason),
    };
    fixture.limits.memory_bytes = 1024 * MIB;
    fixture.policy.filesystem.read_only_paths = Some(vec![toolchain.clone()]);
    let session = fixture.session();
    let script = format!(
        "export PATH={}/bin:$PATH; cargo init -q --vcs none tiny && cd tiny && cargo build -q --offline && ./target/debug/tiny",
        toolchain.display()
    );
    let finished = fixture.launch(&session, &command(&["sh", "-c", &script])).await.unwrap().finish().await;
    assert_eq!(finished.stdout, "Hello, world!\n", "{finished:?}");
    assert!(finished.violations.is_empty(), "{finished:?}");
}

/// Copies the toolchain out of a home directory, with hard links if possible.
pub(crate) fn stage_toolchain(dir: &Path) -> Result<PathBuf, String> {
    let printed =
        Command::new("rustc").args(["--print", "sysroot"]).current_dir(env!("CARGO_MANIFEST_DIR")).output();
    let printed = printed.map_err(|error| format!("cannot run rustc to find its sysroot: {error}"))?;
    let root = PathBuf::from(String::from_utf8_lossy(&printed.stdout).trim());
    let target = dir.join("toolchain");
    for how in ["-rl", "-r"] {
        fs::create_dir_all(&target).map_err(|error| error.to_string())?;
        let mut copy = Command::new("cp");
        copy.args([how, "--parents", "bin/cargo", "bin/rustc", "lib"]).arg(&target).current_dir(&root);
        if copy.stderr(Stdio::null()).status().is_ok_and(|status| status.success()) {
            let open = |path| fs::set_permissions(path, Permissions::from_mode(0o755));
            return open(dir)
                .and_then(|()| open(&target))
                .map(|()| target)
                .map_err(|error| error.to_string());
        }
        fs::remove_dir_all(&target).map_err(|error| error.to_string())?;
    }
    Err(format!("cannot copy the toolchain at {}", root.display()))
}

in_every_mode!(
    python_threads_and_processes_work,
    node_workers_and_children_work,
    java_threads_and_security_settings_work,
    git_commits_and_clones,
    gcc_and_make_build,
    perl_and_shell_tools_work,
    cargo_builds_offline,
);
