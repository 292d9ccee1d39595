//! A command that exchanges a directory of its session with a link to outside, all the time. The
//! exchange is one system call, so the name always leads somewhere.

use std::{fs, os::unix::fs::PermissionsExt};

use anyhow::{Result, ensure};
use codelia_tests::{Exec, shell};

use super::workspace::Isolated;

/// In the name and the content of files outside.
pub(super) const MARKER: &str = "only-outside";

/// Exchanges a directory and a link until it is killed. 316 is `renameat2`, 2 is `RENAME_EXCHANGE`.
const EXCHANGE: &str = "
import ctypes, os, sys
outside, directory, link = sys.argv[1:]
os.makedirs(directory + '/tree')
for path in ('/f', '/tree/f'):
    open(directory + path, 'w').write('inside')
os.symlink(outside, link)
call = ctypes.CDLL(None, use_errno=True).syscall
exchange = lambda: call(316, -100, directory.encode(), -100, link.encode(), 2)
assert exchange() == 0, ctypes.get_errno()
print('swapping', flush=True)
while True:
    exchange()
";

impl Isolated {
    /// Exchanges `directory` with a link to the directory outside, until the result is dropped.
    /// Everyone may read and write outside, so that only the guard of the service prevents it.
    pub(super) async fn exchange(&self, directory: &str, link: &str) -> Result<Exec> {
        let outside = &self.outside;
        fs::create_dir(outside.join("tree"))?;
        for open in [outside, &outside.join("tree")] {
            fs::write(open.join(MARKER), MARKER)?;
            fs::set_permissions(open, PermissionsExt::from_mode(0o777))?;
        }
        self.client.put(&self.session.name, "exchange.py", EXCHANGE).await?;
        let script =
            format!("exec /usr/bin/python3 exchange.py {} {directory} {link}", outside.display());
        let mut swapping = Exec::start(&self.client, shell(&self.session.name, &script)).await?;
        swapping
            .until("the swapping starts", |seen| seen.stdout_text().contains("swapping"))
            .await?;
        // The control: a plain look at the same name reaches both.
        for name in ["tree/f", MARKER] {
            let path = self.directory.join(directory).join(name);
            ensure!(
                (0..1_000_000).any(|_| fs::read(&path).is_ok()),
                "the control never saw {name}"
            );
        }
        Ok(swapping)
    }
}
