//! The built programs under test, and how they are called.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

/// Where `codelia` and its `codelia-init` are.
#[derive(Debug, Clone)]
pub struct Program {
    codelia: PathBuf,
    init: Option<PathBuf>,
}

impl Program {
    /// Finds them in the target directory this test was built in.
    pub fn find() -> Result<Self> {
        let exe = std::env::current_exe().context("the test's own path")?;
        // target/{profile}/codelia-benches or target/{profile}/deps/e2e-…
        let found =
            exe.ancestors().skip(1).take(2).map(|dir| dir.join("codelia")).find(|path| path.is_file());
        let Some(codelia) = found else {
            bail!(
                "no built `codelia` near {}: run `make test`, or `cargo build --workspace --bins`",
                exe.display()
            );
        };
        let init = std::env::var_os("CODELIA_INIT").map(PathBuf::from);
        Ok(Self { codelia, init })
    }

    /// Copies both into `dir`, where any user may execute them, and uses the copies: `codelia`
    /// then finds its init beside itself.
    pub fn copied_into(&self, dir: &Path) -> Result<Self> {
        let copy = dir.join("codelia");
        std::fs::copy(&self.codelia, &copy)?;
        let beside = self.codelia.with_file_name("codelia-init");
        std::fs::copy(self.init.as_ref().unwrap_or(&beside), dir.join("codelia-init"))
            .context("codelia-init: run `make test`, or `scripts/build-init` and set CODELIA_INIT")?;
        Ok(Self { codelia: copy, init: None })
    }

    /// Where `codelia` is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.codelia
    }

    /// A call of `codelia` in a clean environment that ends with the thread that starts it, so that
    /// nothing outlives a test that is killed.
    #[must_use]
    pub fn command(&self) -> Command {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "TERM", "--"]).arg(&self.codelia);
        self.set_environment(&mut command);
        command
    }

    /// The same as another user, who may write to `home`.
    #[must_use]
    pub fn command_as(&self, uid: u32, home: &Path) -> Command {
        let mut command = Command::new("setpriv");
        let id = uid.to_string();
        command.args(["--reuid", &id, "--regid", &id, "--clear-groups", "--pdeathsig", "TERM", "--"]);
        command.arg(&self.codelia);
        self.set_environment(&mut command);
        command.env("HOME", home);
        command
    }

    /// Gives a command what `codelia` needs to know and nothing of the caller's own settings.
    pub fn set_environment(&self, command: &mut Command) {
        command.env_clear().current_dir("/");
        for name in ["PATH", "HOME", "LANG", "TMPDIR"] {
            if let Some(value) = std::env::var_os(name) {
                command.env(name, value);
            }
        }
        if let Some(init) = &self.init {
            command.env("CODELIA_INIT", init);
        }
        if let Some(nsjail) = std::env::var_os("CODELIA_NSJAIL") {
            command.env("CODELIA_NSJAIL", nsjail);
        }
    }
}
