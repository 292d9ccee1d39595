//! Programs that watch files for changes work in the workspace.

use crate::{
    harness::{Fixture, in_every_mode},
    programs::works,
};

async fn inotifywait_reports_changes_below_a_directory(fixture: Fixture) {
    let script = "mkdir -p d/e
        inotifywait -m -r --format '%e %w%f' d > log 2> err &
        until grep -q established err; do sleep 0.05; done
        echo x > d/e/f; mv d/e/f d/g; rm d/g
        until grep -q '^DELETE d/g$' log; do sleep 0.05; done
        kill $!
        grep -q '^CLOSE_WRITE,CLOSE d/e/f$' log; grep -q '^MOVED_TO d/g$' log";
    works(&fixture, "/usr/bin/inotifywait", script).await;
}

/// A loop like that of `cargo watch`: builds after each change, whether a file is written or
/// replaced.
async fn build_loop_rebuilds_on_change(fixture: Fixture) {
    let script = r#"cat > watch.py <<'END'
import ctypes, os, select, subprocess
IN_CLOSE_WRITE, IN_MOVED_TO = 0x8, 0x80
libc = ctypes.CDLL(None)
changes = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
assert changes >= 0 and libc.inotify_add_watch(changes, b"src", IN_CLOSE_WRITE | IN_MOVED_TO) >= 0
poll = select.epoll()
poll.register(changes, select.EPOLLIN)
while True:
    subprocess.run("make -s && ./m", shell=True, check=True)
    poll.poll()
    os.read(changes, 65536)
END
        mkdir src && printf '#include <stdio.h>\nint main(void) { puts("one"); }\n' > src/m.c
        printf 'm: src/m.c\n\tgcc -o m src/m.c\n' > Makefile
        /usr/bin/python3 watch.py > log &
        until grep -q one log; do sleep 0.05; done
        sed -i s/one/two/ src/m.c
        until grep -q two log; do sleep 0.05; done
        sed s/two/three/ src/m.c > new && cat new > src/m.c
        until grep -q three log; do sleep 0.05; done
        kill $!"#;
    works(&fixture, "/usr/bin/gcc", script).await;
}

async fn node_watches_directory(mut fixture: Fixture) {
    fixture.limits.memory_bytes = 1024 * 1024 * 1024;
    let script = r#"cat > t.js <<'END'
const fs = require('fs'), seen = new Set();
fs.mkdirSync('d');
const watcher = fs.watch('d', (_, name) => {
  seen.add(name);
  if (seen.has('written') && seen.has('renamed')) watcher.close();
});
fs.writeFileSync('d/written', 'x');
fs.writeFileSync('d/new', 'x');
fs.renameSync('d/new', 'd/renamed');
END
node t.js"#;
    works(&fixture, "/usr/bin/node", script).await;
}

in_every_mode!(
    inotifywait_reports_changes_below_a_directory,
    build_loop_rebuilds_on_change,
    node_watches_directory,
);
