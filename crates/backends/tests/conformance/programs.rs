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

/// Returns whether a case that needs this program can run here.
fn installed(program: &str) -> bool {
    let missing = (!Path::new(program).exists()).then(|| format!("{program} is not installed"));
    available("programs", missing.as_deref())
}

/// Runs a script that needs a program and must succeed without violations.
pub(crate) async fn works(fixture: &Fixture, program: &str, script: &str) {
    if !installed(program) {
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

async fn python_multiprocessing_and_asyncio_work(fixture: Fixture) {
    let script = r#"cat > t.py <<'END'
import asyncio, multiprocessing as m, signal, os
from multiprocessing.shared_memory import SharedMemory
def add(queue, lock, name):
    with lock:
        block = SharedMemory(name)
        block.buf[0] += 1
        block.close()
    queue.put(os.getpid())
def share(method):
    context = m.get_context(method)
    queue, lock, block = context.Queue(), context.Lock(), SharedMemory(create=True, size=1)
    children = [context.Process(target=add, args=(queue, lock, block.name)) for _ in range(3)]
    for child in children: child.start()
    assert len({queue.get() for _ in children}) == 3
    for child in children: child.join(); assert child.exitcode == 0
    assert block.buf[0] == 3
    block.close(); block.unlink()
async def talk():
    child = await asyncio.create_subprocess_exec("cat", stdin=-1, stdout=-1)
    assert (await child.communicate(b"hi"))[0] == b"hi"
    await asyncio.start_unix_server(lambda r, w: (w.write(b"hi"), w.close()), "socket")
    reader, _ = await asyncio.open_unix_connection("socket")
    assert await reader.read() == b"hi"
    got = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, got.set)
    await asyncio.to_thread(os.kill, os.getpid(), signal.SIGUSR1)
    await got.wait()
if __name__ == "__main__":
    for method in m.get_all_start_methods(): share(method)
    asyncio.run(talk())
END
/usr/bin/python3 t.py"#;
    works(&fixture, "/usr/bin/python3", script).await;
}

/// Builds a wheel from a source directory and installs it from there.
async fn pip_installs_from_local_sources(fixture: Fixture) {
    let script = r#"mkdir -p src/tiny dist
        echo 'answer = 42' > src/tiny/__init__.py
        printf '[project]\nname = "tiny"\nversion = "1.0"\n[tool.setuptools]\npackages = ["tiny"]\n' > src/pyproject.toml
        /usr/bin/pip3 wheel -q --no-index --no-build-isolation -w dist ./src
        /usr/bin/python3 -m venv v && v/bin/pip install -q --no-index --find-links dist tiny
        v/bin/python -c 'import tiny; assert tiny.answer == 42'"#;
    works(&fixture, "/usr/bin/pip3", script).await;
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

/// Installs a packed dependency and a linked one.
async fn npm_installs_from_local_sources(mut fixture: Fixture) {
    fixture.limits.memory_bytes = 1024 * MIB;
    let script = r#"for name in packed linked; do
            mkdir $name && echo 'module.exports = 21' > $name/index.js
            echo '{"name": "'$name'", "version": "1.0.0"}' > $name/package.json
        done
        (cd packed && npm pack --silent)
        mkdir app && cd app
        echo '{"name": "app", "dependencies": {"linked": "file:../linked"}, "scripts": {"check": "node c.js"}}' > package.json
        npm install --offline --no-audit --no-fund ../packed/packed-1.0.0.tgz
        echo "require('assert').equal(require('packed') + require('linked'), 42)" > c.js
        npm run --silent check"#;
    works(&fixture, "/usr/bin/npm", script).await;
}

async fn java_threads_and_security_settings_work(mut fixture: Fixture) {
    fixture.limits.memory_bytes = 1024 * MIB;
    let script = r#"cat > T.java <<'END'
import java.net.*;
import java.nio.file.*;
import java.util.concurrent.*;
public class T {
  public static void main(String[] a) throws Exception {
    var pool = Executors.newFixedThreadPool(8);
    if (pool.submit(() -> 42).get() != 42) throw new Error();
    pool.shutdown();
    if (java.security.MessageDigest.getInstance("SHA-256").digest(new byte[1]).length != 32) throw new Error();
    new java.security.SecureRandom().nextInt();
    if (new ProcessBuilder("true").start().waitFor() != 0) throw new Error();
    var server = new ServerSocket(0, 1, InetAddress.getLoopbackAddress());
    var sender = new Thread(() -> { try (var s = server.accept()) { s.getOutputStream().write(42); } catch (Exception e) {} });
    sender.start();
    if (new Socket(server.getInetAddress(), server.getLocalPort()).getInputStream().read() != 42) throw new Error();
    sender.join();
    var watch = FileSystems.getDefault().newWatchService();
    Path.of(".").register(watch, StandardWatchEventKinds.ENTRY_CREATE);
    Files.writeString(Path.of("new"), "");
    if (watch.poll(30, TimeUnit.SECONDS) == null) throw new Error();
  }
}
END
javac T.java && java T"#;
    works(&fixture, "/usr/bin/javac", script).await;
}

async fn go_builds_and_talks_on_loopback(mut fixture: Fixture) {
    fixture.limits.memory_bytes = 1024 * MIB;
    let script = r#"cat > t.go <<'END'
package main

import ("fmt"; "io"; "net"; "os/exec"; "sync")

func must(err error) { if err != nil { panic(err) } }

func main() {
	server, err := net.Listen("tcp", "127.0.0.1:0")
	must(err)
	go func() {
		for {
			peer, err := server.Accept()
			must(err)
			go func() { io.Copy(peer, peer); peer.Close() }()
		}
	}()
	var clients sync.WaitGroup
	for n := 1; n <= 50; n++ {
		clients.Add(1)
		go func(n int) {
			defer clients.Done()
			peer, err := net.Dial("tcp", server.Addr().String())
			must(err)
			fmt.Fprintln(peer, n)
			var back int
			fmt.Fscan(peer, &back)
			if back != n { panic(back) }
			peer.Close()
		}(n)
	}
	clients.Wait()
	must(exec.Command("true").Run())
}
END
GOCACHE=$PWD/cache GO111MODULE=off /usr/bin/go build -o t t.go && ./t"#;
    works(&fixture, "/usr/bin/go", script).await;
}

async fn git_commits_clones_and_packs(fixture: Fixture) {
    let git =
        ["/usr/bin/git", "/usr/local/bin/git"].into_iter().find(|path| Path::new(path).exists());
    let script = "git init -q a && cd a && git config user.email a@b && git config user.name a
        echo x > f && git add f && git commit -qm one && git clone -q . ../b && git -C ../b log --oneline | grep -q one
        git gc -q --aggressive && git fsck --strict && git -C ../b pull -q && git -C ../b worktree add -q ../c HEAD && cat ../c/f";
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
    let finished =
        fixture.launch(&session, &command(&["sh", "-c", &script])).await.unwrap().finish().await;
    assert_eq!(finished.stdout, "Hello, world!\n", "{finished:?}");
    assert!(finished.violations.is_empty(), "{finished:?}");
}

/// Copies the toolchain out of a home directory, with hard links if possible.
pub(crate) fn stage_toolchain(dir: &Path) -> Result<PathBuf, String> {
    let printed = Command::new("rustc")
        .args(["--print", "sysroot"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output();
    let printed =
        printed.map_err(|error| format!("cannot run rustc to find its sysroot: {error}"))?;
    let root = PathBuf::from(String::from_utf8_lossy(&printed.stdout).trim());
    let target = dir.join("toolchain");
    for how in ["-rl", "-r"] {
        fs::create_dir_all(&target).map_err(|error| error.to_string())?;
        let mut copy = Command::new("cp");
        copy.args([how, "--parents", "bin/cargo", "bin/rustc", "lib"])
            .arg(&target)
            .current_dir(&root);
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

/// Compiles a program and runs it to its end in gdb, with a stop in a function.
const GDB: &str = r#"printf 'int leaf(int n) { return n - 2; }\nint main(void) { return leaf(42) != 40; }\n' > m.c
    gcc -g -O0 -o m m.c
    gdb -q -batch -ex 'break leaf' -ex run -ex backtrace -ex 'print n' -ex continue ./m 2>&1"#;

async fn gdb_stops_and_continues_with_debug_policy(mut fixture: Fixture) {
    if !installed("/usr/bin/gdb") {
        return;
    }
    fixture.policy.process.debug = Some(true);
    let finished = fixture.sh(&fixture.session(), GDB).await;
    for line in ["leaf (n=42)", "in main ()", "$1 = 42", "exited normally"] {
        assert!(finished.stdout.contains(line), "{line}: {finished:?}");
    }
    assert!(finished.violations.is_empty(), "{finished:?}");
}

async fn gdb_is_refused_without_debug_policy(fixture: Fixture) {
    if !installed("/usr/bin/gdb") {
        return;
    }
    let finished = fixture.sh(&fixture.session(), GDB).await;
    assert!(!finished.stdout.contains("#0"), "{finished:?}");
    assert!(finished.violations.iter().any(|seen| seen.syscall == "ptrace"), "{finished:?}");
}

in_every_mode!(
    python_threads_and_processes_work,
    python_multiprocessing_and_asyncio_work,
    pip_installs_from_local_sources,
    node_workers_and_children_work,
    npm_installs_from_local_sources,
    java_threads_and_security_settings_work,
    go_builds_and_talks_on_loopback,
    gdb_stops_and_continues_with_debug_policy,
    gdb_is_refused_without_debug_policy,
    git_commits_clones_and_packs,
    gcc_and_make_build,
    perl_and_shell_tools_work,
    cargo_builds_offline,
);
